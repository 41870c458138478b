"""Data that gives a wrong mean away: short batches and targets ignored unevenly.

If every rank and micro-batch held as many valid targets as every other, a mean of means would equal the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disttrain.data.dataset import Dataset
from disttrain.models.task import IGNORED


class Uneven:
    """The first `length` samples of a dataset; of sequence targets, a part that depends on the sample is ignored."""

    def __init__(self, dataset: Dataset, length: int, ignore: bool) -> None:
        """`ignore`: whether the task knows IGNORED targets."""
        self.dataset = dataset
        self.length = min(length, len(dataset))
        self.ignore = ignore
        self.fingerprint = dataset.fingerprint

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """As the dataset's, with the first targets of each sample ignored: none of sample 0, up to three quarters of others."""
        inputs, targets = self.dataset.batch(indices, seeds)
        if self.ignore and isinstance(targets, Tensor) and targets.dim() == 2 and not targets.is_floating_point():
            length = targets.shape[1]
            num_ignored = indices * (length // 4 + 1) % (3 * length // 4 + 1)
            targets = targets.masked_fill(torch.arange(length) < num_ignored[:, None], IGNORED)
        return inputs, targets
