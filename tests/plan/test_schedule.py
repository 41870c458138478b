"""Steps played on the clock against the closed formulas of their bubbles."""

from __future__ import annotations

from itertools import pairwise

import pytest

from disttrain.plan import pipeline
from disttrain.plan.pipeline import Times
from disttrain.plan.schedule import BACKWARD, FORWARD, Clock

EQUAL = Times(1.0, 1.0, 1.0)


@pytest.mark.parametrize("micro", [4, 8, 16])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2)])
def test_the_clock_gives_the_textbook_bubble(schedule: str, chunks: int, micro: int) -> None:
    clock = Clock(schedule, 4, chunks, micro, EQUAL)
    assert clock.length == pytest.approx(micro * EQUAL.total + pipeline.bubble(schedule, 4, chunks, EQUAL))


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_split_backwards_wait_less_than_one_forward_one_backward(schedule: str) -> None:
    split, plain = Clock(schedule, 4, 2, 16, EQUAL), Clock("1f1b", 4, 1, 16, EQUAL)
    assert 16 * EQUAL.total <= split.length < plain.length


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2), ("dualpipev", 2)])
def test_every_micro_batch_passes_every_chunk_once_in_order(schedule: str, chunks: int) -> None:
    clock = Clock(schedule, 4, chunks, 8, EQUAL)
    for actions in clock.done:
        seen = [(action.kind, action.chunk, action.micro) for action in actions]
        assert len(seen) == len(set(seen)) == 8 * clock.chunks * (3 if clock.splits else 2)
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(actions))
    ends = {(a.kind, clock.stage(rank, a.chunk), a.micro): a for rank, actions in enumerate(clock.done) for a in actions}
    for (kind, stage, micro), action in ends.items():
        if kind == FORWARD and stage:
            assert ends[FORWARD, stage - 1, micro].end <= action.start + 1e-9
        if kind == BACKWARD and stage < 4 * clock.chunks - 1:
            assert ends[BACKWARD, stage + 1, micro].end <= action.start + 1e-9


def test_micro_batches_in_flight_are_those_of_the_clock() -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        clock = Clock(schedule, 4, chunks, 16, EQUAL)
        for rank, actions in enumerate(clock.done):
            held = most = 0
            for action in actions:
                held += 1 if action.kind == FORWARD else -1
                most = max(most, held)
            assert most == pytest.approx(pipeline.in_flight(schedule, 4, chunks, 16, rank) * chunks)
