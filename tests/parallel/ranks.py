"""What these tests do on each rank: a tiny experiment, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disttrain import build
from disttrain.data.dataset import Position
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.step import Report
from disttrain.train.trainer import Trainer
from tests import tiny


def prepared(place: Place, **config: Any) -> Trainer:
    """The trainer of `tiny.config(**config)`, before its first step."""
    trainer = build.build_trainer(tiny.config(**config), None, place)
    trainer.model.train()
    return trainer


def run_step(trainer: Trainer, number: int) -> Report:
    """Forward and backward of step `number` and its agreed numbers; no update."""
    order = trainer.feed.order
    epoch, in_epoch = divmod(number, order.steps_per_epoch)
    (step,) = trainer.feed.steps(iter([(number, Position(epoch, in_epoch))]))
    trainer.strategy.count(step)
    return trainer.strategy.finish(trainer.strategy.forward_backward(step), step)


def sizes(entry: Callable[[Place], Any], *world_sizes: int) -> list[list[Any]]:
    """Results by rank in worlds of each size."""
    return [run_world(entry, size) for size in world_sizes]
