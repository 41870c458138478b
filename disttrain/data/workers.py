"""Batches from requests, in order: in the rank itself, or ahead of it in worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from disttrain.data.adapt import SeedsProcess
from disttrain.data.dataset import Dataset
from disttrain.data.module import Loading
from disttrain.errors import UserError

Request = tuple[Tensor, Tensor]
"""(indices, seeds) of one batch."""


class BatchSource:
    """Turns requests into batches of `dataset`. Workers live from the first request to `close`, over all epochs."""

    def __init__(self, dataset: Dataset, loading: Loading) -> None:
        """Starts nothing yet."""
        self.dataset = dataset
        self.loading = loading
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None

    @property
    def fits_thread(self) -> bool:
        """Whether `iterate` may run in a thread beside the step. Not if it seeds this process's own generators."""
        return self.loading.num_workers > 0 or not isinstance(self.dataset, SeedsProcess)

    @property
    def by_sample(self) -> bool:
        """Whether batches are built sample by sample, here or in workers: then several at once save nothing."""
        return self.loading.num_workers > 0 or isinstance(self.dataset, SeedsProcess)

    def iterate(self, requests: Iterator[Request]) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each request, in the order of requests; one iteration at a time."""
        if self.loading.num_workers == 0:
            return (self.dataset.batch(indices, seeds) for indices, seeds in requests)
        if self._loader is None:
            self._loader = self._start()
        self._requests.source = requests
        with warnings.catch_warnings():
            # Python 3.12 warns of every fork beside other threads; a worker of one thread takes none of their locks.
            warnings.filterwarnings("ignore", r"This process .* is multi-threaded, use of fork", DeprecationWarning)
            batches = iter(self._loader)
        return map(_raised, batches)

    def close(self) -> None:
        """End the workers."""
        self._loader = None

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            _Served(self.dataset),
            sampler=self._requests,
            batch_size=None,
            num_workers=self.loading.num_workers,
            prefetch_factor=self.loading.prefetch,
            collate_fn=_unchanged,
            worker_init_fn=_settle,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn",
            persistent_workers=True,
            generator=torch.Generator(),  # else each iteration would draw from the generator that dropout uses
        )


def worker_seconds() -> float:
    """Seconds of a processor that this process's workers have used so far; W&B's and other children don't count."""
    import psutil

    times = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children() if child.pid is not None]
    return float(sum(one.user + one.system for one in times))


class _Requests:
    """The requests at hand, as a sampler."""

    def __init__(self) -> None:
        self.source: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.source


class _Served(torch.utils.data.Dataset[Any]):
    """A data set whose 'index' is a whole request."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> tuple[Any, Any] | UserError:
        try:
            return self.dataset.batch(*request)
        except UserError as error:  # torch would make a text of it, with the worker's traceback
            return error


def _raised(batch: Any) -> tuple[Any, Any]:
    """A worker's batch; what it found wrong is raised here."""
    if isinstance(batch, UserError):
        raise batch
    inputs, targets = batch
    return inputs, targets


def _unchanged(batch: Any) -> Any:
    return batch


def _settle(worker: int) -> None:
    """In a new worker: one thread; Ctrl-C and requests to stop are the parent's business, which ends its workers itself."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
