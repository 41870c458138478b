"""How a chain of layers is cut into stages: the dearest stage as cheap as can be, the others as even as that leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def balanced_starts(costs: Sequence[float], is_block: Sequence[bool], num_stages: int) -> list[int]:
    """First unit of each later stage; each has at least one block (a chain without blocks: one unit).

    `costs` of the units, of which there are enough for the stages. Of cuts that are as good the one with the earliest starts.
    """
    return list(_balanced(tuple(costs), tuple(is_block), num_stages))


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], is_block: tuple[bool, ...], num_stages: int) -> tuple[int, ...]:
    blocks = is_block if any(is_block) else (True,) * len(costs)
    dearest, _ = _cheapest(costs, blocks, num_stages, float("inf"), squares=False)
    _, starts = _cheapest(costs, blocks, num_stages, dearest * (1 + 1e-12), squares=True)
    return starts[1:]


def _cheapest(
    costs: Sequence[float], blocks: Sequence[bool], num_stages: int, limit: float, squares: bool
) -> tuple[float, tuple[int, ...]]:
    """The cut with the least score, by dynamic programming over (stages, units): its score and the stages' first units.

    The score is the dearest stage's cost, or with `squares` the sum of all costs squared; none may be above `limit`.
    """
    cost = [0.0, *accumulate(costs)]
    num_blocks = [0, *accumulate(map(int, blocks))]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_stages):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (score, starts) in best.items():
            for end in range(start + 1, len(costs) + 1):
                own = cost[end] - cost[start]
                if own > limit:
                    break
                if num_blocks[end] == num_blocks[start]:
                    continue
                made = score + own * own if squares else max(score, own)
                if end not in found or made <= found[end][0]:
                    way = made, (*starts, start)
                    found[end] = min(way, found[end]) if end in found else way
        best = found
    return best[len(costs)]
