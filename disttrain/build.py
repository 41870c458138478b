"""From checked config to objects: the only place that does so. And `train`, what a rank runs.

Read from the bottom: `train` assembles a `Trainer`, restores it, runs it and says how it went.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttrain.checkpoint.files import latest_good, steps_in, supersede
from disttrain.config.schema import Config, GenerateConfig
from disttrain.data import adapt
from disttrain.data.module import DataModule
from disttrain.errors import CheckpointError, ConfigError
from disttrain.launch.place import Place
from disttrain.models.sampling import sample
from disttrain.parallel import collectives
from disttrain.parallel.materialise import ShapesOnly
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.strategy import Options
from disttrain.record import RunFolder
from disttrain.train.assembly import training_order
from disttrain.train.hooks import Callback
from disttrain.train.state import load_weights, restore
from disttrain.train.summary import end_table, start_table, warnings_of
from disttrain.train.trainer import Trainer

SAMPLE_LENGTH = 160
"""Tokens shown at the end of a run."""

DEFAULT_CONTEXT = 128
"""Tokens shown to a model that does not say how many it can see."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def class_of(component: Mapping[str, Any]) -> Any:
    """The class that a component's `_target_` names."""
    module, _, name = component["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def instantiate(component: Mapping[str, Any], **given: Any) -> Any:
    """The object that a component describes; nested components are built first."""
    arguments = {
        key: instantiate(value) if isinstance(value, Mapping) and "_target_" in value else value
        for key, value in component.items()
        if key != "_target_"
    }
    return class_of(component)(**arguments, **given)


def data_module(config: Config) -> DataModule:
    """The data; a plain map-style or iterable dataset of the user's is wrapped."""
    return adapt.data_module(instantiate(config.dataset))


def prepare_data(config: Config) -> None:
    """Fetch or convert data, once a node, before ranks start. DataError if it is smaller than one global batch."""
    module = data_module(config)
    module.prepare()
    training_order(adapt.numbered(module.train()), config.train.global_batch_size, config.seed, module.shuffle)


def build_model(config: Config) -> nn.Module:
    """The model: on the meta device if its start can be drawn in pieces, else whole, under the seed."""
    component = dict(config.model)
    task = component.pop("task", None)
    if hasattr(class_of(component), "init_parameter"):
        with torch.device("meta"), ShapesOnly():
            model: nn.Module = instantiate(component)
    else:
        torch.manual_seed(config.seed)
        model = instantiate(component)
    if task is not None:
        model.task = instantiate(task)
    return model


def build_callbacks(config: Config) -> dict[str, Callback]:
    """Callbacks by key, in the config's order; ConfigError for a class that is none."""
    callbacks = {}
    for key, component in config.callbacks.items():
        callback = instantiate(component)
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks.{key}: {component['_target_']} is not a disttrain Callback", f"~callbacks.{key}")
        callbacks[key] = callback
    return callbacks


def device_of(config: Config, place: Place) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", place.local_rank) if config.launch.device == "cuda" else torch.device("cpu")


def build_mesh(config: Config, place: Place) -> Mesh:
    """The world as the config's axes."""
    strategy = config.strategy
    return Mesh({"dp_replicate": strategy.dp_replicate, "tp": strategy.tp}, place.rank)


def build_trainer(config: Config, folder: RunFolder | None, place: Place) -> Trainer:
    """Everything that a rank needs to train."""
    if config.debug.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler: 2 s
        torch.use_deterministic_algorithms(config.debug.deterministic)
    knobs, run = config.strategy, config.train
    arguments = {key: value for key, value in config.optimizer.items() if key not in ("_target_", "weight_decay")}
    return Trainer(
        build_model(config),
        data_module(config),
        optimizer=partial(class_of(config.optimizer), **arguments),
        weight_decay=config.optimizer.get("weight_decay", 0.0),
        schedule=lambda steps: instantiate(config.scheduler, num_steps=steps),
        callbacks=build_callbacks(config),
        metrics={name: instantiate(component) for name, component in config.metrics.items()},
        steps=run.steps,
        epochs=run.epochs,
        global_batch_size=run.global_batch_size,
        clip_norm=run.clip_norm,
        log_every=run.log_every,
        eval_every=run.eval_every,
        seed=config.seed,
        dtype=DTYPES[run.dtype],
        mesh=build_mesh(config, place),
        options=Options(knobs.sequence_parallel, knobs.plan, knobs.bucket_size, knobs.find_unused_parameters),
        device=device_of(config, place),
        overfit=config.debug.overfit,
        stop_requested=place.stop_requested,
        folder=folder,
        config=config,
    )


def train(config: Config, folder: RunFolder | None, place: Place) -> dict[str, Any]:
    """What a rank runs: train as configured, from the start or from where a run stopped."""
    trainer = build_trainer(config, folder, place)
    for note in _take_up(trainer, config, folder, place):
        say(trainer, note)
    for warning in warnings_of(trainer):
        say(trainer, warning)
    say(trainer, start_table(trainer))
    result = trainer.fit()
    say(trainer, end_table(trainer, result))
    if result.status == "done" and folder is not None:
        _show_sample(trainer, config, folder)
    return {"status": result.status, "reason": result.reason, "step": result.step, "metrics": result.metrics}


def _take_up(trainer: Trainer, config: Config, folder: RunFolder | None, place: Place) -> list[str]:
    """Restore what `resume`, a restart in place or `init_from` names. Returns what a person should know."""
    if folder is not None and (config.resume is not None or place.attempt > 0):
        named = Path(config.resume) if config.resume is not None and place.attempt == 0 else folder.path
        checkpoint, notes = _newest(named, trainer)
        if checkpoint is not None:
            notes += restore(trainer, checkpoint)
        if trainer.is_lead:
            supersede(folder.path, trainer.progress.step)
            folder.cut_back(trainer.progress.step)
        if checkpoint is not None:
            return [*notes, f"goes on after step {trainer.progress.step}, from {checkpoint.name}"]
        say(trainer, "no checkpoint yet: starting from the beginning")
    if config.init_from is not None:
        checkpoint, notes = _newest(Path(config.init_from), trainer)
        if checkpoint is None:
            raise CheckpointError(f"init_from={config.init_from} holds no good checkpoint", "init_from=<run folder or checkpoint>")
        return [*notes, *load_weights(trainer, checkpoint), f"weights from {checkpoint}"]
    return []


def _newest(named: Path, trainer: Trainer) -> tuple[Path | None, list[str]]:
    """The checkpoint `named`, or the newest good one of the run `named`, as rank 0 sees it; and what was passed over."""
    if named.parent.name == "checkpoints":
        return named, []
    found = latest_good(named) if trainer.is_lead else None
    mine = None if found is None else [str(found.folder) if found.folder else None, list(found.passed_over)]
    chosen, notes = collectives.gather_json(mine, trainer.mesh.axis("world"), trainer.device)[0]
    return (None if chosen is None else Path(chosen)), notes


def say(trainer: Trainer, what: Any) -> None:
    """Show a line or a table once."""
    if trainer.is_lead:
        from rich.console import Console

        with contextlib.suppress(BrokenPipeError, SystemExit):  # who read along has gone, and the run goes on
            Console(highlight=False, markup=False).print(what, soft_wrap=isinstance(what, str))


def write_text(trainer: Trainer, wanted: GenerateConfig, seed: int) -> str:
    """The prompt and what the model makes of it; the same on every rank of a tensor group, all of which must call."""
    ids = sample(
        trainer.strategy.outputs,
        trainer.data.encode(wanted.prompt),
        wanted.length,
        wanted.temperature,
        wanted.top_k,
        torch.Generator().manual_seed(seed),
        int(getattr(trainer.model, "max_seq_len", DEFAULT_CONTEXT)),
        trainer.device,
    )
    return trainer.data.decode(ids)


def _show_sample(trainer: Trainer, config: Config, folder: RunFolder) -> None:
    """What a language model now writes, and what to do next. Every rank of the first tensor group takes part."""
    writes = trainer.data.kind == "tokens" and trainer.data.bytes_per_token is not None
    if writes and trainer.mesh.axis("data").index == 0:
        trainer.model.eval()
        text = write_text(trainer, replace(config.generate, length=SAMPLE_LENGTH), config.seed)
        say(trainer, f"what it writes now\n\n{text}\n")
    shown = os.path.relpath(folder.path)
    say(trainer, f"run folder: {shown}")
    if steps_in(folder.checkpoints) and (writes or trainer.evaluator is not None):
        verb = f"generate {shown} prompt='class '" if writes else f"evaluate {shown}"
        say(trainer, f"try next:   python -m disttrain {verb}")
