"""A callback that times the steps of a run from the outside: from the end of one step to the end of a later one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain.train.hooks import Callback

CHECKED = 20
"""The first log point after step 1."""


class Clock:
    """Wall-clock and processor seconds of this process since it was made."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def per_step(self, steps: int) -> str:
        """'<wall> <processor>', in seconds a step."""
        return f"{(time.perf_counter() - self.wall) / steps} {(time.process_time() - self.processor) / steps}"


class Stopwatch(Callback):
    """Rank 0 writes what a step took, over the `steps` steps after `warmup` others, to `file`, logging and all.

    Behind it, the loss of step CHECKED, which must be that of the loop written by hand.
    """

    def __init__(self, file: str, warmup: int, steps: int) -> None:
        self.file = Path(file)
        self.warmup = warmup
        self.steps = steps
        self._clock, self._loss = Clock(), 0.0

    def on_train_step_end(self, trainer: Any, report: Any) -> None:
        """Start, or stop and write; between the two an integer is compared."""
        if trainer.progress.step == self.warmup:
            self._clock = Clock()
        elif trainer.progress.step == self.warmup + self.steps and trainer.is_lead:
            self.file.write_text(f"{self._clock.per_step(self.steps)} {self._loss}")

    def on_log(self, trainer: Any, row: Mapping[str, float]) -> None:
        """Note the loss to check by."""
        if trainer.progress.step == CHECKED:
            self._loss = row["train/loss"]
