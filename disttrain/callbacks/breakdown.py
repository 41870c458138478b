"""Where the time of a step goes: a window of a few steps in which every collective, action and hook is timed on every rank.

Outside the window nothing is done; evaluations and saves within it are of no step. The run folder gets `breakdown.json`, which
`doctor` and `report` read; the next row of the log has the window's totals (`comm/<axis>/exposed_seconds`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disttrain.callbacks.stopwatch import BETWEEN, FINISH, UPDATE, Stopwatch
from disttrain.config.limits import check_limits
from disttrain.parallel import collectives
from disttrain.texts import write_json
from disttrain.train.hooks import StepPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.parallel.step import Local, Report
    from disttrain.train.trainer import Trainer

FILE = "breakdown.json"


class Breakdown(StepPolicy):
    """Times `steps` steps, the first one after `start` others. It steers nothing: as a policy it is asked between phases."""

    def __init__(self, start: int = 10, steps: int = 10) -> None:
        """`start`: steps taken before the window in this start of the run, fewer, but the first one, where it ends before."""
        check_limits("breakdown", {"start": start, "steps": steps})
        self.start, self.steps = start, steps
        self.found: dict[str, Any] | None = None
        """What the window has seen, of all ranks, once it is over; the same on each."""
        self._first = 0
        self._open: Stopwatch | None = None
        self._shown = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count from where this start of the run begins."""
        left = trainer.num_steps - trainer.progress.step
        self._first = trainer.progress.step + max(min(1, left - 1), min(self.start, left - self.steps))

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Open, go on to the next step, or close."""
        if self._open is not None:
            self._open.end_step()
            if trainer.progress.step >= self._first + self.steps:
                self._close(trainer)
        elif trainer.progress.step == self._first and self.found is None:
            self._open = Stopwatch(trainer, self)
        if self._open is not None:
            self._open.begin_step()

    def judge(self, trainer: Trainer, local: Local) -> Tensor | None:
        """Both directions are over."""
        self._turn(FINISH)
        return None

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        """Gradients are summed."""
        self._turn(UPDATE)

    def after_update(self, trainer: Trainer, report: Report) -> None:
        """The update is made."""
        self._turn(BETWEEN)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close early where the run ends; its last step counts no time for what comes after it."""
        if self._open is not None:
            self._open.end_step()
            self._close(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Let go of what was put around the run."""
        if self._open is not None:
            self._open.close()

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        """The window's totals, in the first row after it."""
        if self.found is None or self._shown:
            return {}
        self._shown = True
        return totals(self.found)

    def _turn(self, phase: str) -> None:
        if self._open is not None:
            self._open.turn(phase)

    def _close(self, trainer: Trainer) -> None:
        assert self._open is not None
        window, self._open = self._open, None
        window.close()
        first = self._first + 1
        ranks = collectives.gather_json(window.summary(trainer), trainer.mesh.axis("world"), trainer.device)
        names = {"degrees": trainer.mesh.degrees, "device": trainer.device.type, "unit": getattr(trainer.task, "unit", "samples")}
        self.found = {"first_step": first, "steps": window.num_steps, "num_micro": trainer.feed.part.num_micro, **names, "ranks": ranks}
        if trainer.is_lead and trainer.folder is not None:
            write_json(trainer.folder.path / FILE, self.found)


def totals(found: Mapping[str, Any]) -> dict[str, float]:
    """The window's communication as metrics: the mean over ranks of seconds a step, and bytes a second while under way."""
    ranks = found["ranks"]
    metrics: dict[str, float] = {}
    for axis in sorted({axis for rank in ranks for axis in rank["talk"]}):
        parts = [entry for rank in ranks for entry in rank["talk"].get(axis, {}).values()]
        seconds, exposed, late, moved = (sum(part.get(key, 0.0) for part in parts) for key in ("seconds", "exposed", "late", "bytes"))
        metrics |= {f"comm/{axis}/seconds": seconds / len(ranks), f"comm/{axis}/exposed_seconds": exposed / len(ranks)}
        metrics |= {f"comm/{axis}/late_seconds": late / len(ranks)}
        if seconds > 0:
            metrics |= {f"comm/{axis}/bytes_per_second": moved / seconds, f"comm/{axis}/hidden": max(0.0, 1 - exposed / seconds)}
    return metrics
