"""What each rank keeps for itself while it trains: how long its steps took, and when the actions of one of them ran.

Both go to `ranks/rank-<n>.json` of the run folder when the run ends, for `report`. A step costs one logarithm and one
addition to a histogram; the step whose actions are timed is the third of a start, when buffers and caches are warm. They are
timed by the device's clock (`parallel/timing.py`): on a GPU an action is launched long before it runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from disttrain.parallel.timing import Actions, clock_of
from disttrain.parallel.watch import unwatch, watch
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.parallel.step import Report
    from disttrain.train.rows import Window
    from disttrain.train.trainer import Trainer

_log = logging.getLogger(__name__)

RATIO = 1.02
"""Bin n of the histogram holds steps of about RATIO ** n seconds."""
_LOG_RATIO = math.log(RATIO)
_WARM = 2
"""Steps of a start before the one whose actions are timed."""

Span = tuple[str, int, int, float, float]
"""An action (kind, stage, micro-batch) with the seconds at which it began and ended."""

PASSES = {"forward": "F", "backward": "B"}


class OneStep(Actions):
    """Spans of one step on this rank's device: a pipeline's actions, or each direction of each micro-batch as one of stage 0."""

    def __init__(self, device: torch.device) -> None:
        """Time begins here: on CUDA, once the device has done what it was given before."""
        super().__init__(clock_of(device))
        self._device = device
        self.origin = time.time()
        """In seconds since 1970, by which ranks are set beside each other."""
        self._zero: Any = self.clock.now()

    def passes(self, direction: str, micro: int) -> None:
        """A micro-batch goes through the whole model."""
        self.acts((PASSES[direction], 0, micro))

    def passed(self, direction: str, micro: int) -> None:
        """It is through."""
        self.acted((PASSES[direction], 0, micro))

    def until_now(self, kind: str) -> None:
        """Note what lies between the last span's end and this moment as `kind`, of no stage (-1)."""
        start = self.actions[-1][3] if self.actions else self._zero
        self.actions.append((self.step, (kind, -1, -1), start, self.clock.now()))

    def spans(self) -> list[Span]:
        """All of them, in order, in seconds after `origin`. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(*action, start, end) for _, action, start, end in self.in_seconds(-self.clock.seconds(self._zero))]


class ByRank(Callback):
    """Step times and one step's timeline of this rank."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._counts: Counter[int] = Counter()
        self._first_seconds: float | None = None
        self._seen = self._carried = 0.0
        self._timed_step = -1
        self._timed: OneStep | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """A start of the run: choose the step to time. What an earlier start has written is added to."""
        self._timed_step = min(trainer.progress.step + _WARM, trainer.num_steps - 1)
        if trainer.folder is not None:
            before = trainer.folder.of_rank(trainer.mesh.rank).get("step_seconds", {}).get("counts", {})
            self._counts.update({int(bin_): int(number) for bin_, number in before.items()})

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Watch the step that was chosen."""
        if trainer.progress.step == self._timed_step:
            self._timed = OneStep(trainer.device)
            watch(self._timed)

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        """The reductions after the last action are over."""
        if self._timed is not None and trainer.progress.step == self._timed_step:
            self._timed.until_now("reduce")

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """Count the step's time: since the last one's end, evaluations and saves left out."""
        window: Window = trainer.window
        seconds = window.seconds
        took = seconds - self._seen if window.steps > 1 else seconds + self._carried
        self._seen = seconds
        if self._first_seconds is None:
            self._first_seconds = took
        else:
            self._counts[round(math.log(max(took, 1e-9)) / _LOG_RATIO)] += 1
        if self._timed is not None and trainer.progress.step == self._timed_step + 1:
            unwatch(self._timed)
            self._timed.until_now("update")

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        """A log point has waited for the device: that time is of the step after it, whose window is a new one."""
        self._carried = trainer.window.seconds - self._seen
        return {}

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Keep what was seen."""
        self._end(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Keep what was seen."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Write the file, if the disk lets it; the run doesn't depend on it. No communication."""
        if self._timed is not None:
            unwatch(self._timed)  # the run may have ended inside that step
        if trainer.folder is None:
            return
        mesh = trainer.mesh
        found: dict[str, Any] = {
            "rank": mesh.rank,
            "at": {name: index for name, index in mesh.coordinate().items() if name in mesh.degrees and mesh.degrees[name] > 1},
            "step_seconds": {"ratio": RATIO, "first": self._first_seconds, "counts": dict(sorted(self._counts.items()))},
        }
        if self._timed is not None and (spans := self._timed.spans()):
            found["timeline"] = {"step": self._timed_step + 1, "origin": self._timed.origin, "spans": spans}
        try:
            trainer.folder.store_of_rank(mesh.rank, found)
        except OSError as error:
            _log.warning("the step times of rank %d are not kept: %s", mesh.rank, error)
