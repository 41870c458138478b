"""What the rest of the program knows of data: numbered samples, a global order, no ranks.

The global batch is the experiment: `Order` fixes, from a seed and an epoch, which samples make up each global
batch. Ranks take slices of it elsewhere. A position is two integers, so a resume needs no replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

VOID = -1
"""Index of a sample that fills up a batch and counts for nothing."""


@runtime_checkable
class Dataset(Protocol):
    """Numbered samples, built a batch at a time."""

    fingerprint: str
    """Changes when the samples do; compared over hosts and at resume."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """(inputs, targets) of the samples `indices` [n] (int64, none void), rows stacked in that order.

        `seeds` [n] are each sample's own (seed, epoch, sample) hash: random draws come from them alone.
        """


@runtime_checkable
class DataModule(Protocol):
    """A choice of the config group `dataset`: where data comes from, and its splits."""

    needs_prepare: ClassVar[bool]

    def prepare(self) -> None:
        """Fetch or convert, once a node, in the parent before any rank starts, without torch operations. May raise DataError."""

    def train(self) -> Dataset:
        """The training split, read-only, memory-mapped where it is large."""

    def validation(self) -> Dataset | None:
        """The validation split, apart from the training one; None if there is none."""


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

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch or self._permutation is None:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
            self._permutation = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return self._permutation
