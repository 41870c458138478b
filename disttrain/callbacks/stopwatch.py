"""The open window of `breakdown`: stopwatches around hooks, collectives, actions and batches of this rank."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from disttrain.callbacks.reads import Reads
from disttrain.data.workers import worker_seconds
from disttrain.parallel.ledger import sent
from disttrain.parallel.step import Step, map_tensors
from disttrain.parallel.timing import Recorder, Timed, clock_of
from disttrain.parallel.watch import unwatch, watch

if TYPE_CHECKING:
    from disttrain.train.hooks import Callback
    from disttrain.train.trainer import Trainer

FORWARD_BACKWARD, FINISH, UPDATE, BETWEEN = "forward_backward", "finish", "update", "between"
"""Phases of a step: both directions; sums over ranks and the norm; the optimizer; what lies between two steps."""
ASIDE = "aside"
"""Evaluations and saves: of no step. Nothing of them is noted but how long they took."""


class Stopwatch:
    """An open window on this rank."""

    def __init__(self, trainer: Trainer, owner: Callback) -> None:
        """Put stopwatches around hooks and collectives."""
        self.trainer = trainer
        self.clock = clock_of(trainer.device)
        self.recorder = Recorder(self.clock)
        self.num_steps = 0
        self.columns: defaultdict[str, list[float]] = defaultdict(list)
        self._marks: list[tuple[int, str, Any, float]] = []
        self._now: defaultdict[str, float] = defaultdict(float)
        self._feed = trainer.window, trainer.window.data_wait_seconds
        self._samples = {"targets": 0.0, "positions": 0.0, "void": 0.0}
        self._reads, self._in_hook = Reads(), False
        self._used = _usage()
        self._around = ExitStack()
        self._time_hooks(owner)
        self._leave_out()
        if not trainer.strategy.options.compile:  # its compiler would look into what stands around a read
            self._around.enter_context(self._reads.seen(self._is_watching))
        watch(self.recorder)
        self._around.callback(unwatch, self.recorder)

    def close(self) -> None:
        """Take everything away again."""
        self._around.close()

    def begin_step(self) -> None:
        """A step begins."""
        self.recorder.step = self.num_steps
        if self.trainer.step is not None:
            self._note_batch(self.trainer.step)
        self.turn(FORWARD_BACKWARD)

    def turn(self, phase: str) -> None:
        """Another phase begins."""
        self.recorder.phase = phase
        self._marks.append((self.num_steps, phase, self.clock.now(), time.thread_time()))

    def end_step(self) -> None:
        """The step is over, with what lay between it and the next."""
        window, wait = self.trainer.window, self.trainer.window.data_wait_seconds
        self._now["input"] = wait - (self._feed[1] if window is self._feed[0] else 0.0)
        self._feed = window, wait
        self._marks.append((self.num_steps, "", self.clock.now(), time.thread_time()))
        for name, seconds in self._now.items():
            column = self.columns[name]
            column += [0.0] * (self.num_steps - len(column)) + [seconds]
        self._now.clear()
        self.num_steps += 1

    def _time_hooks(self, owner: Callback) -> None:
        """Time every other callback's hooks, on the host, by the phase they stand in."""
        keys = {id(callback): key for key, callback in self.trainer.callbacks.items() if callback is not owner}

        def timed(key: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                phase, before, self._in_hook = self.recorder.phase, time.perf_counter(), True
                try:
                    return hook(*arguments, **keywords)
                finally:
                    if phase != ASIDE:
                        self._now[f"callbacks/{key}/{phase}"] += time.perf_counter() - before
                    self._in_hook = False

            return run

        for hooks in self.trainer.listeners.values():
            before = list(hooks)
            hooks[:] = [timed(keys[id(of)], hook) if id(of := getattr(hook, "__self__", None)) in keys else hook for hook in hooks]
            self._around.callback(hooks.__setitem__, slice(None), before)

    def _leave_out(self) -> None:
        """Look away from the first hook of an evaluation or a save to its last."""

        def look_away(*_: Any) -> None:
            unwatch(self.recorder)
            self.turn(ASIDE)
            self._used_before = _usage()

        def look_again(*_: Any) -> None:
            self._used = {key: value + self._used[key] - self._used_before[key] for key, value in _usage().items()}
            self.turn(BETWEEN)
            watch(self.recorder)

        begins, ends, saves = (self.trainer.listeners[f"on_{name}"] for name in ("validation_start", "validation_end", "save_checkpoint"))
        for hooks in (begins, ends, saves):
            self._around.callback(hooks.__setitem__, slice(None), list(hooks))
        begins.insert(0, look_away)
        ends.append(look_again)
        if saves:  # where nobody saves, no state is to be made for it
            saves[:] = [look_away, *saves, look_again]

    def _is_watching(self) -> bool:
        """Whether a read of the device is to be noted now."""
        return self.recorder.phase != ASIDE and (self._in_hook or self.recorder.phase != BETWEEN)

    def _note_batch(self, step: Step) -> None:
        """Count a step's samples: valid targets, positions that have one or not, void rows."""
        self._samples["targets"] += next(iter(step.local_counts.values()), 0.0)
        for batch in step.micro:
            sizes: list[int] = []
            map_tensors(lambda x, sizes=sizes: sizes.append(x.numel()) or x, batch.targets)  # type: ignore[misc]
            self._samples["positions"] += sizes[0] if sizes else 0
            self._samples["void"] += float((batch.indices < 0).sum())

    # --- once it is over ---------------------------------------------------------------------------------------------

    def summary(self, trainer: Trainer) -> dict[str, Any]:
        """This rank's numbers as JSON values. Every rank must call."""
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        used = {key: (value - self._used[key]) / self.num_steps for key, value in _usage().items()}
        calls = self.recorder.settled(trainer.mesh, trainer.device)
        self._phases()
        for name, value in _columns_of(calls).items():
            self.columns[name] = [value.get(step, 0.0) for step in range(self.num_steps)]
        columns = {name: values + [0.0] * (self.num_steps - len(values)) for name, values in sorted(self.columns.items())}
        late_for: dict[str, dict[str, list[float]]] = {}
        for call in calls:
            if call.late > 0:
                by_step = late_for.setdefault(call.axis, {}).setdefault(str(call.last_rank), [0.0] * self.num_steps)
                by_step[call.step] += call.late
        reads = sorted(self._reads.by_line.items(), key=lambda item: -item[1][0])[:5]
        return {
            "rank": trainer.mesh.rank,
            "host": platform.node(),
            "at": trainer.mesh.place(trainer.mesh.rank),
            "columns": {name: [round(value, 7) for value in values] for name, values in columns.items()},
            "talk": _talk(calls, trainer, self.num_steps),
            "late_for": late_for,
            "actions": self._actions(),
            "samples": {key: value / self.num_steps for key, value in self._samples.items()},
            "reads": [[line, count / self.num_steps, seconds / self.num_steps] for line, (count, seconds) in reads],
            "used": used,
            "memory": _memory(trainer.device),
        }

    def _phases(self) -> None:
        """Columns `step`, one a phase, and `cpu/<phase>`, of the main thread's time on a processor, in seconds; `aside` is of no step."""
        for (step, phase, begin, used), (_, _, end, used_then) in zip(self._marks, self._marks[1:], strict=False):
            seconds = self.clock.seconds(end) - self.clock.seconds(begin)
            found = {phase: seconds} | ({} if phase == ASIDE else {"step": seconds, f"cpu/{phase}": used_then - used})
            for name, value in found.items() if phase else ():
                column = self.columns[name]
                column += [0.0] * (step + 1 - len(column))
                column[step] += value

    def _actions(self) -> list[list[Any]]:
        """[step, kind, stage, micro-batch, begin, end] of a pipeline, in seconds since the window began."""
        start = min((begin for _, _, begin, _ in self.recorder.actions), default=0.0)
        return [[step, *action, round(begin - start, 7), round(end - start, 7)] for step, action, begin, end in self.recorder.actions]


def _columns_of(calls: list[Timed]) -> dict[str, dict[int, float]]:
    """{`exposed/<axis>/<phase>` and `late/...`: {step: seconds}}; `inside/` before it where it lies within a pipeline's action."""
    found: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for call in calls:
        where = f"{call.axis}/{call.phase}"
        for kind, seconds in (("exposed", call.exposed), ("late", call.late)):
            found[f"{kind}/{where}"][call.step] += seconds
            if call.inside:
                found[f"inside/{kind}/{where}"][call.step] += seconds
    return {name: dict(by_step) for name, by_step in found.items()}


def _talk(calls: list[Timed], trainer: Trainer, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """By axis and collective, a step: calls, bytes sent, seconds, those exposed, those that others were late."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for call in calls:
        size = trainer.mesh.axis(call.axis).size
        entry = found.setdefault(call.axis, {}).setdefault(call.collective, defaultdict(float))
        numbers = {"calls": 1.0, "bytes": sent(call.collective, call.num_bytes, size), "seconds": call.seconds}
        for key, value in (numbers | {"exposed": call.exposed, "late": call.late}).items():
            entry[key] += value / steps
    return found


def _usage() -> dict[str, float]:
    """What this process has used so far: seconds of a processor, times it lost one to somebody else, pages read from disk.

    `worker_seconds`: of a processor, by its loader's workers.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    used = {"cpu_seconds": own.ru_utime + own.ru_stime, "preempted": float(own.ru_nivcsw), "page_faults": float(own.ru_majflt)}
    return used | {"worker_seconds": worker_seconds()}


def _memory(device: torch.device) -> dict[str, float]:
    """Peak of this rank, and of what; on a CPU machine its ranks share the whole."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        retries = float(stats.get("num_alloc_retries", 0))
        free, total = torch.cuda.mem_get_info(device)
        return {"peak": float(torch.cuda.max_memory_allocated(device)), "has": float(total), "free": float(free), "retries": retries}
    import psutil

    machine = psutil.virtual_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    found = {"peak": float(peak), "has": float(machine.total), "free": float(machine.available)}
    return found | {"cores": float(os.cpu_count() or 1), "load": os.getloadavg()[0]}
