"""The verdict: which part of a step holds a run back, with its share, the evidence and what should help. Plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from disttrain.doctor.budget import CLASSES, Budget

COMPUTE, INPUT, HOST, OPTIMIZER = "compute-bound", "input", "host overhead", "optimizer"
BUBBLE, STAGES, RANKS, MEMORY = "bubble", "imbalance between stages", "imbalance between ranks", "memory pressure"
EXPOSED = {name: f"exposed {name}-axis communication" for name in ("data", "tensor", "context", "pipeline", "expert")}
PART_OF = {COMPUTE: ("compute",), INPUT: ("input",), HOST: ("host", "callbacks", "taken"), OPTIMIZER: ("optimizer",), BUBBLE: ("bubble",)}
PART_OF |= {STAGES: ("stages",), RANKS: ("ranks",)} | {words: (name,) for name, words in EXPOSED.items()}
"""The parts of a budget that each bottleneck is."""

NOTABLE = 0.15
"""Share of a step from which on something other than compute is what holds a run back."""
WAITS_COUNT = 0.5
"""What exposed communication counts beside other findings on a crowded machine, where ranks also wait for peers without a core."""
MOST_TAKEN = 0.3
"""Share of a step from which on it is a finding that others hold the cores."""
CROWDED = 2.0
"""Processes that want a core, for each there is, from which on a measurement is doubtful."""
FULL = 0.93
"""Share of a GPU's memory from which on its allocator looks for room."""
THRASHING = 20.0
"""Pages read back from disk in a step from which on memory is what is missing."""


@dataclass(frozen=True)
class Verdict:
    """What holds a run back."""

    bottleneck: str
    share: float
    """Of the step; 0 where it is no time by itself."""
    evidence: list[str]
    rank: int | None = None
    """The rank that is late, if one is."""
    beside: list[tuple[str, float]] = field(default_factory=list)
    """Everything else that is notable, largest first."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"beside": dict(self.beside)}


def diagnose(found: Mapping[str, Any], whole: Budget) -> Verdict:
    """The bottleneck of a window."""
    shares = {name: sum(map(whole.share, parts)) for name, parts in PART_OF.items()}
    free = {**shares, HOST: shares[HOST] - whole.share("taken")}  # what others take is judged last: it lengthens all else
    weight = WAITS_COUNT if _crowded(found) else 1.0
    ranked = {name: share * (weight if name in EXPOSED.values() else 1.0) for name, share in free.items()}
    order = sorted((name for name in free if name != COMPUTE), key=lambda name: -ranked[name])
    notable = [(name, free[name]) for name in order if free[name] >= NOTABLE * (1 - whole.share("taken"))]
    if not notable and whole.share("taken") > MOST_TAKEN:
        notable = [(HOST, shares[HOST])]
    if short := _memory(found):
        return Verdict(MEMORY, 0.0, short, beside=notable)
    name = notable[0][0] if notable else COMPUTE
    evidence = [*_EVIDENCE.get(name, _talk)(found, whole, name), *_crowded(found)]
    return Verdict(name, shares[name], evidence, whole.late_rank if name == RANKS else None, notable[1:])


def _crowded(found: Mapping[str, Any]) -> list[str]:
    """A word of warning where the machine has more to do than this run."""
    if found["device"] != "cpu" or "cores" not in found["ranks"][0]["memory"]:
        return []
    memory = found["ranks"][0]["memory"]
    if memory["load"] <= CROWDED * memory["cores"]:
        return []
    words = f"{memory['load']:.0f} processes want the {memory['cores']:.0f} cores"
    return [f"{words}: everything here takes longer than it would alone, and waits do most"]


def mfu(found: Mapping[str, Any], whole: Budget) -> float | None:
    """Model flops over what matrix products reach on all ranks; None where either is not known."""
    reach = sum(rate.get("product", 0.0) for rate in found.get("rates") or ())
    flops = found.get("flops", 0.0)
    return flops / whole.step / reach if flops and reach and whole.step else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _input(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    by_rank = [fmean(one["columns"].get("input", [0.0])) for one in found["ranks"]]
    said = f"a step waits {_ms(fmean(by_rank))} for its batch (by rank {_ms(min(by_rank))} to {_ms(max(by_rank))})"
    if workers := fmean(one["used"].get("worker_seconds", 0.0) for one in found["ranks"]) / whole.step:
        return [said, f"its loader's workers use {workers:.0%} of a core in that time"]
    busy = fmean(one["used"]["cpu_seconds"] for one in found["ranks"]) / whole.step
    waits = f"its process computes in {busy:.0%} of the time, so the data set waits for something"
    return [said, waits if busy < 0.8 else f"its process keeps {busy:.0%} of a core busy, so the data set computes"]


def _host(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    said = [f"callbacks.{key} takes {_ms(seconds)} a step" for key, seconds in _largest(whole.callbacks) if seconds > 0.02 * whole.step]
    if whole.dispatch > 0.05 * whole.step:
        rates = found["rates"][0]
        what = (
            f"a step asks for {rates['operations']:,.0f} operations, the smallest of which takes {rates['operation'] * 1e6:.2g} us"
            if "computed" not in rates
            else "no kernel runs"
        )
        said.append(f"{what}: {_ms(whole.dispatch)} a step")
    if whole.share("taken") >= NOTABLE:
        lost = fmean(one["used"]["preempted"] for one in found["ranks"])
        why = f"a rank lost its processor {lost:.0f} times a step to other processes or threads"
        said.append(f"{_ms(whole.parts['taken'])} of its own work a rank had no processor: {why}")
    other = whole.parts["host"] - whole.dispatch
    if other > 0.05 * whole.step:
        said.append(f"{_ms(other)} between steps, outside of callbacks")
    return said + reads(found)


def reads(found: Mapping[str, Any]) -> list[str]:
    """Lines that read tensors on the host in every step."""
    lines: dict[str, tuple[float, float]] = {}
    for one in found["ranks"]:
        for line, count, seconds in one["reads"]:
            if count >= 0.5 and count > lines.get(line, (0.0, 0.0))[0]:
                lines[line] = count, seconds
    waits = "each waits for the device" if found["device"] == "cuda" else "on a GPU each would wait for the device"
    return [
        f"{line} reads a tensor on the host {count:.3g} times a step (.item(), bool(x), ...), {_ms(seconds)}: {waits}"
        for line, (count, seconds) in sorted(lines.items(), key=lambda item: -item[1][0])[:3]
    ]


def _compute(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    reached = mfu(found, whole)
    said = []
    if reached is not None:
        rate = fmean(rate["product"] for rate in found["rates"])
        said.append(f"MFU {reached:.0%} of what matrix products reach on these ranks, {rate / 1e9:,.3g} GFLOP/s each")
    said.append(f"forward and backward compute in {whole.share('compute'):.0%} of the step")
    return said


def _optimizer(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    part = [fmean(one["columns"].get("update", [0.0])) for one in found["ranks"]]
    return [f"the update takes {_ms(fmean(part))} a step, norm and clipping {_ms(whole.parts['optimizer'] - fmean(part))}"]


def _bubble(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    size = found["degrees"]["pp"]
    passing = f"{found['num_micro']} micro-batches pass through {size} ranks"
    return [f"{passing}; filling and draining the pipeline takes {_ms(whole.parts['bubble'])}"]


def _stages(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    slowest = max(whole.stage_seconds, key=lambda stage: whole.stage_seconds[stage])
    each = ", ".join(f"{stage}: {_ms(seconds)}" for stage, seconds in whole.stage_seconds.items())
    return [f"stage {slowest} is the slowest; a step's work by stage: {each}"]


def _ranks(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    late = whole.late_rank
    one = next(one for one in found["ranks"] if one["rank"] == late)
    axes = sorted({axis for other in found["ranks"] for axis, by_rank in other["late_for"].items() if any(by_rank.get(str(late), ()))})
    last = f"rank {late} (on {one['host']}) comes last to collectives over {', '.join(axes)}"
    said = [f"{last}: the others wait {_ms(whole.parts['ranks'])} a step"]
    more = [f"{key} {_ms(seconds)}" for key, seconds in _largest(whole.excess) if seconds > 0.02 * whole.step][:3]
    said += [f"it takes longer in {', '.join(more)} than the others do"] if more else []
    return [*said, *balance(found)]


def balance(found: Mapping[str, Any]) -> list[str]:
    """Valid targets and padding by rank, where ranks differ."""
    targets = {one["rank"]: one["samples"]["targets"] for one in found["ranks"]}
    padding = {one["rank"]: 1 - one["samples"]["targets"] / max(1.0, one["samples"]["positions"]) for one in found["ranks"]}
    low, high = min(targets, key=lambda rank: targets[rank]), max(targets, key=lambda rank: targets[rank])
    if targets[high] <= 1.02 * targets[low]:
        return [f"every rank has about {targets[high]:,.0f} valid targets a step, padding {max(padding.values()):.0%}"]
    most = f"rank {high} has {targets[high]:,.0f} valid targets a step (padding {padding[high]:.0%})"
    return [f"{most}, rank {low} {targets[low]:,.0f} ({padding[low]:.0%})"]


def _talk(found: Mapping[str, Any], whole: Budget, name: str) -> list[str]:
    """Exposed communication of a class of axes: calls, bytes, bandwidth, what is hidden."""
    wanted = next(key for key, words in EXPOSED.items() if words == name)
    said = []
    for axis, kinds in found["ranks"][-1]["talk"].items():
        for kind, entry in kinds.items() if CLASSES.get(axis, "data") == wanted else ():
            rate = entry["bytes"] / entry["seconds"] if entry["seconds"] else 0.0
            hidden = 1 - min(1.0, entry["exposed"] / entry["seconds"]) if entry["seconds"] else 0.0
            size = entry["bytes"] / max(entry["calls"], 1e-9)
            calls = f"{entry['calls']:.3g} calls a step, each sends {size / 1024:,.3g} KiB"
            said.append(f"{kind} over {axis}: {calls}, {rate / 1e6:,.3g} MB/s, {hidden:.0%} hidden")
    return [f"a rank waits {_ms(whole.parts.get(wanted, 0.0))} a step for it", *said]


def _memory(found: Mapping[str, Any]) -> list[str]:
    said = []
    for one in found["ranks"]:
        memory = one["memory"]
        if memory.get("retries", 0.0) > 0:
            said.append(f"rank {one['rank']}: the allocator had to free and ask again {memory['retries']:.0f} times")
        if found["device"] == "cuda" and memory["peak"] > FULL * memory["has"]:
            said.append(f"rank {one['rank']}: tensors took {memory['peak'] / memory['has']:.0%} of the device")
        if one["used"]["page_faults"] > THRASHING:
            said.append(f"rank {one['rank']}: {one['used']['page_faults']:.0f} pages a step are read back from disk")
    return said


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


_EVIDENCE: Mapping[str, Callable[[Mapping[str, Any], Budget, str], list[str]]] = {
    INPUT: _input,
    HOST: _host,
    COMPUTE: _compute,
    OPTIMIZER: _optimizer,
    BUBBLE: _bubble,
    STAGES: _stages,
    RANKS: _ranks,
}
