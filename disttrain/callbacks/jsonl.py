"""The run's own record of its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class JSONL(Callback):
    """A row of `metrics.jsonl` at every log point, from rank 0.

    `perf/elapsed_seconds` is the time that the run has taken so far, evaluations, saves and earlier starts included.
    """

    def __init__(self) -> None:
        """No time has passed."""
        self._before = 0.0
        self._start = time.perf_counter()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Time goes on."""
        self._start = time.perf_counter()

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Append the row, with its step first."""
        if trainer.is_lead and trainer.folder is not None:
            trainer.folder.append({"step": trainer.progress.step, **row, "perf/elapsed_seconds": round(self._elapsed(), 6)})

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close the file."""
        if trainer.folder is not None:
            trainer.folder.close()

    def state_dict(self) -> dict[str, Any]:
        """Time so far."""
        return {"seconds": self._elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = float(state["seconds"])

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._start
