"""Where a step's time goes, from what `callbacks.breakdown` saw of all ranks: parts that add up to the step. Plain numbers, no torch.

What a rank waits before the last one has come to a collective is lateness; what it waits then is exposed communication. If one
rank is to blame for most of the lateness, that is imbalance, and the parts are those of the ranks that wait for it; if now this
rank is late and now that one, it is the price of meeting at all, and counts as communication of the axis on which they meet.

In a pipeline ranks wait for messages. How long they must, given the order of their actions, a clock says (parallel/clock.py):
with every stage as fast as the mean, that is the bubble; with stages as they are, the rest of it is imbalance between stages;
what ranks waited beyond that is exposed communication.

Operations cost the host time even where they compute nothing: so many times what the smallest one takes. On a GPU it is the time
in which no kernel ran. On a CPU, time in which a rank neither waited for others nor had a processor was taken by somebody else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from disttrain.parallel.clock import Action, step_time

CLASSES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ends": "pipeline", "ep": "expert"}
"""Which communication an axis' is; that of all others is the data axis'."""
OVER_STAGES = ("world", "ends", "pp")
"""Axes on which a pipeline's stages meet: what is waited there is the pipeline's draining."""
BLAMED = 0.65
"""Share of all lateness that one rank must cause to be called late by itself."""
NEARLY_ALL = 0.75
"""Share of the steps in which the same rank comes last from which on that is no accident."""
BUSY = 0.1
"""Share of a step without a processor from which on a whole machine is busy, and not one rank slow."""
MOST_HOST = 0.9
"""Share of the time of forward and backward that is ever put down to asking for operations."""
FB = "forward_backward"
OWN = ("input", "callbacks", "host", "taken", "compute", "optimizer")
"""Parts of what a rank does by itself."""


@dataclass
class Budget:
    """Seconds of a step by part; `parts` add up to `step`, up to what is measured twice."""

    step: float
    parts: dict[str, float] = field(default_factory=dict)
    """`OWN`; exposed communication of each class (`data`, `tensor`, ...); `bubble`; imbalance of `stages`, of `ranks`."""
    callbacks: dict[str, float] = field(default_factory=dict)
    """Seconds in each callback, of the rank that spends most."""
    late_rank: int | None = None
    """The rank that the others wait for."""
    excess: dict[str, float] = field(default_factory=dict)
    """By part, how much more time the late rank spends than the others; `callbacks.<key>` by each."""
    stage_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of a step that each pipeline stage works."""
    hidden: dict[str, float] = field(default_factory=dict)
    """By class of axis, seconds of communication that ran beside other work."""
    dispatch: float = 0.0
    """Of `host`: asking for operations."""

    def share(self, part: str) -> float:
        """Of the step."""
        return self.parts.get(part, 0.0) / self.step if self.step else 0.0


class Rank:
    """One rank's seconds of a step."""

    def __init__(self, one: Mapping[str, Any], rates: Mapping[str, float], is_pipeline: bool, device: str) -> None:
        """`one`: its part of the window; `rates`: what its device, of the kind `device`, can do, if that was measured."""
        self.rank: int = one["rank"]
        self.one = one
        self.columns = {name: fmean(values) for name, values in one["columns"].items() if values}
        self.exposed, self.late = self._waits("exposed"), self._waits("late")
        self.callbacks: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.columns.items():
            if name.startswith("callbacks/"):
                self.callbacks[name.split("/")[1]] += seconds
        self.step = self.columns.get("step", 0.0)
        steps = max(1, len(one["columns"].get("step", ())))
        self.acted = sum(end - begin for *_, begin, end in one["actions"]) / steps
        own = {phase: self._own(phase) for phase in ("forward_backward", "finish", "update", "between")}
        met_outside = self._inside("exposed") + self._inside("late")
        self.gaps = max(0.0, own["forward_backward"] + met_outside - self.acted) if is_pipeline else 0.0
        own["forward_backward"] -= self.gaps
        taken = {phase: self._taken(phase, own[phase]) if device == "cpu" else 0.0 for phase in ("forward_backward", "finish", "update")}
        work = own["forward_backward"] - taken["forward_backward"]
        self.dispatch = self._dispatch(work, rates)
        wait = self.columns.get("input", 0.0)
        self.parts = {
            "input": wait,
            "callbacks": sum(self.callbacks.values()),
            "host": max(0.0, own["between"] - wait) + self.dispatch,
            "taken": sum(taken.values()),
            "compute": work - self.dispatch,
            "optimizer": own["finish"] + own["update"] - taken["finish"] - taken["update"],
        }
        talk = {axis: list(kinds.values()) for axis, kinds in one["talk"].items()}
        self.hidden = _by_class({axis: sum(max(0.0, k["seconds"] - k["exposed"]) for k in kinds) for axis, kinds in talk.items()})

    def blames(self, is_pipeline: bool) -> dict[int, float]:
        """Seconds that this rank waited for each other one."""
        found: defaultdict[int, float] = defaultdict(float)
        for axis, by_rank in self.one["late_for"].items():
            for rank, seconds in by_rank.items() if not (is_pipeline and axis in OVER_STAGES) else ():
                found[int(rank)] += fmean(seconds)
        return found

    def _waits(self, kind: str) -> dict[str, float]:
        """Seconds waited by axis."""
        found: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.columns.items():
            first, _, rest = name.partition("/")
            if first == kind:
                found[rest.split("/")[0]] += seconds
        return found

    def _own(self, phase: str) -> float:
        """A phase without what is waited and what callbacks do in it."""
        others = [
            seconds for name, seconds in self.columns.items() if name.endswith(f"/{phase}") and not name.startswith(("inside/", "cpu/"))
        ]
        return max(0.0, self.columns.get(phase, 0.0) - sum(others))

    def _inside(self, kind: str) -> float:
        """What was waited within actions of a pipeline."""
        return sum(seconds for name, seconds in self.columns.items() if name.startswith(f"inside/{kind}/"))

    def _taken(self, phase: str, own: float) -> float:
        """Of `own` seconds, those without a processor. What waits and callbacks use of one is counted with them, which is little."""
        return max(0.0, own - self.columns.get(f"cpu/{phase}", own))

    def _dispatch(self, work: float, rates: Mapping[str, float]) -> float:
        if "computed" in rates:
            return max(0.0, work - rates["computed"])
        return min(MOST_HOST * work, rates.get("operations", 0.0) * rates.get("operation", 0.0))


def budget(found: Mapping[str, Any]) -> Budget:
    """The step's parts, of what a window has found, in the quietest of its steps."""
    found = {**found, "ranks": _of_steps(found["ranks"], quiet_steps(found))}
    is_pipeline = found["degrees"].get("pp", 1) > 1
    rates: Sequence[Mapping[str, float]] = found.get("rates") or [{}] * len(found["ranks"])
    ranks = [Rank(one, rate, is_pipeline, found["device"]) for one, rate in zip(found["ranks"], rates, strict=True)]
    whole = Budget(fmean(rank.step for rank in ranks))
    blame: defaultdict[int, float] = defaultdict(float)
    for rank in ranks:
        for other, seconds in rank.blames(is_pipeline).items():
            blame[other] += seconds
    seen, late = ranks, 0.0
    if blame and len(ranks) > 1:
        worst = max(blame, key=lambda rank: blame[rank])
        others = [rank for rank in ranks if rank.rank != worst]
        excess = _excess(next(rank for rank in ranks if rank.rank == worst), others)
        busy_machine = fmean(rank.parts["taken"] for rank in others) > BUSY * whole.step and max(OWN, key=excess.__getitem__) == "taken"
        if blame[worst] >= BLAMED * sum(blame.values()) and not busy_machine:
            whole.late_rank, whole.excess, late = worst, excess, blame[worst] / len(others)
            seen = ranks if is_pipeline else others
    whole.parts = {name: fmean(rank.parts[name] for rank in seen) for name in OWN}
    whole.dispatch = fmean(rank.dispatch for rank in seen)
    for rank in seen:
        for name, seconds in _by_class(_met(rank, whole.late_rank, is_pipeline)).items():
            whole.parts[name] = whole.parts.get(name, 0.0) + seconds / len(seen)
        for name, seconds in rank.hidden.items():
            whole.hidden[name] = whole.hidden.get(name, 0.0) + seconds / len(seen)
        for key, seconds in rank.callbacks.items():
            whole.callbacks[key] = max(seconds, whole.callbacks.get(key, 0.0))
    whole.parts["ranks"] = late
    if is_pipeline:
        _add_pipeline(whole, ranks)
    return whole


def quiet_steps(found: Mapping[str, Any]) -> list[int]:
    """A third of the steps, those in which ranks had to wait the least, for each other and for a processor; all of them on a GPU.

    What else a machine does falls on some steps and not on others; what the run itself lacks, on all. So do waits for a
    rank that is late in nearly all of them, which don't count here.
    """
    columns = [one["columns"] for one in found["ranks"]]
    steps = range(len(columns[0]["step"]))
    if found["device"] != "cpu":
        return list(steps)
    usual = _usual_wait(found)

    def waited(step: int) -> float:
        total = -usual[step]
        for one in columns:
            own = [name for name in one if name.startswith("callbacks/") and name.endswith(f"/{FB}")]
            total += one[FB][step] - one.get(f"cpu/{FB}", one[FB])[step] - sum(one[name][step] for name in own)
            total += sum(one[name][step] for name in one if name.startswith(("exposed/", "late/")) and not name.endswith(f"/{FB}"))
        return total

    return sorted(sorted(steps, key=waited)[: -(-len(steps) // 3)])


def _usual_wait(found: Mapping[str, Any]) -> list[float]:
    """By step, what all ranks waited for the one that most of them waited for in nearly every step; zeros if there is none."""
    num_steps = len(found["ranks"][0]["columns"]["step"])
    waits: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * num_steps)
    is_pipeline = found["degrees"].get("pp", 1) > 1
    for one in found["ranks"]:
        for axis, by_rank in one["late_for"].items():
            for rank, seconds in by_rank.items() if not (is_pipeline and axis in OVER_STAGES) else ():
                waits[int(rank)] = [a + b for a, b in zip(waits[int(rank)], seconds, strict=True)]
    latest = [max(waits, key=lambda rank, step=step: waits[rank][step]) for step in range(num_steps)] if waits else []  # type: ignore[misc]
    usual = max(set(latest), key=latest.count, default=-1)
    return waits[usual] if latest.count(usual) >= NEARLY_ALL * num_steps else [0.0] * num_steps


def _of_steps(ranks: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """What a window has found, of these steps alone."""
    return [
        {
            **one,
            "columns": {name: [values[step] for step in steps] for name, values in one["columns"].items()},
            "late_for": {
                axis: {rank: [values[step] for step in steps] for rank, values in by_rank.items()}
                for axis, by_rank in one["late_for"].items()
            },
            "actions": [[steps.index(action[0]), *action[1:]] for action in one["actions"] if action[0] in steps],
        }
        for one in ranks
    ]


def _met(rank: Rank, late_rank: int | None, is_pipeline: bool) -> dict[str, float]:
    """Seconds by axis that a rank waited: for bytes, and for others than the one that is always late."""
    found = dict(rank.exposed)
    for axis, by_rank in rank.one["late_for"].items():
        if not (is_pipeline and axis in OVER_STAGES):
            found[axis] = found.get(axis, 0.0) + sum(fmean(seconds) for other, seconds in by_rank.items() if int(other) != late_rank)
    return found


def _by_class(by_axis: Mapping[str, float]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for axis, seconds in by_axis.items():
        found[CLASSES.get(axis, "data")] += seconds
    return dict(found)


def _excess(late: Rank, others: Sequence[Rank]) -> dict[str, float]:
    """What the late rank does longer than the others, by part, and by callback."""
    found = {name: late.parts[name] - fmean(rank.parts[name] for rank in others) for name in OWN}
    for key, seconds in late.callbacks.items():
        found[f"callbacks.{key}"] = seconds - fmean(rank.callbacks.get(key, 0.0) for rank in others)
    return found


def _add_pipeline(whole: Budget, ranks: Sequence[Rank]) -> None:
    """Put what ranks waited in the pipeline down to bubble, imbalance and messages."""
    waited = fmean(rank.gaps + sum(seconds for axis, seconds in rank.late.items() if axis in OVER_STAGES) for rank in ranks)
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in ranks:
        for _, kind, stage, _, begin, end in rank.one["actions"]:
            taken[kind, stage].append(end - begin)
    seconds = {key: fmean(values) for key, values in taken.items()}
    kinds = {kind: fmean(value for (other, _), value in seconds.items() if other == kind) for kind, _ in seconds}
    line = {rank.one["at"]["pp"]: rank for rank in reversed(ranks)}  # the pipeline of the first ranks
    orders = [_order(line[index]) for index in sorted(line)]
    counts: defaultdict[int, float] = defaultdict(float)
    for order in orders:
        for kind, stage, _ in order:
            counts[stage] += seconds[kind, stage]
    whole.stage_seconds = dict(sorted(counts.items()))
    worked = sum(kinds[kind] for order in orders for kind, _, _ in order) / len(orders)
    equal = step_time(orders, lambda action: kinds[action[0]])
    actual = step_time(orders, lambda action: seconds[action[0], action[1]])
    bubble, stages = equal - worked, max(0.0, actual - equal)
    scale = min(1.0, waited / (bubble + stages)) if bubble + stages > 0 else 0.0
    whole.parts |= {"bubble": bubble * scale, "stages": stages * scale}
    whole.parts["pipeline"] = whole.parts.get("pipeline", 0.0) + waited - (bubble + stages) * scale


def _order(rank: Rank) -> list[Action]:
    """What a rank did in the window's first step."""
    return [(kind, stage, micro) for step, kind, stage, micro, _, _ in rank.one["actions"] if step == 0]
