"""What a dry run counted beside what the formulas say, line by line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from disttrain.plan import tensors
from disttrain.plan.memory import GIB
from disttrain.plan.memory import memory as of_stage
from disttrain.plan.planned import Plan
from disttrain.plan.table import columns, facts, show_seconds
from disttrain.plan.walls import show_bytes, show_count

if TYPE_CHECKING:
    from disttrain.plan.dry import Counts
    from disttrain.plan.rehearsal import Rehearsal

Line = tuple[str, float, float]
"""What, by the formula, counted."""


def memory_lines(plan: Plan, stage: int, counts: Counts) -> list[Line]:
    """Bytes of pipeline rank `stage`. Whole weights that sharding gathers are the formula's weights and what stands beside them.

    A dry run has one memory, so what waits in the host's is counted as if it stayed on the device, on both sides.
    """
    layout, peak = replace(plan.case.layout, offload=False, offload_activations=False), counts.peak
    memory = plan.memories[stage] if layout == plan.case.layout else of_stage(replace(plan.case, layout=layout), stage)
    held = tensors.of_rank(plan.case, stage).all
    ranks = layout.dp_shard if layout.zero else 1
    own = sum(one.size if layout.ep > 1 and one.is_expert else one.rows_of(ranks) for one in held)
    resting = own * plan.case.numbers.weight
    return [
        ("parameters", float(own), float(counts.parameters)),
        ("weights at rest", resting, float(peak.get("weights", 0))),
        ("optimizer state", memory.optimizer, float(peak.get("optimizer", 0))),
        (
            "all else at the peak",
            memory.total - resting - memory.optimizer,
            float(sum(peak.values()) - peak["weights"] - peak["optimizer"]),
        ),
        ("peak", memory.total, float(sum(peak.values()))),
    ]


def traffic_lines(plan: Plan, stage: int, counts: Counts) -> list[tuple[str, str, Line, Line]]:
    """(axis, collective, calls, bytes of the whole tensors) of pipeline rank `stage`; what one side alone knows has zeros on the other."""
    said = plan.traffic[stage]
    found = []
    for axis in dict.fromkeys([*said, *counts.traffic]):
        for kind in dict.fromkeys([*said.get(axis, {}), *counts.traffic.get(axis, {})]):
            calls, moved = said.get(axis, {}).get(kind, (0.0, 0.0))
            seen, counted = counts.traffic.get(axis, {}).get(kind, [0.0, 0.0])
            found.append((axis, kind, ("calls", calls, seen), ("bytes", moved, counted)))
    return found


def page(plan: Plan, rehearsal: Rehearsal) -> list[str]:
    """Tables of every kind of rank that was run."""
    lines = []
    for stage, counts in rehearsal.counts.items():
        if len(rehearsal.counts) > 1:
            lines += [f"pp {stage} (rank {counts.rank})"]
        rows = [_row(name, by_formula, counted) for name, by_formula, counted in memory_lines(plan, stage, counts)]
        for axis, kind, calls, moved in traffic_lines(plan, stage, counts):
            rows.append(_sides(f"{axis} {kind}", calls, moved))
        lines += [*columns(rows, ("", "formula", "counted", "")), ""]
    took = f"{show_seconds(rehearsal.seconds)} ({show_seconds(rehearsal.processor_seconds)} of processors), "
    took += f"{rehearsal.host_bytes / GIB:.2g} GiB a process"
    run = " and ".join(map(str, rehearsal.micro_batches))
    of = f"{plan.case.micro_batches} micro-batches" + (f", from steps of {run}" if len(rehearsal.micro_batches) > 1 else "")
    alike = "other pipeline ranks are like one of these, with fewer micro-batches in flight"
    alike = "every kind of rank" if len(rehearsal.counts) == plan.case.layout.pp else alike
    said = [("took", f"{took}; {of}; {alike}"), ("bytes", "of traffic are those of the whole tensors")]
    if plan.case.layout.offload or plan.case.layout.offload_activations:
        said.append(
            (
                "host",
                "a dry run has one memory: all is counted, and reckoned beside it, as if what waits in the host's stayed on the device",
            )
        )
    return [*lines, *facts(said)]


def _sides(name: str, calls: Line, moved: Line) -> list[str]:
    """Calls and bytes of one collective, by the formula and counted."""
    sides = [f"{count:.4g} x, {show_bytes(size)}" for count, size in zip(calls[1:], moved[1:], strict=True)]
    return [name, *sides, _row(name, moved[1], moved[2])[3] if calls[1] == calls[2] else "calls differ"]


def _row(name: str, by_formula: float, counted: float) -> list[str]:
    show = show_count if name == "parameters" else show_bytes
    off = abs(counted - by_formula)
    same = "equal" if off < 0.5 else f"{100 * (counted - by_formula) / by_formula:+.2g}%" if by_formula else "new"
    return [name, show(by_formula), show(counted), same]
