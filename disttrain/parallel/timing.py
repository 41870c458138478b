"""Every collective and every pipeline action of a few steps, timed on one clock for all ranks.

Of a collective are noted: when this rank came to it, from when it waited, when it went on. Ranks of the axis then tell each
other when they came: what a rank waited before the last one was there is that rank's lateness, what it waited after it is
exposed communication. The duration of a collective by itself says nothing of the kind, being the same on all ranks.

On a GPU times are those of the stream (CUDA events), set on the host's clock by one synchronisation at the beginning.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from disttrain.parallel.clock import Action
from disttrain.parallel.collectives import all_gather, gather_json, gather_tensors
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.parallel.watch import Call, Watcher

ROUNDS = 8
"""Exchanges by which the clocks of several hosts are compared."""
UNMATCHED = ("send", "receive")
"""Between two ranks, so nobody else comes late to them."""


class Clock(Protocol):
    """Marks moments, which are read once the work is over."""

    def now(self) -> Any:
        """A mark at this moment; on a GPU, at what the current stream has then reached."""

    def seconds(self, mark: Any) -> float:
        """When that was; on a GPU to be asked after a synchronisation."""


class HostClock:
    """The processor's: one for all processes of a machine."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class DeviceClock:
    """A GPU's, set on the host's."""

    def __init__(self, device: torch.device) -> None:
        """Waits for the device once."""
        torch.cuda.synchronize(device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        torch.cuda.synchronize(device)
        self._started = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When the stream had reached it."""
        return self._started + float(self._start.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock by which work on `device` is timed."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class Timed:
    """One collective on this rank. Marks while it is recorded, seconds on the common clock once `Recorder.settled`."""

    axis: str
    collective: str
    num_bytes: int
    phase: str
    step: int
    inside: bool
    """Within an action of a pipeline."""
    came: Any
    waited_from: Any = None
    went_on: Any = None
    over: float | None = None
    """When the last byte was there, on the host's clock; None where that is not known."""
    last_came: float = 0.0
    last_rank: int = -1
    """The rank, in the world, that all others waited for, and when it came."""

    @property
    def late(self) -> float:
        """Seconds waited for the last rank to come."""
        return float(max(0.0, min(self.went_on, self.last_came) - self.waited_from))

    @property
    def exposed(self) -> float:
        """Seconds waited for bytes, after all had come."""
        return float(max(0.0, self.went_on - max(self.waited_from, self.last_came)))

    @property
    def seconds(self) -> float:
        """From when all had come until it was over."""
        end = self.went_on if self.over is None else min(self.over, self.went_on)
        return float(max(0.0, end - max(self.came, self.last_came)))


@dataclass
class Actions(Watcher):
    """Notes a pipeline's actions. `step` is set by who knows it."""

    clock: Clock
    step: int = 0
    actions: list[tuple[int, Action, Any, Any]] = field(default_factory=list)
    """(step, action, begin, end)."""
    _began: Any = None

    def acts(self, action: Action) -> None:
        """A pipeline's action begins."""
        self._began = self.clock.now()

    def acted(self, action: Action) -> None:
        """It is over."""
        if self._began is not None:
            self.actions.append((self.step, action, self._began, self.clock.now()))
            self._began = None

    def in_seconds(self, shift: float) -> list[tuple[int, Action, float, float]]:
        """`actions` with their times, `shift` later than the clock has them; on a GPU to be asked after a synchronisation."""
        seconds = self.clock.seconds
        return [(step, one, seconds(begin) + shift, seconds(end) + shift) for step, one, begin, end in self.actions]


@dataclass
class Recorder(Actions):
    """Notes collectives too. `phase` is set as `step` is."""

    phase: str = ""
    calls: list[Timed] = field(default_factory=list)

    def begins(self, call: Call) -> None:
        """This rank has come."""
        is_inside = self._began is not None
        timed = Timed(call.axis.name, call.collective, call.num_bytes, self.phase, self.step, is_inside, self.clock.now())
        call.notes[id(self)] = timed
        self.calls.append(timed)

    def ends(self, call: Call) -> None:
        """It is over, or under way."""
        timed = self._timed(call)
        if timed is None:
            return
        if not call.overlaps:
            timed.waited_from, timed.went_on = timed.came, self.clock.now()
        elif isinstance(self.clock, HostClock) and call.work is not None:
            _when_over(call.work, timed)

    def waits(self, call: Call) -> None:
        """The rest of it is not hidden."""
        if (timed := self._timed(call)) is not None:
            timed.waited_from, timed.phase = self.clock.now(), self.phase

    def done(self, call: Call) -> None:
        """This rank goes on."""
        if (timed := self._timed(call)) is not None:
            timed.went_on = self.clock.now()

    def _timed(self, call: Call) -> Timed | None:
        found: Timed | None = call.notes.get(id(self))
        return found

    def settled(self, mesh: Mesh, device: torch.device) -> list[Timed]:
        """The calls that are over, in seconds of rank 0's clock, with who came last. Every rank must call."""
        shift = offset(mesh.axis("world"), device)
        found = [call for call in self.calls if call.went_on is not None]
        for call in found:
            for name in ("came", "waited_from", "went_on"):
                setattr(call, name, self.clock.seconds(getattr(call, name)) + shift)
            call.over = None if call.over is None else call.over + shift
            call.last_came = call.came
        self.actions = list(self.in_seconds(shift))
        for axis in mesh.axes():
            met = [call for call in found if call.axis == axis.name and call.collective not in UNMATCHED]
            if axis.group is not None:
                _compare(met, axis, device)
        return found


def _when_over(work: Any, timed: Timed) -> None:
    """Note when `work` is over, from the thread that ends it. Where torch can't say, nothing is known."""

    def note(_: Any) -> None:
        timed.over = time.perf_counter()

    try:
        work.get_future().add_done_callback(note)
    except RuntimeError:
        return


def _compare(calls: Sequence[Timed], axis: Axis, device: torch.device) -> None:
    """Who came last to each of `calls`, which all ranks of `axis` have made in this order."""
    came = torch.tensor([call.came for call in calls], dtype=torch.float64, device=device)
    by_rank = gather_tensors(came, axis)
    length = min(len(one) for one in by_rank)
    if not length:
        return
    latest, where = torch.stack([one[:length] for one in by_rank]).max(0)
    for call, moment, index in zip(calls, latest.tolist(), where.tolist(), strict=False):
        call.last_came, call.last_rank = moment, axis.ranks[index]


def offset(world: Axis, device: torch.device) -> float:
    """Seconds to add to this process's clock to have rank 0's; 0 on one machine, whose processes share a clock.

    Of an exchange nobody gets out before everybody has come in. So in each round f_r + o_r >= t_s + o_s for any two ranks,
    with t the time before and f that after: the middle of the narrowest such interval, as NTP has it (RFC 5905).
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = [platform.node(), boot.read_text().strip() if boot.is_file() else ""]
    if world.group is None or len({tuple(one) for one in gather_json(here, world, device)}) == 1:
        return 0.0
    rounds = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        float(all_gather(torch.zeros(1, device=device), world)[0])
        rounds.append((before, time.perf_counter()))
    firsts = gather_json(rounds, world, device)[0]
    bounds = [(first[1] - mine[0], mine[1] - first[0]) for mine, first in zip(rounds, firsts, strict=True)]
    above, below = min(bounds, key=sum)
    return float(above - below) / 2.0
