"""From checked config to objects: the only place that does so. And `train`, what a rank runs.

Read from the bottom: `train` assembles a `Trainer`, restores it, runs it and says how it went.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttrain.config.schema import Config
from disttrain.data import adapt
from disttrain.data.dataset import DataModule, Dataset, Order
from disttrain.data.workers import BatchSource
from disttrain.errors import ConfigError, DataError
from disttrain.launch.place import Place
from disttrain.models.task import Task, task_of
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
from disttrain.train.trainer import Trainer

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
    device = torch.device(config.launch.device, place.local_rank if config.launch.device == "cuda" else None)
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


def train(config: Config, folder: RunFolder, place: Place) -> dict[str, Any]:
    """What a rank runs: train as configured, from the start or from where a run stopped."""
    trainer = build_trainer(config, folder, place)
    if config.resume is not None:
        trainer.restore(Path(config.resume))
    result = trainer.fit()
    return {"status": result.status, "reason": result.reason, "step": result.step, "metrics": result.metrics}
