"""A user's own data sets: random draws by sample, streams that are never unequal, workers that change nothing."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from disttrain.data.adapt import Adapted, MapStyle, Stream, data_module
from disttrain.data.dataset import Order, Position, sample_seeds
from disttrain.data.module import Loading
from disttrain.data.synthetic import Synthetic
from disttrain.data.workers import BatchSource
from disttrain.errors import DataError


@pytest.fixture(autouse=True)
def torchs_own_handler():
    """torch's DataLoader listens for its workers' end for the rest of the process's life."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Augmented(torch.utils.data.Dataset):
    """A sample is three random numbers, one of each generator; the target is its number."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]), index


class Counting(IterableDataset):
    """0, 1, 2, ... with a random number beside each."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for i in range(self.length):
            yield torch.tensor([float(i), random.random()]), i


class WhoAmI(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return torch.tensor([os.getpid(), torch.get_num_threads(), int(ignores)]), index


def requests(epoch=0, size=40, batch=5, seed=3, shuffle=True):
    order = Order(size, batch, seed, shuffle)
    for step in range(order.steps_per_epoch):
        rows = order.global_batch(Position(epoch, step))
        yield rows, sample_seeds(seed, epoch, rows)


def collect(dataset, num_workers=0, epochs=1, **fields):
    """{(epoch, target): input} over all batches."""
    source = BatchSource(dataset, Loading(num_workers, 2))
    found = {}
    for epoch in range(epochs):
        for inputs, targets in source.iterate(requests(epoch, **fields)):
            found |= {(epoch, int(target)): tuple(row.tolist()) for row, target in zip(inputs, targets, strict=True)}
    source.close()
    return found


def test_draws_are_the_samples_own_and_new_each_epoch():  # F07, F08
    found = collect(MapStyle(Augmented()), epochs=3)
    assert len(found) == 120
    for generator in range(3):
        assert len({draws[generator] for draws in found.values()}) == 120
    assert collect(MapStyle(Augmented()), epochs=3) == found
    assert collect(MapStyle(Augmented()), epochs=3, batch=8) == found  # whoever else is in the batch
    assert collect(MapStyle(Augmented()), seed=4)[0, 0] != found[0, 0]


def test_workers_change_no_number():  # F07, F08
    inline = collect(MapStyle(Augmented()), epochs=2)
    before = torch.default_generator.get_state(), random.getstate()
    assert collect(MapStyle(Augmented()), num_workers=2, epochs=2) == inline
    assert torch.equal(torch.default_generator.get_state(), before[0])  # else dropout would depend on the workers (C08)
    assert random.getstate() == before[1]


def test_batches_come_in_the_order_of_the_requests():
    source = BatchSource(MapStyle(Augmented()), Loading(2, 3))
    wanted = [rows.tolist() for rows, _ in requests()]
    assert [targets.tolist() for _, targets in source.iterate(requests())] == wanted
    abandoned = source.iterate(requests())
    next(abandoned)
    assert [targets.tolist() for _, targets in source.iterate(requests())] == wanted  # an epoch broken off leaves nothing behind
    source.close()


def test_workers_stay_over_epochs_have_one_thread_and_end():
    source = BatchSource(MapStyle(WhoAmI()), Loading(2))
    epochs = [
        torch.cat([inputs for inputs, _ in source.iterate(requests(epoch, size=8, batch=2))])[:, 0].unique().tolist() for epoch in range(2)
    ]
    (inputs, _), *_ = source.iterate(requests(size=8, batch=2))
    assert inputs[0, 1:].tolist() == [1, 1]  # threads, and Ctrl-C ignored
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) == 2
    assert os.getpid() not in epochs[0]
    source.close()
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{int(pid)}") for pid in epochs[0]):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.02)


def test_the_generators_are_as_they_were():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.default_generator.get_state()
    rows = torch.arange(4)
    MapStyle(Augmented()).batch(rows, sample_seeds(0, 0, rows))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.default_generator.get_state(), states[2])


def test_who_may_run_beside_the_step():
    assert not BatchSource(MapStyle(Augmented()), Loading()).fits_thread
    assert BatchSource(MapStyle(Augmented()), Loading(num_workers=1)).fits_thread
    assert BatchSource(Synthetic().train(), Loading()).fits_thread


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_take_slices_of_one_stream(num_workers):  # F04
    """Two ranks, each with half of every global batch, see what one rank sees; with its draws."""
    alone = collect(Stream(Counting(40), 40), epochs=2, shuffle=False)
    assert {target for _, target in alone} == set(range(40))
    assert all(row[0] == target for (_, target), row in alone.items())
    assert len({row[1] for row in alone.values()}) == 80  # draws differ over samples and epochs
    shared = {}
    for rank in range(2):
        source = BatchSource(Stream(Counting(40), 40), Loading(num_workers))
        for epoch in range(2):
            mine = (
                (rows[2 * rank : 2 * rank + 2], seeds[2 * rank : 2 * rank + 2]) for rows, seeds in requests(epoch, batch=4, shuffle=False)
            )
            for inputs, targets in source.iterate(mine):
                shared |= {(epoch, int(target)): tuple(row.tolist()) for row, target in zip(inputs, targets, strict=True)}
        source.close()
    assert shared == alone


def test_a_stream_goes_on_from_any_position():
    whole = collect(Stream(Counting(40), 40), epochs=2, shuffle=False)
    rows = torch.tensor([25, 26])
    inputs, _ = Stream(Counting(40), 40).batch(rows, sample_seeds(3, 1, rows))
    assert [tuple(row.tolist()) for row in inputs] == [whole[1, 25], whole[1, 26]]


def test_void_rows_of_a_stream_repeat_a_sample():
    stream = Stream(Counting(40), 40)
    rows = torch.tensor([8, 9, 9])
    assert stream.batch(rows, sample_seeds(0, 0, rows))[1].tolist() == [8, 9, 9]
    rows = torch.tensor([0, 0])
    assert stream.batch(rows, sample_seeds(0, 0, rows))[1].tolist() == [0, 0]


def test_a_stream_that_ends_early_is_an_error_on_all_ranks_alike():  # F04
    stream = Stream(Counting(7), 10)
    rows = torch.arange(10)
    with pytest.raises(DataError, match="ended after 7 samples, but an epoch has 10") as error:
        stream.batch(rows, sample_seeds(0, 0, rows))
    assert error.value.remedy == "dataset.length=7"
    with pytest.raises(DataError, match="how many samples") as error:
        Stream(Counting(7))
    assert "dataset.length=<samples>" in str(error.value.remedy)


def test_a_broken_sample_is_named():
    class Broken(Augmented):
        def __getitem__(self, index):
            return 1 / (index - 3)

    rows = torch.tensor([3])
    with pytest.raises(ZeroDivisionError) as error:
        MapStyle(Broken()).batch(rows, rows)
    assert error.value.__notes__ == ["while reading sample 3 of Broken"]
    rows = torch.tensor([4])
    with pytest.raises(DataError, match="a sample of Broken is a float, not a pair"):
        MapStyle(Broken()).batch(rows, rows)


class Grumbling(Augmented):
    """What a user's own data set may say of its samples."""

    def __getitem__(self, index):
        raise DataError("the third file is torn", "dataset.skip=3")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_data_set_says_is_raised_as_it_is_from_a_worker_too(num_workers):
    try:
        collect(MapStyle(Grumbling()), num_workers)
    except DataError as error:
        said = error.with_traceback(None)  # whose frames would keep the workers
    assert (said.message, said.remedy) == ("the third file is torn", "dataset.skip=3")
    assert said.__notes__[0].startswith("while reading sample ")


def test_own_data_sets_become_modules():
    assert isinstance(data_module(Augmented()), Adapted)
    module = data_module(Synthetic())
    assert isinstance(module, Synthetic)
    pairs = [(torch.zeros(2), 1), (torch.ones(2), 0)]
    rows = torch.tensor([1, 0])
    assert data_module(pairs).train().batch(rows, rows)[1].tolist() == [0, 1]
    assert Adapted(train=Augmented(), validation=Augmented()).validation() is not None
    assert Adapted(train=Augmented()).shuffle
    assert not Adapted(train=Counting(7), length=7).shuffle
    with pytest.raises(DataError, match=r"int is no .*DataModule"):
        data_module(3)


def test_collated_samples_keep_their_structure():
    pairs = [({"a": torch.full((2,), float(i)), "b": i}, torch.tensor(i)) for i in range(3)]
    rows = torch.tensor([2, 1])
    inputs, targets = MapStyle(pairs).batch(rows, rows)
    assert inputs["a"].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert inputs["b"].tolist() == targets.tolist() == [2, 1]
