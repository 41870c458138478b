"""Iterable data on several ranks: one stream, equal numbers of batches, and an error on all when a rank's own runs dry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from disttrain.callbacks.grad_accumulation import GradAccumulation
from disttrain.data.adapt import Adapted
from disttrain.launch.place import Place
from disttrain.launch.world import run_world, supervise
from disttrain.models.gpt import GPT
from disttrain.parallel.mesh import Mesh
from disttrain.train.trainer import Trainer
from tests.train.runs import Notes

RunWorld = Callable[..., list[Any]]


class Sequences(IterableDataset[tuple[Tensor, Tensor]]):
    """`length` sequences of nine tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.length):
            tokens = (torch.arange(9) * (1 + number)) % 8
            yield tokens[:-1], tokens[1:]


def trainer_on(place: Place, length: int) -> tuple[Trainer, Notes]:
    """Two epochs of 80 samples, ten steps each; two micro-batches a rank and step; 21 validation samples."""
    torch.manual_seed(0)
    model = GPT(num_layers=1, num_heads=2, hidden_size=8, vocab_size=8, max_seq_len=8)
    data = Adapted(train=Sequences(length), length=80, validation=Sequences(21), validation_length=21)
    notes = Notes()
    micro = GradAccumulation(8 // place.world_size // 2)
    trainer = Trainer(
        model, data, epochs=2, global_batch_size=8, log_every=1, eval_every=10, dtype=torch.float64, callbacks=[notes, micro],
        mesh=Mesh({"dp_replicate": place.world_size}, place.rank),
    )  # fmt: skip
    return trainer, notes


@pytest.mark.world(2)
def test_two_ranks_walk_through_one_stream_as_one_does() -> None:
    """F04: two epochs, accumulation, evaluation; the curve is one rank's."""

    def curve(place: Place) -> list[tuple[float, float]]:
        trainer, notes = trainer_on(place, 80)
        trainer.fit()
        return [(row["train/loss"], row.get("val/loss", 0.0)) for row in notes.rows]

    (alone,) = run_world(curve, 1)
    assert len(alone) == 20
    assert [step for step, (_, val) in enumerate(alone, 1) if val] == [10, 20]
    for found in run_world(curve, 2):
        for pair, wanted in zip(found, alone, strict=True):
            assert pair == pytest.approx(wanted, rel=1e-12)


@pytest.mark.world(2)
def test_a_stream_that_is_shorter_on_one_rank_ends_all_with_one_message() -> None:
    """F04: rank 0's stream has ten batches, rank 1's seven. A user's mistake, told in a moment; nobody waits for a time-out."""
    start = time.monotonic()
    outcome = supervise(lambda place: trainer_on(place, 80 if place.rank == 0 else 56)[0].fit(), 2)
    assert time.monotonic() - start < 15
    assert outcome.exit_code == 2
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert "Sequences ended after 56 samples, but an epoch has 80: a stream must not depend on the rank" in outcome.failure.message
    assert "dataset.length=56" in outcome.failure.message
