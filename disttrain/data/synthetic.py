"""Random samples of any shape and number, made when they are asked for: no storage, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from disttrain.data.module import DataModule, Kind, Loading
from disttrain.data.seeds import Words, combine, derive, integers, normal
from disttrain.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""Target value that counts for nothing, as in models/task.py."""


class Synthetic(DataModule):
    """Random inputs and targets, each sample a function of (seed, split, sample number).

    vectors: normal inputs and normal targets of `shape`, for regression. images: normal inputs of `shape`, a class label each.
    tokens: uniform token numbers [context], each target the next token.
    """

    def __init__(
        self,
        *,
        kind: Literal["vectors", "images", "tokens"] = "vectors",
        num_samples: int = 1024,
        num_validation: int = 128,
        shape: Sequence[int] = (32, 512),
        context: int = 128,
        vocab_size: int = 256,
        num_classes: int = 10,
        uneven: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = True,
    ) -> None:
        """`shape` (of one sample) is for vectors and images, `num_classes` for images, the next three for tokens.

        uneven: each token sample counts a number of targets of its own, between one and all; the rest is ignored, as if
        it were padding. seed: of the data, apart from the run's.
        """
        if kind not in ("vectors", "images", "tokens"):
            raise DataError(f"dataset.kind={kind} is not one of vectors, images, tokens", "dataset.kind=vectors")
        for key, value, least in (("num_samples", num_samples, 1), ("num_validation", num_validation, 0), ("context", context, 1)):
            if value < least:
                raise DataError(f"dataset.{key}={value} is less than {least}", f"dataset.{key}={max(least, 128)}")
        if uneven and kind != "tokens":
            raise DataError("dataset.uneven ignores targets of token sequences", "dataset.kind=tokens")
        self.kind: Kind = kind
        self.num_samples = num_samples
        self.num_validation = num_validation
        self.shape = (context,) if kind == "tokens" else tuple(shape)
        self.uneven = uneven
        self.seed = seed
        self.loading = Loading(num_workers, prefetch, pin_memory)
        self._vocab_size = vocab_size
        self._num_classes = num_classes

    def train(self) -> RandomSamples:
        """`num_samples` samples."""
        return RandomSamples(self, 0, self.num_samples)

    def validation(self) -> RandomSamples | None:
        """`num_validation` samples, none of the training ones."""
        return RandomSamples(self, 1, self.num_validation) if self.num_validation else None

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens."""
        return self._vocab_size if self.kind == "tokens" else None

    @property
    def num_classes(self) -> int | None:
        """Number of different labels."""
        return self._num_classes if self.kind == "images" else None

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """`shape`, or the context."""
        return self.shape


class RandomSamples:
    """One split of `Synthetic`."""

    def __init__(self, data: Synthetic, split: int, length: int) -> None:
        """Holds numbers only."""
        self.kind = data.kind
        self.shape = data.shape
        self.below = data.vocab_size or data.num_classes or 0
        self.uneven = data.uneven
        self.length = length
        self.seed = derive(data.seed, split)
        self.fingerprint = f"synthetic-{self.kind}-{self.shape}-{self.below}-{self.uneven}-{length}-{self.seed}"

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Rows from the samples' numbers alone, so each is the same in every epoch; `seeds` are not used."""
        import torch

        keys = combine(np.array([self.seed], np.uint64), indices.numpy().astype(np.uint64))
        inputs, targets = self._tokens(keys) if self.kind == "tokens" else self._numbers(keys)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _tokens(self, keys: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        (context,) = self.shape
        rows = integers(keys, context + 1, self.below)
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if self.uneven:
            lengths = 1 + integers(combine(keys, np.array([1], np.uint64)), 1, context)  # [n, 1], in 1 .. context
            targets[np.arange(context)[None] >= lengths] = IGNORED
        return inputs, targets

    def _numbers(self, keys: Words) -> tuple[NDArray[np.float32], NDArray[np.float32] | NDArray[np.int64]]:
        size = math.prod(self.shape)
        inputs = normal(keys, size).reshape(-1, *self.shape)
        others = combine(keys, np.array([size], np.uint64))
        if self.kind == "images":
            return inputs, integers(others, 1, self.below)[:, 0]
        return inputs, normal(others, size).reshape(-1, *self.shape)
