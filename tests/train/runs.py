"""Tiny runs on forked ranks, and what is noted of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from disttrain import build
from disttrain.data.module import DataModule, Loading
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.step import Report
from disttrain.train.assembly import make_feed
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny

WARM = ("torch.distributed.fsdp", "torch._dynamo")
"""What ranks of a sharded layout import: seconds, once in their parent."""

EVERY_STEP = {"log_every": 1}


class Notes(Callback):
    """Rows of the log, and what steps did to the weights."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.skipped: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        self.rows.append({"step": float(trainer.progress.step), **row})

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        self.skipped.append(float(report.skip))

    def on_train_epoch_end(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        self.weights.append(copy_of(trainer))

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


NOTES = {"notes": {"_target_": "tests.train.runs.Notes"}}


def trainer_of(place: Place, callbacks: Mapping[str, Any] | None = None, **config: Any) -> Trainer:
    """The trainer of a tiny config, taking notes."""
    return build.build_trainer(tiny.config(callbacks=NOTES | dict(callbacks or {}), **config), None, place)


def notes_of(trainer: Trainer) -> Notes:
    notes = trainer.callbacks["notes"]
    assert isinstance(notes, Notes)
    return notes


def copy_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}


def rows(**config: Any) -> list[list[dict[str, float]]]:
    """By rank, the rows of a whole run."""

    def entry(place: Place) -> list[dict[str, float]]:
        trainer = trainer_of(place, **config)
        trainer.fit()
        return notes_of(trainer).rows

    return run_world(entry, world_size(config), warm=WARM if config.get("shard", 1) > 1 else ())


def world_size(config: Mapping[str, Any]) -> int:
    """Ranks of a tiny config."""
    return int(tiny.config(**config).launch.world_size)


def curve(**config: Any) -> list[float]:
    """The loss of every step, which every rank reports alike."""
    by_rank = rows(**EVERY_STEP | config)
    losses = [[row["train/loss"] for row in part] for part in by_rank]
    assert all(part == losses[0] for part in losses), "ranks report different losses"
    return losses[0]


class Samples(DataModule):
    """Samples made from their numbers by a function of [n] to (inputs, targets)."""

    kind = "tokens"

    def __init__(self, length: int, make: Callable[[Tensor], tuple[Tensor, Tensor]], num_validation: int = 0) -> None:
        self.length, self.make, self.num_validation = length, make, num_validation
        self.loading = Loading(0, 1, False)

    def train(self) -> Any:
        return Split(self.length, self.make)

    def validation(self) -> Any:
        return Split(self.num_validation, self.make) if self.num_validation else None


class Split:
    """One split of `Samples`."""

    fingerprint = "made"

    def __init__(self, length: int, make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        return self.make(indices)


def with_samples(trainer: Trainer, data: Samples) -> Trainer:
    """The trainer, fed with other training data."""
    order = type(trainer.feed.order)(data.length, trainer.feed.part.global_batch_size, trainer.feed.order.seed)
    trainer.feed = make_feed(trainer.data, data.train(), order, trainer.feed.part, trainer.strategy)
    return trainer


def tokens(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences that follow from the sample's number; of sample i the first i % 8 targets are ignored."""
    positions = torch.arange(tiny.CONTEXT + 1)
    sequence = (indices[:, None] * 7 + positions * (1 + indices[:, None] % 5)) % tiny.VOCABULARY
    targets = sequence[:, 1:].masked_fill(positions[:-1] < indices[:, None] % 8, -100)
    return sequence[:, :-1].contiguous(), targets
