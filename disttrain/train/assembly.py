"""The parts of a trainer, made: how long a run is, what feeds it, what updates and what measures it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from disttrain.config.check import check_metrics, check_numbers
from disttrain.config.components import needs_whole
from disttrain.config.deepspeed import Batch
from disttrain.config.schema import Config, TrainConfig
from disttrain.config.typed import build
from disttrain.data.adapt import numbered
from disttrain.data.dataset import DataModule, Dataset, Order
from disttrain.data.workers import BatchSource
from disttrain.errors import ConfigError, DataError
from disttrain.parallel.blocks import blocks_of
from disttrain.parallel.deepspeed import DeepSpeedStrategy, EngineUpdate
from disttrain.parallel.layout import Cut
from disttrain.parallel.local_sgd import Synced
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.parallel.muon import WholeMatrices
from disttrain.parallel.options import Options
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.update import Update
from disttrain.train.batch import Feed, Slice
from disttrain.train.evaluate import Evaluator
from disttrain.train.metrics import MetricSet
from disttrain.train.optimizer import Schedule, build_optimizer, parameter_groups, tabulate

TOGETHER = 1024
"""Most samples that one call of a data set builds."""


def check(*settings: float | None) -> None:
    """ConfigError for a setting of a run that is of the wrong type or sign, as for its key in a config."""
    names = ("steps", "epochs", "global_batch_size", "clip_norm", "log_every", "eval_every")
    plain = (value.item() if isinstance(value, np.generic) else value for value in settings)
    check_numbers(Config(train=build(TrainConfig, dict(zip(names, plain, strict=True)), "train")))


def training_order(train: Dataset, global_batch_size: int, seed: int, shuffle: bool, fits: Callable[[int], bool]) -> Order:
    """The order of global batches; DataError for fewer samples than one of them, with the largest batch that `fits` ranks and data."""
    if len(train) < global_batch_size:
        smaller = next((size for size in range(len(train), 0, -1) if fits(size)), None)
        raise DataError(
            f"the training split has {len(train)} samples, fewer than one global batch (train.global_batch_size={global_batch_size})",
            f"train.global_batch_size={smaller}, or more data by the keys of dataset" if smaller else "more data by the keys of dataset",
        )
    return Order(len(train), global_batch_size, seed, shuffle)


def validation_split(data: DataModule) -> Dataset | None:
    """The validation samples, if there is such a split; DataError for one without a sample."""
    split = data.validation()
    if split is None:
        return None
    split = numbered(split)
    if len(split) == 0:
        raise DataError("the validation split has no samples", "more data for it by the keys of dataset, or none: `validation` gives None")
    return split


def local_part(axis: Axis, global_batch_size: int, micro_batch_size: int | None) -> Slice:
    """A rank's part of a global batch in whole micro-batches; ConfigError where that does not come out even."""
    local = global_batch_size // axis.size
    micro = min(micro_batch_size or local, local)
    part = Slice(axis, global_batch_size, micro)
    if not part.takes(global_batch_size):
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} is not divisible by {axis.size} data ranks times {micro} samples a micro-batch",
            f"train.global_batch_size={max(1, micro) * axis.size * max(1, local // max(1, micro))}",
        )
    return part


def run_length(steps: int | None, epochs: int | None, order: Order) -> int:
    """Number of steps; ConfigError unless exactly one of both is given."""
    if (steps is None) == (epochs is None):
        raise ConfigError(f"a run has a number of steps or of epochs; found steps={steps} and epochs={epochs}", "train.steps=400")
    return steps if steps is not None else int(epochs or 0) * order.steps_per_epoch


def make_strategy(mesh: Mesh, options: Options, device: torch.device, seed: int) -> Strategy:
    """Ours, or DeepSpeed's engine's."""
    return (Strategy if options.deepspeed is None else DeepSpeedStrategy)(mesh, options, device, seed)


def make_update(
    strategy: Strategy,
    optimizer: Callable[..., torch.optim.Optimizer],
    weight_decay: float,
    schedule: Callable[[int], Schedule],
    num_steps: int,
    clip_norm: float | None,
    part: Slice,
) -> Update:
    """Optimizer, rate and clipping for a prepared strategy, whose ranks each take a `part` of the global batch."""
    groups = parameter_groups(strategy.model, strategy.parameters, weight_decay)
    factors = tabulate(schedule(num_steps), num_steps, strategy.update_device)
    if "whole" in inspect.signature(optimizer).parameters:
        matrices = WholeMatrices(blocks_of(strategy.model), strategy.parameters, strategy.layouts, strategy.mesh)
        made = build_optimizer(partial(optimizer, whole=matrices), groups)
    else:
        made = build_optimizer(optimizer, groups)
        _must_update_parts(made, strategy)
    if isinstance(strategy, DeepSpeedStrategy):
        batch = Batch(part.global_batch_size, part.micro_batch_size, part.num_micro)
        return EngineUpdate(made, factors, clip_norm, strategy, batch)
    if strategy.apart.size > 1:
        return Synced(made, factors, clip_norm, strategy, num_steps)
    return Update(made, factors, clip_norm, strategy.loss_scale)


def _must_update_parts(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Refuse an optimizer that looks at whole matrices where parameters are cut."""
    cut = next((name for name, at in strategy.layouts.items() if any(isinstance(p, Cut) for p in at.placements.values())), None)
    if cut is not None and (why := needs_whole(kind.__name__ for kind in type(optimizer).__mro__)):
        raise ConfigError(f"{type(optimizer).__name__} {why}, and ranks hold parts of '{cut}'", "optimizer=muon or adamw, or strategy=ddp")


def make_feed(data: DataModule, dataset: Dataset, order: Order, part: Slice, strategy: Strategy) -> Feed:
    """This rank's steps of a split."""
    source = BatchSource(dataset, data.loading)
    threaded = strategy.device.type == "cuda" and source.fits_thread  # on a CPU the thread would only take turns with the step
    ahead = data.loading.prefetch if threaded else 0
    # a data set that builds batches without a loop over samples does several steps' in one go, for the price of one
    together = 1 if source.by_sample else max(1, min(data.loading.prefetch, TOGETHER // part.local_batch_size))
    return Feed(source, order, part, strategy.task, strategy.device, strategy.dtype, together, ahead, data.loading.pin_memory)


def make_evaluator(data: DataModule, part: Slice, strategy: Strategy, metrics: Mapping[str, Any]) -> Evaluator | None:
    """What measures the validation split; None without one."""
    check_metrics(metrics)
    split = validation_split(data)
    if split is None:
        return None
    feed = make_feed(data, split, Order(len(split), part.global_batch_size, 0, shuffle=False), part, strategy)
    measured = MetricSet(strategy.task, metrics, strategy.mesh.axis("seen"), strategy.device)
    return Evaluator(strategy, feed, measured, data.bytes_per_token)
