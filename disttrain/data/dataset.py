"""What the rest of the program knows of data: numbered samples, a global order, no ranks.

The global batch is the experiment: `Order` fixes, from a seed and an epoch, which samples make up each global
batch. Ranks take slices of it elsewhere. A position is two integers, so a resume needs no replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from disttrain.data.module import DataModule, Kind, Loading
from disttrain.data.seeds import derive, sample_seeds

__all__ = ["VOID", "DataModule", "Dataset", "Kind", "Loading", "Order", "Position", "sample_seeds"]

SEED_WINDOW = 64
"""Batches whose seeds are worked out at once."""

VOID = -1
"""Index of a sample that fills up a batch and counts for nothing."""


@runtime_checkable
class Dataset(Protocol):
    """Numbered samples, built a batch at a time."""

    @property
    def fingerprint(self) -> str:
        """Changes when the samples do; compared over hosts and at resume."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """(inputs, targets) of the samples `indices` [n] (int64, none void), rows stacked in that order.

        `seeds` [n] are each sample's own, see `sample_seeds`: random draws come from them alone.
        """


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: the next global batch."""

    epoch: int = 0
    step: int = 0


class Order:
    """The order of global batches of a split of `length` samples. The last of an epoch is filled with VOID."""

    def __init__(self, length: int, global_batch_size: int, seed: int, shuffle: bool = True) -> None:
        """`shuffle` draws a new permutation from (seed, epoch) for every epoch."""
        self.length = length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch = -(-length // global_batch_size)
        self._epoch = -1
        self._permutation: Tensor | None = None
        self._seeded = (-1, -1)
        self._seeds = torch.empty(0, dtype=torch.int64)

    def global_batch(self, position: Position) -> Tensor:
        """Sample numbers [global_batch_size] of the batch at `position`, VOID where the epoch has run out."""
        assert 0 <= position.step < self.steps_per_epoch
        start = position.step * self.global_batch_size
        if self.shuffle:
            rows = self._of(position.epoch)[start : start + self.global_batch_size]
        else:
            rows = torch.arange(start, min(start + self.global_batch_size, self.length))
        missing = self.global_batch_size - rows.numel()
        return rows if missing == 0 else torch.cat([rows, torch.full((missing,), VOID)])

    def num_samples(self, position: Position) -> int:
        """How many of the batch at `position` are no VOID; they come first."""
        return min(self.global_batch_size, self.length - position.step * self.global_batch_size)

    def seeds(self, position: Position) -> Tensor:
        """Each sample's own seed [global_batch_size] of the batch at `position`; of VOID ones nothing is meant."""
        window, offset = divmod(position.step, SEED_WINDOW)
        if (position.epoch, window) != self._seeded:
            ahead = min(SEED_WINDOW, self.steps_per_epoch - window * SEED_WINDOW)
            batches = [self.global_batch(Position(position.epoch, window * SEED_WINDOW + step)) for step in range(ahead)]
            self._seeds = sample_seeds(self.seed, position.epoch, torch.cat(batches))
            self._seeded = (position.epoch, window)
        return self._seeds[offset * self.global_batch_size : (offset + 1) * self.global_batch_size]

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch or self._permutation is None:
            generator = torch.Generator().manual_seed(derive(self.seed, epoch))
            self._permutation = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return self._permutation
