"""A pipeline step played on a clock: which rank does what when.

gpipe, 1f1b and interleaved 1f1b have their order of actions written out; schedules that split the backward are played
greedily, as they were made: the backward for inputs first, then a forward while memory allows, weights where a rank would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disttrain.plan.case import SPLIT_BACKWARD, V_SHAPED
from disttrain.plan.pipeline import Times

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does: kind (F, B, W; a B that is not split is both), chunk of the rank, micro-batch."""

    kind: str
    chunk: int
    micro: int
    start: float = 0.0
    end: float = 0.0


class Clock:
    """`ranks` with `chunks` each and `micro_batches` to pass through, under a schedule; times are those of one whole rank."""

    def __init__(self, schedule: str, ranks: int, chunks: int, micro_batches: int, times: Times) -> None:
        """Play the step; `done[rank]` are its actions in order of time."""
        self.schedule, self.ranks, self.micro_batches = schedule, ranks, micro_batches
        self.chunks = 2 if schedule in V_SHAPED else chunks
        self.splits = schedule in SPLIT_BACKWARD
        back = times.backward_input if self.splits else times.backward_input + times.backward_weight
        self.cost = {FORWARD: times.forward / self.chunks, BACKWARD: back / self.chunks, WEIGHT: times.backward_weight / self.chunks}
        self.ended: dict[tuple[str, int, int], float] = {}
        self.done: list[list[Action]] = [[] for _ in range(ranks)]
        self._play_greedily() if self.splits else self._play_in_order()

    @property
    def length(self) -> float:
        """When the last action ends."""
        return max(actions[-1].end for actions in self.done)

    def stage(self, rank: int, chunk: int) -> int:
        """Where in the model a rank's chunk lies."""
        if self.schedule in V_SHAPED:
            return rank if chunk == 0 else 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def _ready(self, rank: int, kind: str, chunk: int, micro: int) -> float | None:
        """When what an action waits for has ended; None while it has not been scheduled."""
        stage, last = self.stage(rank, chunk), self.ranks * self.chunks - 1
        if kind == FORWARD:
            needs = [(FORWARD, stage - 1, micro)] if stage else []
        elif kind == BACKWARD:
            needs = [(FORWARD, stage, micro), *([(BACKWARD, stage + 1, micro)] if stage < last else [])]
        else:
            needs = [(BACKWARD, stage, micro)]
        ends = [self.ended.get(need) for need in needs]
        return None if None in ends else max([end for end in ends if end is not None], default=0.0)

    def _do(self, rank: int, kind: str, chunk: int, micro: int, ready: float) -> None:
        start = max(ready, self.done[rank][-1].end if self.done[rank] else 0.0)
        action = Action(kind, chunk, micro, start, start + self.cost[kind])
        self.done[rank].append(action)
        self.ended[kind, self.stage(rank, chunk), micro] = action.end

    def _play_in_order(self) -> None:
        waiting = [list(self._order(rank))[::-1] for rank in range(self.ranks)]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(waiting):
                while actions and (ready := self._ready(rank, *actions[-1])) is not None:
                    self._do(rank, *actions.pop(), ready)
                    moved = True
        assert not any(waiting), "an order of actions that waits for itself"

    def _order(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """The actions of a rank, as (kind, chunk, micro-batch)."""
        total, m = self.micro_batches * self.chunks, self.micro_batches
        if self.schedule == "gpipe":
            warm = total
        elif self.chunks == 1:
            warm = min(self.ranks - rank - 1, m)
        else:
            warm = min((self.ranks - rank - 1) * 2 + (self.chunks - 1) * self.ranks, total)

        def forward(number: int) -> tuple[str, int, int]:
            return FORWARD, number // self.ranks % self.chunks, self._micro(number)

        def backward(number: int) -> tuple[str, int, int]:
            return BACKWARD, self.chunks - 1 - number // self.ranks % self.chunks, self._micro(number)

        if self.chunks == 1:
            yield from ((FORWARD, 0, i) for i in range(warm))
            for i in range(m - warm):
                yield FORWARD, 0, warm + i
                yield BACKWARD, 0, i
            yield from ((BACKWARD, 0, i) for i in range(m - warm, m))
            return
        yield from (forward(i) for i in range(warm))
        for i in range(total - warm):
            yield forward(warm + i)
            yield backward(i)
        yield from (backward(i) for i in range(total - warm, total))

    def _micro(self, number: int) -> int:
        """The micro-batch of an interleaved rank's `number`-th forward: groups of as many micro-batches as ranks."""
        return number // (self.ranks * self.chunks) * self.ranks + number % self.ranks

    def _play_greedily(self) -> None:
        """Of each kind and chunk, micro-batches go in order, so what is next is a count."""
        limit = self.ranks * self.chunks + (1 if self.schedule == "dualpipev" else 0)
        following = [{kind: [0] * self.chunks for kind in (FORWARD, BACKWARD, WEIGHT)} for _ in range(self.ranks)]
        now, total = [0.0] * self.ranks, self.micro_batches * self.chunks
        while unfinished := [rank for rank in range(self.ranks) if sum(following[rank][WEIGHT]) < total]:
            rank = min(unfinished, key=now.__getitem__)
            chosen, later = self._choose(rank, following[rank], now[rank], limit)
            if chosen is None:
                now[rank] = later
                continue
            kind, chunk = chosen
            self._do(rank, kind, chunk, following[rank][kind][chunk], now[rank])
            following[rank][kind][chunk] += 1
            now[rank] = self.done[rank][-1].end

    def _choose(self, rank: int, following: dict[str, list[int]], now: float, limit: int) -> tuple[tuple[str, int] | None, float]:
        """What a rank does now, or until when it waits. The limit holds back new micro-batches, never one that is under way."""
        full = sum(following[FORWARD]) - sum(following[WEIGHT]) >= limit
        for kind in (BACKWARD, FORWARD, WEIGHT):
            chunks = sorted(range(self.chunks), key=lambda chunk, kind=kind: self._turn(kind, chunk, following[kind][chunk]))  # type: ignore[misc]
            for chunk in chunks:
                if following[kind][chunk] == self.micro_batches or (kind == FORWARD and chunk == 0 and full):
                    continue
                ready = self._ready(rank, kind, chunk, following[kind][chunk])
                if ready is not None and ready <= now:
                    return (kind, chunk), now
        coming = [actions[-1].end for actions in self.done if actions and actions[-1].end > now]
        return None, min(coming, default=now + min(self.cost.values()) / 8)  # others may still begin something at this very time

    def _turn(self, kind: str, chunk: int, micro: int) -> tuple[int, int]:
        """Which chunk is next: a V's way back first, else groups of as many micro-batches as ranks, chunk by chunk."""
        if self.schedule in V_SHAPED or kind != FORWARD:
            return 0, -chunk
        return micro // self.ranks, chunk
