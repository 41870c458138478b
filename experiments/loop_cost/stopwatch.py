"""A callback that times the steps of a run from the outside: from the end of one step to the end of a later one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from disttrain.train.hooks import Callback


class Stopwatch(Callback):
    """Rank 0 writes the mean seconds of the `steps` steps after `warmup` others to `file`, logging and all."""

    def __init__(self, file: str, warmup: int, steps: int) -> None:
        self.file = Path(file)
        self.warmup = warmup
        self.steps = steps
        self._start = 0.0

    def on_train_step_end(self, trainer: Any, report: Any) -> None:
        """Start, or stop and write; between the two an integer is compared."""
        if trainer.progress.step == self.warmup:
            self._start = time.perf_counter()
        elif trainer.progress.step == self.warmup + self.steps and trainer.is_lead:
            self.file.write_text(repr((time.perf_counter() - self._start) / self.steps))
