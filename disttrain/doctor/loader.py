"""How fast a loader's worker hands batches over on this machine, and what it and the rank use of a processor meanwhile."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from disttrain.data.module import Loading
from disttrain.data.workers import BatchSource, Request, worker_seconds

ROWS, NUMBERS, BATCH = 4096, 784, 64
"""Of images of 28 x 28 in memory, of which a batch takes some at random: what handing over costs, without a disk."""
WARM = 8
"""Batches before it counts."""


class Images:
    """Random images."""

    fingerprint = "doctor"

    def __init__(self) -> None:
        self.table = torch.rand(ROWS, NUMBERS)

    def __len__(self) -> int:
        """Images."""
        return ROWS

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(images, their numbers)."""
        return self.table[indices], indices


def measure(seconds: float = 0.5) -> dict[str, float]:
    """`batches` and `bytes` a second of one worker; `worker` and `rank`: seconds of a processor that each uses in one."""
    source, handler = BatchSource(Images(), Loading(num_workers=1)), signal.getsignal(signal.SIGCHLD)
    batches = source.iterate(_requests())
    for _ in range(WARM):
        inputs = next(batches)[0]
    began, worker, rank = time.perf_counter(), worker_seconds(), time.process_time()
    count = 0
    while time.perf_counter() - began < seconds or count == 0:
        inputs = next(batches)[0]
        count += 1
    took, worker, rank = time.perf_counter() - began, worker_seconds() - worker, time.process_time() - rank
    source.close()
    del batches
    signal.signal(signal.SIGCHLD, handler)  # torch's loader had put its own there
    return {"batches": count / took, "bytes": count * inputs.nbytes / took, "worker": worker / took, "rank": rank / took}


def _requests() -> Iterator[Request]:
    for number in itertools.count():
        yield torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(number)), torch.zeros(BATCH, dtype=torch.int64)
