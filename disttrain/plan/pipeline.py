"""Pipelines: how layers lie on stages, how long ranks wait, how many micro-batches are in flight.

Bubbles as times beside the m micro-batches of work of a stage; F, B (of inputs), W (of weights) are one stage's times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from disttrain.plan.case import V_SHAPED, Case


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one micro-batch on one rank's layers: forward, backward for inputs, backward for weights."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


def bubble(schedule: str, stages: int, chunks: int, times: Times) -> float:
    """Seconds a rank waits in a step with `stages` pipeline ranks that hold `chunks` chunks each.

    gpipe, 1f1b: (p-1)(F+B+W) (Narayanan et al. 2021, arXiv:2104.04473); interleaved: that over v.
    zero bubble H1: (p-1)(F+B-W), over v if interleaved; ZBV: (p-1)(F+B-2W) over its two chunks, but at least the way down
    the pipe, (p-1)F/2, which a step that ends together pays (Qi et al. 2024, arXiv:2401.10241); the paper's searched 1p and 2p
    by its measured shares.
    DualPipeV: (p-1)(F+B+W + B+W - 3W)/2 (DeepSeek-AI 2024, arXiv:2412.19437, table 2; cut in half as the V-schedule folds it).
    """
    if stages == 1:
        return 0.0
    rest = stages - 1
    f, b, w = times.forward, times.backward_input, times.backward_weight
    if schedule in ("gpipe", "1f1b"):
        return rest * times.total
    if schedule == "interleaved_1f1b":
        return rest * times.total / chunks
    if schedule == "interleaved_zero_bubble":
        return rest * max(f + b - w, 0.0) / chunks
    if schedule == "zbv":
        return rest * max(f + b - 2 * w, f) / 2
    if schedule == "dualpipev":
        return rest * max(f + 2 * b - w, 0.0) / 2
    if schedule == "zero_bubble":
        return rest * times.total / 3
    if schedule == "zero_bubble_2p":
        return 0.0
    raise AssertionError(f"unknown schedule {schedule}")


def in_flight(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> float:
    """Micro-batches whose activations rank `stage` holds at its fullest, in units of all its layers.

    Interleaved 1F1B: p (1 + (p-1)/(p v)) at the first (Korthikanti et al. 2022, section 4.3); ZBV: p everywhere.
    """
    if stages == 1:
        return 1.0
    if schedule == "gpipe":
        return micro_batches
    warm = stages - stage
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        warm_chunks = (stages - stage - 1) * 2 + (chunks - 1) * stages + 1
        return min(warm_chunks, micro_batches * chunks) / chunks
    if schedule == "zero_bubble_2p":
        return min(2 * stages - 1, micro_batches)
    if schedule == "zbv":
        return min(stages, micro_batches)
    if schedule == "dualpipev":
        return min(stages + 0.5, micro_batches)
    return min(warm, micro_batches)


def blocks_of(case: Case) -> tuple[tuple[int, ...], ...]:
    """Layers on each pipeline rank; what doesn't divide goes to the first ranks, so that the last, which has the head, has fewest."""
    if case.layout.blocks:
        return case.layout.blocks
    each, over = divmod(case.shape.layers, case.layout.pp)
    return in_order([each + (rank < over) for rank in range(case.layout.pp)])


def in_order(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """So many layers on each rank, one rank's behind the other's."""
    ends = accumulate(counts)
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


def layers_of(case: Case) -> tuple[int, ...]:
    """How many layers each pipeline rank has."""
    return tuple(map(len, blocks_of(case)))


def balanced(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers on each rank when the head counts as `head` layers on the last: the smallest largest stage, heaviest first."""
    for limit in range(-(-layers // stages), layers + 1):
        last = max(0, min(limit, int(limit - head)))
        if stages > 1 and last + limit * (stages - 1) >= layers:
            each, over = divmod(layers - last, stages - 1)
            if each + (over > 0) >= last:
                return (*(each + (rank < over) for rank in range(stages - 1)), last)
    return (layers,) if stages == 1 else (*(layers // stages + (rank < layers % stages) for rank in range(stages)),)


def holds_head(case: Case, stage: int) -> bool:
    """Whether pipeline rank `stage` computes the head and the loss."""
    return stage == (0 if case.layout.schedule in V_SHAPED else case.layout.pp - 1)
