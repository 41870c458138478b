"""The legal layouts of a model on a number of ranks, ranked by predicted step time under the memory limit.

Tried: every product of tp, cp, pp and data axes that divides the world and the model, plain replication and ZeRO 1 to 3
within a few shard degrees, four schedules, micro-batches that divide, and of recomputation (none, every second block, full)
the least that fits. A layout that does not fit is dropped before it is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from disttrain.config.schedules import takes
from disttrain.config.schema import HardwareConfig
from disttrain.config.sequence import tokens_multiple_of
from disttrain.config.world import divisors
from disttrain.plan.case import FULL, NONE, SPLIT_BACKWARD, Case, Layout, every
from disttrain.plan.closed import Closed, lacking
from disttrain.plan.constants import Constants
from disttrain.plan.memory import GIB, fullest
from disttrain.plan.planned import USABLE
from disttrain.plan.settle import OWN_TENSOR_EXPOSED, blocks_of
from disttrain.plan.shape import Shape

SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))
RECOMPUTE = (NONE, every(0.5), FULL)
MICRO = (1, 2, 4, 8, 16, 32)
LARGEST_CP = 16


@dataclass(frozen=True)
class Found:
    """One layout of a search."""

    case: Case
    seconds: float
    peak_bytes: float


@dataclass
class Search:
    """What a search has found, best first."""

    best: list[Found]
    num_tried: int
    num_fitting: int
    least_bytes: float
    """Peak of the layout that needs least, of all that were tried."""


def search(
    case: Case, world: int, hardware: HardwareConfig, constants: Constants, top: int = 10, allows: Callable[[Case], bool] | None = None
) -> Search:
    """Rank the layouts of `case`'s model and batch on `world` ranks. Of each product of degrees, the best of its variants is kept.

    `allows`: whether a training would take one. Where the hardware's rates are not known, all take no time.
    """
    limit = hardware.memory_gib * GIB * USABLE if hardware.memory_gib else float("inf")
    best: dict[tuple[int, ...], Found] = {}
    tried, fitting, least = 0, 0, float("inf")
    is_timed = lacking(case, hardware) is None
    for layout in layouts(case, world):
        if allows is not None and not allows(with_layout(case, layout)):
            continue
        for recompute in RECOMPUTE:
            one = with_layout(case, replace(layout, recompute=recompute))
            tried += 1
            peak = fullest(one)[1].total
            least = min(least, peak)
            if peak > limit:
                continue
            fitting += 1
            time = Closed(one, hardware).seconds(constants).step if is_timed else 0.0
            key = (layout.tp, layout.cp, layout.pp, layout.zero, layout.ep)
            if key not in best or time < best[key].seconds:
                best[key] = Found(one, time, peak)
            break  # computing more again would only take longer
    return Search(sorted(best.values(), key=lambda found: found.seconds)[:top], tried, fitting, least)


def with_layout(case: Case, layout: Layout) -> Case:
    """The case cut otherwise; what its software hides follows the layout."""
    splits = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
    software = replace(case.software, tensor_exposed=1.0 if splits else OWN_TENSOR_EXPOSED)
    return replace(case, layout=layout, software=software)


def layouts(case: Case, world: int) -> Iterator[Layout]:
    """Every layout that is tried."""
    shape = case.shape
    for tp in _tensor_degrees(shape, world):
        for pp in divisors(world // tp):
            if pp > shape.layers:
                break
            for cp in divisors(world // (tp * pp)):
                if cp > LARGEST_CP or case.length % tokens_multiple_of(cp, tp):
                    continue
                data = world // (tp * pp * cp)
                if case.global_batch % data == 0:
                    attention = case.layout.attention if cp > 1 else "gather"
                    whole = replace(case.layout, dp_shard=1, ep=1, zero=0, recompute=NONE, share_context=False)
                    degrees = replace(whole, tp=tp, pp=pp, cp=cp, dp_replicate=data)  # the rest stays as asked for
                    yield from _variants(case, replace(degrees, sequence_parallel=tp > 1, attention=attention))


def _tensor_degrees(shape: Shape, world: int) -> list[int]:
    return [n for n in divisors(world) if n <= 64 and all(limit % n == 0 for limit in shape.cut_by_tensor)]


def _variants(case: Case, layout: Layout) -> Iterator[Layout]:
    """Data axis, micro-batch and schedule of one product of degrees."""
    local = case.global_batch // layout.data
    for data in _data_axes(layout, case.shape.experts):
        for micro in (n for n in MICRO if local % n == 0):
            for schedule, virtual in SCHEDULES if layout.pp > 1 else (("1f1b", 1),):
                if not _takes(schedule, virtual, local // micro, layout.pp, case.shape.layers):
                    continue
                blocks = blocks_of(case.shape, schedule, layout.pp, virtual)
                offload = case.layout.offload and data.shares_rows
                yield replace(data, micro_batch=micro, schedule=schedule, virtual=virtual, blocks=blocks, offload=offload)


def _data_axes(layout: Layout, experts: int) -> Iterator[Layout]:
    """Plain replication, and ZeRO over all data ranks or over 8, 16, 32 or 64 of them with copies of those."""
    data = layout.data
    yield layout
    if data == 1:
        return
    if experts and (spread := math.gcd(data, experts)) > 1:  # experts shared out, the rest whole or shared out
        for zero in (0, 1) if layout.pp > 1 else (0, 1, 3):
            yield replace(layout, dp_replicate=data // spread, dp_shard=spread, ep=spread, zero=zero)
            if zero:
                yield replace(layout, dp_replicate=1, dp_shard=data, ep=spread, zero=zero)
    for shard in sorted({n for n in (8, 16, 32, 64, data) if data % n == 0}):
        for zero in (1,) if layout.pp > 1 else (1, 2, 3):  # a pipeline keeps weights and gradients whole
            yield replace(layout, dp_replicate=data // shard, dp_shard=shard, zero=zero)


def _takes(schedule: str, virtual: int, micro_batches: int, stages: int, layers: int) -> bool:
    """Whether the schedule takes so many micro-batches, and each chunk has a layer."""
    return stages == 1 or (layers >= stages * virtual and micro_batches >= stages and takes(schedule, micro_batches, stages))
