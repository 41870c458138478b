"""What ranks kept for themselves, made ready to draw: one step on one clock, and step times by rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disttrain.config.schedules import bubble
from disttrain.report.read import Run

MOST_ROWS = 32
"""Ranks that are drawn; of more, those that differ along the pipeline only."""
AXES = {"pp": "pp", "dp_replicate": "dp", "dp_outer": "shard", "ep": "ep", "cp": "cp", "tp": "tp"}
"""Axes of the mesh, outermost first, and what they are called here."""
WORK = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
KINDS = WORK | {"reduce": "reductions, and waiting for them", "update": "update"}
"""Kinds of span, in the order of the legend."""


@dataclass(frozen=True)
class Bar:
    """One span on the common clock, in seconds after the step's first."""

    rank: int
    kind: str
    stage: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step as it ran."""

    step: int
    names: dict[int, str]
    """Ranks that are drawn, with their place."""
    bars: list[Bar]
    waited: float
    """Share of the time between the first action and the last in which ranks did no action."""
    predicted: float | None
    """The same by the schedule's formula."""
    busy: dict[int, float]
    """Seconds of actions by rank."""
    schedule: str
    seconds: float
    """From the first action to the last."""

    @property
    def is_pipeline(self) -> bool:
        """Whether layers lie on several ranks."""
        return any(bar.stage > 0 for bar in self.bars)


def timeline(run: Run) -> Timeline | None:
    """The recorded step of a run; None where its ranks have recorded none, or not the same one."""
    recorded = {one["rank"]: one for one in run.ranks if "timeline" in one}
    if not recorded or len({one["timeline"]["step"] for one in recorded.values()}) != 1:
        return None
    drawn = recorded
    if len(drawn) > MOST_ROWS:
        drawn = {rank: one for rank, one in recorded.items() if not any(index for axis, index in one["at"].items() if axis != "pp")}
    epoch = min(one["timeline"]["origin"] for one in drawn.values())  # seconds since 1970 leave few digits for microseconds
    late = {rank: one["timeline"]["origin"] - epoch for rank, one in drawn.items()}
    begin = min(late[rank] + span[3] for rank, one in drawn.items() for span in one["timeline"]["spans"])
    bars = [
        Bar(rank, kind, stage, micro, start + late[rank] - begin, end + late[rank] - begin)
        for rank, one in sorted(drawn.items())
        for kind, stage, micro, start, end in one["timeline"]["spans"]
    ]
    work = [bar for bar in bars if bar.kind in WORK]
    if not work:
        return None
    seconds = max(bar.end for bar in work) - min(bar.start for bar in work)
    busy = {rank: sum(bar.end - bar.start for bar in work if bar.rank == rank) for rank in drawn}
    waited = 1 - sum(busy.values()) / (len(drawn) * seconds) if seconds else 0.0
    names = {rank: _place(one) for rank, one in sorted(drawn.items())}
    schedule = str(run.config.get("strategy.schedule", ""))
    step = next(iter(drawn.values()))["timeline"]["step"]
    return Timeline(step, names, bars, waited, _formula(run, work, schedule), busy, schedule, seconds)


def _place(one: Mapping[str, Any]) -> str:
    """'pp 0, dp 1, tp 0'."""
    at = one.get("at") or {}
    return ", ".join(f"{short} {at[axis]}" for axis, short in AXES.items() if axis in at)


def _formula(run: Run, work: Sequence[Bar], schedule: str) -> float | None:
    """The bubble of the schedule with as many micro-batches and stages as were seen, forward as long as either half of backward."""
    size = int(run.config.get("strategy.pp") or 0)
    stages = 1 + max(bar.stage for bar in work)
    if size < 2 or stages % size:
        return None
    return bubble(schedule, 1 + max(bar.micro for bar in work), size, stages // size)


@dataclass(frozen=True)
class Histogram:
    """Step times of one rank."""

    rank: int
    ratio: float
    counts: dict[int, int]
    """Steps of about ratio ** n seconds, by n."""
    first: float | None
    """Seconds of the first step, which is in no bin."""

    @property
    def num_steps(self) -> int:
        """Steps in all bins."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the steps stay below."""
        wanted, seen = share * self.num_steps, 0
        for bin_, number in sorted(self.counts.items()):
            seen += number
            if seen >= wanted:
                return float(self.ratio**bin_)
        return math.nan

    def edges(self, bin_: int) -> tuple[float, float]:
        """Seconds at which a bin begins and ends."""
        return float(self.ratio ** (bin_ - 0.5)), float(self.ratio ** (bin_ + 0.5))


def histograms(run: Run) -> list[Histogram]:
    """Step times by rank, where they were recorded."""
    found = []
    for one in run.ranks:
        times = one.get("step_seconds") or {}
        counts = {int(bin_): int(number) for bin_, number in (times.get("counts") or {}).items()}
        if counts:
            found.append(Histogram(int(one["rank"]), float(times["ratio"]), counts, times.get("first")))
    return found
