"""From checked config to objects: the only place that does so. And `train`, what a rank runs.

Read from the bottom: `train` assembles a `Trainer`, restores it, runs it and says how it went.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttrain.checkpoint.files import step_of, supersede
from disttrain.checkpoint.load import latest_good
from disttrain.config.callbacks import waiting_for_evaluations
from disttrain.config.components import IN_ITS_FOLDER, signature_of
from disttrain.config.fit import check_data, takes_batch
from disttrain.config.schema import Config
from disttrain.data import adapt
from disttrain.data.module import OTHER_FOLDER, DataModule
from disttrain.errors import CheckpointError, ConfigError, DataError, same_at_every_start
from disttrain.launch.place import Place
from disttrain.parallel.collectives import gather_json
from disttrain.parallel.materialise import ShapesOnly
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.options import Options
from disttrain.places import place_of
from disttrain.record import RunFolder
from disttrain.train.assembly import run_length, training_order, validation_split
from disttrain.train.hooks import Callback
from disttrain.train.memory import told_where_memory_went
from disttrain.train.optimizer import Schedule, from_torch, tabulate
from disttrain.train.state import load_weights, restore
from disttrain.train.summary import end_table, measured, start_table, warnings_of
from disttrain.train.trainer import Trainer
from disttrain.train.writing import say, show_sample

TRIED_UPDATES = 1000
"""Updates for which a schedule is asked before ranks start; a wrong one is wrong at its first, mostly."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def class_of(component: Mapping[str, Any]) -> Any:
    """The class that a component's `_target_` names; ConfigError if it is not to be found, as when a run is read elsewhere."""
    module, _, name = component["_target_"].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if module.startswith("disttrain."):
            raise  # a fault of ours
        raise ConfigError(f"the config names {component['_target_']}, which can't be imported: {error}", IN_ITS_FOLDER) from error


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


def prepare(config: Config) -> None:
    """What can go wrong before ranks start does so here, once a node: classes, then data, which is fetched or converted.

    ConfigError for a class of another kind than its place wants, for a model that the data doesn't fit and for what goes by
    evaluations that can't be made; DataError for data smaller than one global batch, or for none to validate on.
    """
    _must_be("optimizer", config.optimizer, torch.optim.Optimizer, "optimizer=adamw")
    kind = class_of(config.optimizer)
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    closure = signature(kind.step).parameters.get("closure") if is_class else None
    if closure is not None and closure.default is closure.empty:
        found = f"optimizer._target_={config.optimizer['_target_']} computes the loss several times a step, and a step here is one gradient"
        raise ConfigError(found, "optimizer=adamw")
    for key, component in config.callbacks.items():
        _must_be(f"callbacks.{key}", component, Callback, f"~callbacks.{key}")
    module = data_module(config)
    try:
        module.prepare()
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise DataError(f"prepared data can't be kept there: {error}", OTHER_FOLDER) from error
    check_data(config, module, class_of(config.model))
    fits = partial(takes_batch, config)
    order = training_order(adapt.numbered(module.train()), config.train.global_batch_size, config.seed, module.shuffle, fits)
    if validation_split(module) is None:
        for what, remedy in waiting_for_evaluations(config).items():
            raise ConfigError(f"{what} goes by evaluations, and the data has no validation split", remedy)
    num_steps = run_length(config.train.steps, config.train.epochs, order)
    tabulate(build_schedule(config)(num_steps), min(num_steps, TRIED_UPDATES), torch.device("cpu"))


def _must_be(place: str, component: Mapping[str, Any], kind: type, remedy: str) -> None:
    """Refuse a class of another kind; what a function makes is seen once it is made."""
    found = class_of(component)
    if isinstance(found, type) and not issubclass(found, kind):
        raise ConfigError(f"{place}._target_={component['_target_']} is no {kind.__module__.split('.')[0]} {kind.__name__}", remedy)


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


def build_schedule(config: Config) -> Callable[[int], Schedule]:
    """What makes the rate's schedule for a number of steps: a class of ours or the user's, or one of torch's schedulers."""
    kind = class_of(config.scheduler)
    if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return from_torch(lambda optimizer: instantiate(config.scheduler, optimizer=optimizer), _optimizers(config, "lr", 1.0))
    wanted = signature_of(config.scheduler["_target_"], "scheduler")
    takes_length = wanted.open or "num_steps" in wanted.parameters
    return lambda num_steps: instantiate(config.scheduler, **({"num_steps": num_steps} if takes_length else {}))


def device_of(config: Config, place: Place) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", place.local_rank) if config.launch.device == "cuda" else torch.device("cpu")


def degrees_of(config: Config) -> dict[str, int]:
    """The size of each of the mesh's own axes."""
    degrees = config.strategy
    atomic = {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "ep", "cp", "tp")}
    return atomic | {"dp_outer": degrees.dp_shard // degrees.ep}


def build_mesh(config: Config, place: Place) -> Mesh:
    """The world as the config's axes."""
    return Mesh(degrees_of(config), place.rank)


def options_of(config: Config) -> Options:
    """The strategy's own knobs."""
    return Options(**{knob.name: getattr(config.strategy, knob.name) for knob in fields(Options)})


def optimizer_of(config: Config) -> tuple[Callable[..., torch.optim.Optimizer], float]:
    """What makes the optimizer of parameter groups, and its weight decay: the config's, or what the class decays by itself."""
    arguments = {key: value for key, value in config.optimizer.items() if key not in ("_target_", "weight_decay")}
    return partial(class_of(config.optimizer), **arguments), _optimizers(config, "weight_decay", 0.0)


def _optimizers(config: Config, name: str, otherwise: float) -> float:
    """An argument of the optimizer: the config's, or its class's default."""
    argument = signature(class_of(config.optimizer)).parameters.get(name)
    default = argument.default if argument is not None and isinstance(argument.default, (int, float)) else otherwise
    return float(config.optimizer.get(name, default))


def build_trainer(config: Config, folder: RunFolder | None, place: Place) -> Trainer:
    """Everything that a rank needs to train."""
    if config.debug.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler: 2 s
        torch.use_deterministic_algorithms(config.debug.deterministic)
    run = config.train
    optimizer, weight_decay = optimizer_of(config)
    return Trainer(
        build_model(config),
        data_module(config),
        optimizer=optimizer,
        weight_decay=weight_decay,
        schedule=build_schedule(config),
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
        options=options_of(config),
        device=device_of(config, place),
        overfit=config.debug.overfit,
        stop_requested=place.stop_requested,
        folder=folder,
        config=config,
    )


def train(config: Config, folder: RunFolder | None, place: Place) -> dict[str, Any]:
    """What a rank runs: train as configured, from the start or from where a run stopped."""
    with same_at_every_start():
        trainer = build_trainer(config, folder, place)
    for note in _take_up(trainer, config, folder, place):
        say(trainer, note)
    is_over = trainer.progress.step >= trainer.num_steps and not trainer.progress.owes_evaluation
    if folder is not None and is_over and _had_ended_well(trainer, folder):
        say(trainer, f"nothing is left to do of {trainer.num_steps} steps; train.steps=<more> goes on")
        return {"idle": True, "step": trainer.progress.step, "metrics": folder.last_values()}
    for warning in warnings_of(trainer):
        say(trainer, warning)
    say(trainer, start_table(trainer))
    with told_where_memory_went(trainer):
        result = trainer.fit()
    if folder is not None and trainer.is_lead:
        result = replace(result, metrics=folder.last_values() | result.metrics)  # what a resumed run had measured before counts too
    say(trainer, end_table(trainer, result, config.predicted))
    if result.status == "done" and folder is not None:
        show_sample(trainer, config, folder)
    found = {"status": result.status, "reason": result.reason, "step": result.step, "metrics": result.metrics}
    return found | {"predicted": config.predicted, "measured": measured(config.predicted, result.metrics)}


def _take_up(trainer: Trainer, config: Config, folder: RunFolder | None, place: Place) -> list[str]:
    """Restore what `resume`, a restart in place or `init_from` names. Returns what a person should know."""
    if folder is not None and (config.resume is not None or place.attempt > 0):
        named = Path(config.resume) if config.resume is not None and place.attempt == 0 else folder.path
        checkpoint, notes, checked = _newest(named, trainer)
        if checkpoint is not None:
            notes += restore(trainer, checkpoint, checked)
        elif notes:
            found = "\n".join([f"{folder.path} holds no good checkpoint:", *notes])
            raise CheckpointError(found, "leave out resume= to begin a new run")
        if trainer.is_lead:
            _put_aside(folder, trainer.progress.step)
        if checkpoint is not None:
            notes.append(f"goes on after step {trainer.progress.step}, from {checkpoint.name}")
            return notes
        say(trainer, "no checkpoint yet: starting from the beginning")
    if config.init_from is not None:
        checkpoint, notes, _ = _newest(place_of(config.init_from), trainer)
        if checkpoint is None:
            found = "\n".join([f"init_from={config.init_from} holds no good checkpoint", *notes])
            raise CheckpointError(found, "init_from=<run folder or checkpoint>")
        return [*notes, *load_weights(trainer, checkpoint), f"weights from {checkpoint}"]
    return []


def _put_aside(folder: RunFolder, step: int) -> None:
    """What the run had after `step`, from which it goes on; said in the record, because a refusal can't take it back from here."""
    has_moved, has_dropped = supersede(folder.checkpoints, step), folder.cut_back(step)
    if has_moved or has_dropped:
        folder.write_result(put_aside=True)


def _had_ended_well(trainer: Trainer, folder: RunFolder) -> bool:
    """Whether the start before this one got to its end; if it was killed on the last steps, its record is still to be closed."""
    return bool(gather_json(folder.result().get("status_before"), trainer.mesh.axis("world"))[0] == "done")


def _newest(named: Path, trainer: Trainer) -> tuple[Path | None, list[str], bool]:
    """(the checkpoint `named`, or the newest good one of the run `named`; what was passed over; whether every file was checked)."""
    if step_of(named.name) is not None:
        return named, [], False
    found = latest_good(named, trainer.mesh.axis("world"))
    return found.folder, list(found.passed_over), True
