"""From checked config to objects: the only place that does so. And `train`, what a rank runs.

Read from the bottom: `train` assembles a `Trainer`, restores it, runs it and says how it went.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttrain.checkpoint.files import latest_good, supersede
from disttrain.config.schema import Config
from disttrain.data import adapt
from disttrain.data.dataset import DataModule, Dataset, Order
from disttrain.data.workers import BatchSource
from disttrain.errors import CheckpointError, ConfigError, DataError
from disttrain.launch.place import Place
from disttrain.models.sampling import sample
from disttrain.models.task import Task, task_of
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.step import Declaration
from disttrain.parallel.strategy import Options, Strategy
from disttrain.parallel.update import LossScale, Update
from disttrain.record import RunFolder
from disttrain.train.batch import Feed, Slice
from disttrain.train.evaluate import Evaluator
from disttrain.train.hooks import Callback, StepPolicy
from disttrain.train.metrics import MetricSet
from disttrain.train.optimizer import build_optimizer, parameter_groups, tabulate
from disttrain.train.progress import Progress
from disttrain.train.summary import end_table, start_table
from disttrain.train.trainer import Trainer

SAMPLE_LENGTH = 160
"""Tokens shown at the end of a run."""

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
    """Fetch or convert data, once a node, before ranks start."""
    data_module(config).prepare()


def build_model(config: Config) -> nn.Module:
    """The model: on the meta device if its start can be drawn in pieces, else whole, under the seed."""
    component = dict(config.model)
    task = component.pop("task", None)
    if hasattr(class_of(component), "init_parameter"):
        with torch.device("meta"):
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


def declared(callbacks: Mapping[str, Callback]) -> Declaration:
    """What the policies fix together. ConfigError where two answer the same question."""
    answers: dict[str, tuple[str, Any]] = {}
    for key, callback in callbacks.items():
        if not isinstance(callback, StepPolicy):
            continue
        for name, value in vars(callback.declare()).items():
            if value is None:
                continue
            if name in answers:
                raise ConfigError(f"callbacks.{answers[name][0]} and callbacks.{key} both fix {name.replace('_', ' ')}", f"~callbacks.{key}")
            answers[name] = (key, value)
    return Declaration(**{name: value for name, (_, value) in answers.items()})


def device_of(config: Config, place: Place) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", place.local_rank) if config.launch.device == "cuda" else torch.device("cpu")


def build_mesh(config: Config, place: Place) -> Mesh:
    """The world as the config's axes."""
    strategy = config.strategy
    return Mesh({"dp_replicate": strategy.dp_replicate, "tp": strategy.tp}, place.rank)


def build_strategy(config: Config, mesh: Mesh, device: torch.device, model: nn.Module, task: Task, loss_scale: LossScale | None) -> Strategy:
    """The model laid out on the mesh."""
    knobs = config.strategy
    options = Options(knobs.sequence_parallel, knobs.plan, knobs.bucket_size, knobs.static_graph, knobs.find_unused_parameters)
    strategy = Strategy(mesh, options, device, config.seed)
    strategy.prepare(model, task, DTYPES[config.train.dtype], loss_scale)
    return strategy


@dataclass
class Splits:
    """Training and validation data with their orders."""

    module: DataModule
    train: Dataset
    train_order: Order
    validation: Dataset | None


def build_splits(config: Config) -> Splits:
    """Both splits; ConfigError where training data is smaller than one global batch."""
    module = data_module(config)
    train = module.train()
    size = config.train.global_batch_size
    if len(train) < size:
        raise DataError(
            f"the training split has {len(train)} samples, fewer than one global batch (train.global_batch_size={size})",
            f"train.global_batch_size={max(1, len(train))}, or more data by the keys of dataset",
        )
    return Splits(module, train, Order(len(train), size, config.seed, module.shuffle), module.validation())


def num_steps(config: Config, order: Order) -> int:
    """Steps of the run."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None, "check makes sure of one of both"
    return config.train.epochs * order.steps_per_epoch


def build_update(config: Config, strategy: Strategy, progress: Progress, steps: int) -> Update:
    """Optimizer, schedule and clipping. Weight decay is the groups' own."""
    arguments = {key: value for key, value in config.optimizer.items() if key not in ("_target_", "weight_decay")}
    groups = parameter_groups(strategy.model, strategy.parameters, config.optimizer.get("weight_decay", 0.0))
    optimizer = build_optimizer(class_of(config.optimizer), groups, arguments)
    factors = tabulate(instantiate(config.scheduler, num_steps=steps), steps, strategy.device)
    return Update(optimizer, factors, progress.updates, progress.skipped, config.train.clip_norm, strategy.loss_scale)


def build_feed(config: Config, dataset: Dataset, order: Order, strategy: Strategy, micro_batch_size: int | None, module: DataModule) -> Feed:
    """This rank's steps of one split."""
    axis = strategy.mesh.axis("data")
    local = config.train.global_batch_size // axis.size
    part = Slice(axis, config.train.global_batch_size, min(micro_batch_size or local, local))
    source = BatchSource(dataset, module.loading)
    threaded = strategy.device.type == "cuda" and source.fits_thread  # on a CPU the thread would only take turns with the step
    ahead = module.loading.prefetch if threaded else 0
    return Feed(source.iterate, order, part, strategy.task, strategy.device, ahead, module.loading.pin_memory)


def build_trainer(config: Config, folder: RunFolder | None, place: Place) -> Trainer:
    """Everything that a rank needs to train, put together."""
    device = device_of(config, place)
    if config.debug.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler: 2 s
        torch.use_deterministic_algorithms(config.debug.deterministic)
    callbacks = build_callbacks(config)
    fixed = declared(callbacks)
    mesh = build_mesh(config, place)
    loss_scale = None if fixed.loss_scale is None else LossScale(fixed.loss_scale, device)
    model = build_model(config)
    strategy = build_strategy(config, mesh, device, model, task_of(model), loss_scale)
    splits = build_splits(config)
    steps = num_steps(config, splits.train_order)
    progress = Progress(device)
    update = build_update(config, strategy, progress, steps)
    feed = build_feed(config, splits.train, splits.train_order, strategy, fixed.micro_batch_size, splits.module)
    return Trainer(
        strategy,
        update,
        progress,
        feed,
        num_steps=steps,
        evaluator=build_evaluator(config, strategy, splits, fixed.micro_batch_size),
        callbacks=callbacks,
        log_every=config.train.log_every,
        eval_every=config.train.eval_every,
        overfit=config.debug.overfit,
        stop_requested=place.stop_requested,
        folder=folder,
        config=config,
    )


def build_evaluator(config: Config, strategy: Strategy, splits: Splits, micro_batch_size: int | None) -> Evaluator | None:
    """What measures the validation split; None without one."""
    if splits.validation is None:
        return None
    order = Order(len(splits.validation), config.train.global_batch_size, config.seed, shuffle=False)
    feed = build_feed(config, splits.validation, order, strategy, micro_batch_size, splits.module)
    own = {name: instantiate(component) for name, component in config.metrics.items()}
    metrics = MetricSet(strategy.task, own, strategy.mesh.axis("data"), strategy.device)
    return Evaluator(strategy, feed, metrics, splits.module.bytes_per_token)


def train(config: Config, folder: RunFolder | None, place: Place) -> dict[str, Any]:
    """What a rank runs: train as configured, from the start or from where a run stopped."""
    trainer = build_trainer(config, folder, place)
    for note in _take_up(trainer, config, folder, place):
        say(trainer, note)
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
        if checkpoint is None:
            return [*notes, "no checkpoint yet: starting from the beginning"]
        notes += trainer.restore(checkpoint)
        if trainer.is_lead:
            supersede(folder.path, trainer.progress.step)
            folder.cut_back(trainer.progress.step)
        return [*notes, f"goes on after step {trainer.progress.step}, from {checkpoint.name}"]
    if config.init_from is not None:
        checkpoint, notes = _newest(Path(config.init_from), trainer)
        if checkpoint is None:
            raise CheckpointError(f"init_from={config.init_from} holds no good checkpoint", "init_from=<run folder or checkpoint>")
        return [*notes, *trainer.load_weights(checkpoint), f"weights from {checkpoint}"]
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

        Console(highlight=False, markup=False).print(what, soft_wrap=isinstance(what, str))


def longest_input(config: Config, module: DataModule) -> int:
    """Tokens that the model sees at once."""
    return int(config.model.get("max_seq_len") or getattr(module, "context", 128))


def _show_sample(trainer: Trainer, config: Config, folder: RunFolder) -> None:
    """What a language model now writes, and what to do next. Every rank of the first tensor group takes part."""
    module = data_module(config)
    if module.kind == "tokens" and module.bytes_per_token and trainer.mesh.axis("data").index == 0:
        wanted = config.generate
        generator = torch.Generator().manual_seed(config.seed)
        trainer.model.eval()
        ids = sample(
            trainer.strategy.outputs,
            module.encode(wanted.prompt),
            SAMPLE_LENGTH,
            wanted.temperature,
            wanted.top_k,
            generator,
            longest_input(config, module),
            trainer.device,
        )
        say(trainer, f"what it writes now\n\n{module.decode(ids)}\n")
    shown = os.path.relpath(folder.path)
    verb = f"generate {shown} prompt='class '" if module.kind == "tokens" else f"evaluate {shown}"
    say(trainer, f"run folder: {shown}\ntry next:   python -m disttrain {verb}")
