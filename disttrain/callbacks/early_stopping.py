"""Stops a run that no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from disttrain.callbacks.monitored import Monitored
from disttrain.config.limits import check_limits
from disttrain.parallel.step import Verdict
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class EarlyStopping(Callback):
    """Asks for STOP when `monitor` has not improved by more than `min_delta` in `patience` evaluations in a row.

    The metric is the same on every rank, so all ask at the same step. A value that is NaN is no improvement.
    """

    def __init__(self, monitor: str = "val/loss", patience: int = 3, min_delta: float = 0.0, mode: Literal["min", "max"] = "min") -> None:
        """`monitor`: name of a metric of evaluations; `mode`: min | max."""
        check_limits("early_stopping", {"patience": patience})
        self.monitored = Monitored("early_stopping", monitor, mode)
        self.patience = patience
        self.min_delta = min_delta
        self.best = math.inf * self.monitored.sign
        self.waited = 0
        self._has_asked = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """ConfigError where there will be nothing to go by."""
        self.monitored.must_be_measured(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        value = self.monitored.value(metrics)
        if self.monitored.sign * (self.best - value) > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience and not self._has_asked:  # the stop takes hold a step later, maybe after another evaluation
            self._has_asked = True
            name = self.monitored.name
            trainer.progress.request(
                Verdict.STOP, f"{name} has not improved on {self.best:.6g} in {self.waited} evaluations (now {value:.6g})"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {"best": self.best if math.isfinite(self.best) else None, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best = math.inf * self.monitored.sign if state["best"] is None else float(state["best"])
        self.waited = int(state["waited"])
