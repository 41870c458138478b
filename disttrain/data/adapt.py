"""A user's own torch data sets, map-style and iterable, as numbered samples in one global order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from disttrain.data.dataset import Dataset
from disttrain.data.module import DataModule, Kind, Loading
from disttrain.data.seeds import epoch_seeds
from disttrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable


class SeedsProcess:
    """Data sets whose `batch` seeds the process-wide generators while it runs: not to be called beside a step, in a thread."""


class MapStyle(SeedsProcess):
    """A data set with `__len__` and `__getitem__` -> (input, target), collated by torch's `default_collate`.

    Its draws from `random`, `numpy.random` and torch's default generator follow from the sample's own seed, so they depend
    neither on the rank nor on the worker, repeat with the run's seed and differ from epoch to epoch.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Any]) -> None:
        """DataError if it has no length."""
        self.dataset = dataset
        self.length = _length(dataset, "derive it from torch.utils.data.IterableDataset, or give it __len__")
        self.fingerprint = fingerprint_of(dataset, self.length)

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """Samples in the order of `indices`."""
        with generators_kept():
            rows = [self._item(index, seed) for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True)]
        return collate(rows, self.dataset)

    def _item(self, index: int, seed: int) -> Any:
        seed_generators(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


STREAM_REMEDY = (
    "give it __len__, or wrap it: dataset._target_=disttrain.data.adapt.Adapted dataset.train._target_=<its class> dataset.length=<samples>"
)


class Stream(SeedsProcess):
    """An iterable data set as one global stream: every rank walks through it and keeps the samples that are its own.

    So ranks never have unequal numbers of batches, and an epoch is `length` samples for all. Samples are to be asked for in
    rising order (no shuffle); asking for an earlier one, or for one of another epoch, starts the stream anew.
    """

    def __init__(self, dataset: IterableDataset[Any], length: int | None = None) -> None:
        """`length`: samples an epoch, by default the data set's own; DataError if it states none."""
        self.dataset = dataset
        self.length = _length(dataset, STREAM_REMEDY) if length is None else length
        self.fingerprint = fingerprint_of(dataset, self.length)
        self._rows: Iterator[Any] = iter(())
        self._next = 0
        self._seed_of: Callable[[int], int] | None = None

    def __len__(self) -> int:
        """Samples an epoch."""
        return self.length

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """Samples in the order of `indices`; those that lie between are read and dropped. DataError if the stream ends early."""
        wanted = indices.tolist()
        seed_of = epoch_seeds(wanted[0], int(seeds[0]))
        with generators_kept():
            if self._seed_of is None or min(wanted) < self._next or seed_of(0) != self._seed_of(0):
                seed_generators(seed_of(-1))  # for what the data set draws before its first sample
                self._rows, self._next, self._seed_of = iter(self.dataset), 0, seed_of
            found = {index: self._read(index) for index in sorted(set(wanted))}
        return collate([found[index] for index in wanted], self.dataset)

    def _read(self, index: int) -> Any:
        assert self._seed_of is not None
        row = None
        while self._next <= index:
            seed_generators(self._seed_of(self._next))
            try:
                row = next(self._rows)
            except StopIteration:
                raise DataError(
                    f"{type(self.dataset).__name__} ended after {self._next} samples, but an epoch has {self.length}: a stream "
                    "must not depend on the rank (each takes its slice of the whole)",
                    f"dataset.length={self._next}",
                ) from None
            self._next += 1
        return row

    def __getstate__(self) -> dict[str, Any]:
        """A process that gets a copy walks through it from the start."""
        return self.__dict__ | {"_rows": iter(()), "_next": 0, "_seed_of": None}


class Adapted(DataModule):
    """Data sets of the user's own, as a choice of the config group `dataset`."""

    kind: Kind = "vectors"
    needs_prepare: ClassVar[bool] = False

    def __init__(
        self,
        *,
        train: torch.utils.data.Dataset[Any],
        validation: torch.utils.data.Dataset[Any] | None = None,
        length: int | None = None,
        validation_length: int | None = None,
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = True,
    ) -> None:
        """`train` and `validation` are torch data sets (a component each); the lengths are for streams that state none."""
        self.loading = Loading(num_workers, prefetch, pin_memory)
        self._train = numbered(train, length)
        self._validation = None if validation is None else numbered(validation, validation_length)
        self.shuffle = not isinstance(self._train, Stream)

    def train(self) -> Dataset:
        """The training samples."""
        return self._train

    def validation(self) -> Dataset | None:
        """The validation samples."""
        return self._validation


def data_module(component: Any) -> DataModule:
    """What `dataset._target_` built, as a DataModule: one already, or a torch data set to train on. DataError for all else."""
    if isinstance(component, DataModule):
        return component
    if isinstance(component, (torch.utils.data.Dataset, Dataset)) or hasattr(component, "__getitem__"):
        return Adapted(train=component)
    raise DataError(
        f"{type(component).__name__} is no disttrain.data.module.DataModule and no torch data set",
        "dataset._target_=disttrain.data.adapt.Adapted dataset.train._target_=my_package.MyDataset",
    )


def numbered(dataset: Any, length: int | None = None) -> Dataset:
    """`dataset` as numbered samples."""
    if isinstance(dataset, IterableDataset):
        return Stream(dataset, length)
    return dataset if isinstance(dataset, Dataset) else MapStyle(dataset)


def fingerprint_of(dataset: Any, length: int) -> str:
    """The data set's own `fingerprint` if it states one; else its class and length, which is all that can be seen."""
    stated = getattr(dataset, "fingerprint", None)
    return str(stated) if stated is not None else f"{type(dataset).__module__}.{type(dataset).__qualname__}-{length}"


def collate(rows: list[Any], dataset: Any) -> tuple[Any, Any]:
    """Stack (input, target) pairs; DataError if samples are something else."""
    if not isinstance(rows[0], (tuple, list)) or len(rows[0]) != 2:
        raise DataError(f"a sample of {type(dataset).__name__} is a {type(rows[0]).__name__}, not a pair (input, target)")
    inputs, targets = default_collate(rows)
    return inputs, targets


def seed_generators(seed: int) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator; `torch.manual_seed` would reach for the GPUs too."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the state of the three generators back at the end, so that dropout doesn't depend on the data."""
    python, numpy, ours = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(ours)


def _length(dataset: Any, remedy: str) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise DataError(f"{type(dataset).__name__} does not say how many samples it has", remedy) from error
