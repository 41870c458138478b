"""Random numbers that depend on what is asked for and on nothing else: not on a worker, a rank or the order of calls.

SplitMix64 (Steele, Lea and Flood 2014, OOPSLA) as a hash: its finaliser turns counters into independent 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(words: Words) -> Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def combine(key: Words, counter: Words) -> Words:
    """A word for each pair (key, counter), broadcast."""
    counted: Words = key + (counter + np.uint64(1)) * _GOLDEN
    return mix(counted)


def unmix(words: Words) -> Words:
    """The inverse of `mix`."""
    words = (words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))) * np.uint64(0x319642B2D24D8EC3)
    words = (words ^ (words >> np.uint64(27)) ^ (words >> np.uint64(54))) * np.uint64(0x96DE1B173F119089)
    inverse: Words = words ^ (words >> np.uint64(30)) ^ (words >> np.uint64(60))
    return inverse


@lru_cache(maxsize=64)
def derive(*parts: int) -> int:
    """One seed of 63 bits from several integers, order mattering."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = combine(key, np.array([part % (1 << 64)], np.uint64))
    return int(key[0] >> np.uint64(1))


def sample_seeds(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Seeds [n] (int64) of the samples `indices` [n] in this epoch. Any one of them gives away all others: `epoch_seeds`."""
    import torch

    words = combine(np.array([derive(seed, epoch)], np.uint64), indices.numpy().astype(np.uint64))
    return torch.from_numpy(words.view(np.int64))


def epoch_seeds(index: int, seed: int) -> Callable[[int], int]:
    """Every sample's seed of the epoch in which sample `index` has `seed`: who walks a stream passes others' samples too."""
    key = unmix(np.array([seed], np.int64).view(np.uint64)) - np.array([index + 1], np.uint64) * _GOLDEN
    return lambda i: int(combine(key, np.array([i % (1 << 64)], np.uint64)).view(np.int64)[0])


def uniform(keys: Words, count: int) -> NDArray[np.float64]:
    """[n, count] numbers in [0, 1), a row for each key [n]."""
    words = combine(keys[:, None], np.arange(count, dtype=np.uint64)[None])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(keys: Words, count: int, below: int) -> NDArray[np.int64]:
    """[n, count] integers in [0, below), a row for each key [n]."""
    return (uniform(keys, count) * below).astype(np.int64)


def normal(keys: Words, count: int) -> NDArray[np.float32]:
    """[n, count] standard normal numbers, a row for each key [n] (Box and Muller 1958)."""
    half = -(-count // 2)
    drawn: NDArray[Any] = uniform(keys, 2 * half)
    radius = np.sqrt(-2.0 * np.log1p(-drawn[:, :half]))
    angle = 2.0 * np.pi * drawn[:, half:]
    pair = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pair[:, :count].astype(np.float32)
