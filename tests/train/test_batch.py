"""Steps as they are filled: one shape, void rows that count for nothing, any position, built ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from disttrain.data.dataset import Order, Position
from disttrain.data.workers import BatchSource
from disttrain.models.task import Classification
from disttrain.parallel.mesh import Axis
from disttrain.parallel.step import Step
from disttrain.train.batch import Feed, Slice, _ahead, split_positions, train_positions
from tests.train.runs import Samples, tokens

CPU = torch.device("cpu")


def feed(rank: int = 0, ranks: int = 1, length: int = 21, micro: int = 2) -> Feed:
    data = Samples(length, tokens)
    part = Slice(Axis("data", ranks, rank, tuple(range(ranks))), 8, micro)
    return Feed(BatchSource(data.train(), data.loading), Order(length, 8, seed=0), part, Classification("tokens"), CPU)


def steps_of(one: Feed) -> list[Step]:
    return list(one.steps(split_positions(one.order)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_micro_batch_of_a_run_has_one_shape_and_every_sample_is_in_one_place(ranks: int) -> None:
    taken: list[int] = []
    for rank in range(ranks):
        for step in steps_of(feed(rank, ranks)):
            assert len(step.micro) == 4 // ranks
            for batch in step.micro:
                assert batch.inputs.shape == batch.targets.shape == (2, 16)
                taken += [index for index in batch.indices.tolist() if index >= 0]
                real = batch.indices >= 0
                assert bool(real.all()) if batch.valid is None else torch.equal(batch.valid, real)
    assert sorted(taken) == list(range(21))


def test_counts_leave_void_samples_and_ignored_targets_out() -> None:
    """The last of three steps has 5 samples; of sample i the first i % 8 of 16 targets are ignored."""
    *_, last = steps_of(feed())
    real = [index for batch in last.micro for index in batch.indices.tolist() if index >= 0]
    assert len(real) == 5
    assert last.local_counts == {"loss": float(sum(16 - index % 8 for index in real))}


def test_a_rank_without_samples_counts_nothing_and_still_has_its_shape() -> None:
    *_, last = steps_of(feed(rank=3, ranks=4))
    assert last.local_counts == {"loss": 0.0}
    assert [batch.valid.tolist() for batch in last.micro] == [[False, False]]  # type: ignore[union-attr]
    assert last.micro[0].inputs.shape == (2, 16)


def test_a_run_can_begin_at_any_position() -> None:
    """E01's arithmetic: the rest of a broken run is the tail of the unbroken one."""
    one = feed()
    whole = [(number, step.micro[0].indices.tolist()) for number, step in zip(range(9), one.steps(every(one.order)), strict=True)]
    tail = list(one.steps(train_positions(one.order, 5, Position(1, 2), 9)))
    assert [(step.number, step.micro[0].indices.tolist()) for step in tail] == whole[5:]


def every(order: Order) -> Iterator[tuple[int, Position]]:
    return train_positions(order, 0, Position(), 9)


def test_positions_cross_epochs() -> None:
    assert [position for _, position in every(Order(21, 8, seed=0))] == [Position(epoch, step) for epoch in range(3) for step in range(3)]


def numbered(count: int, fails_at: int = -1) -> Iterator[Step]:
    for number in range(count):
        if number == fails_at:
            raise ValueError("planted")
        yield Step(number, [])


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_steps_built_ahead_come_in_order_and_the_thread_ends() -> None:
    assert [step.number for step in _ahead(numbered(20), 3)] == list(range(20))
    assert not prefetchers()


def test_an_error_while_building_ahead_is_raised_where_the_step_is_wanted() -> None:
    seen = []
    with pytest.raises(ValueError, match="planted"):
        seen.extend(step.number for step in _ahead(numbered(20, fails_at=5), 3))
    assert not prefetchers()


def test_leaving_early_ends_the_thread() -> None:
    steps = _ahead(numbered(1000), 2)
    assert next(steps).number == 0
    assert len(prefetchers()) == 1
    steps.close()  # type: ignore[attr-defined]
    assert not prefetchers()
