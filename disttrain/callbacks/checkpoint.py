"""When a run is saved, and which checkpoints stay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.callbacks.monitored import Monitored
from disttrain.checkpoint.retain import Retention, remove
from disttrain.checkpoint.save import save
from disttrain.errors import ConfigError
from disttrain.parallel.step import Verdict
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.checkpoint.state import State
    from disttrain.train.trainer import Trainer


class Checkpoint(Callback):
    """Saves every so many steps or minutes, at the end, and, with `keep_best`, after every evaluation.

    What is saved when follows from the step number and from agreed metrics, so every rank knows it alone; only
    the clock is one rank's, and its wish travels as a SAVE.
    """

    def __init__(
        self,
        every: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = 2,
        keep_best: int = 0,
        monitor: str = "val/loss",
        mode: str = "min",
    ) -> None:
        """`every` in steps; `keep_last` null keeps all; `keep_best` by `monitor`, `mode` min | max."""
        _at_least_one("every", every)
        _at_least_one("keep_last", keep_last)
        if keep_best < 0:
            raise ConfigError(f"callbacks.checkpoint.keep_best is {keep_best}; it is at least 0", "callbacks.checkpoint.keep_best=1")
        self.every = every
        self.every_seconds = None if every_minutes is None else 60.0 * every_minutes
        self.monitored = Monitored("checkpoint", monitor, mode)
        self.retention = Retention(keep_last, keep_best, mode)
        self._measured: tuple[int, float] | None = None
        self._saved_at = time.monotonic()
        self._pending: dict[str, Any] | None = None

    def best(self, trainer: Trainer) -> Path | None:
        """Folder of the best checkpoint, the same on every rank; None where none was measured or none is kept."""
        best = self.retention.best()
        return trainer.folder.step_folder(best[0]) if best and trainer.folder is not None else None

    def due(self, trainer: Trainer, step: int) -> frozenset[str]:
        """Save at multiples of `every` and, with `keep_best`, wherever the loop evaluates; the end is saved always."""
        intervals = (self.every, trainer.eval_every if self.retention.keep_best else None)
        return frozenset({"save"}) if any(every is not None and step % every == 0 for every in intervals) else frozenset()

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Ask for a save when rank 0's clock says so."""
        if self.every_seconds is not None and trainer.is_lead and time.monotonic() - self._saved_at >= self.every_seconds:
            self._saved_at = time.monotonic()
            trainer.progress.request(Verdict.SAVE, f"{self.every_seconds / 60:g} minutes have passed")

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Remember what this step is worth."""
        if self.retention.keep_best:
            self._measured = (trainer.progress.step, self.monitored.value(metrics))

    def on_save_checkpoint(self, trainer: Trainer, state: State) -> None:
        """Store `state`, then let older ones go."""
        if trainer.folder is None:
            return
        step = trainer.progress.step
        save(state, trainer.folder.step_folder(step), trainer.mesh)
        self._saved_at = time.monotonic()
        self.retention.add(step, self._score(step))
        gone = self.retention.expired()
        if trainer.is_lead:
            remove(trainer.folder.checkpoints, gone)

    def on_load_checkpoint(self, trainer: Trainer, state: State) -> None:
        """Take up what was kept until the step resumed from, that one included."""
        if self._pending is not None:
            step, self._measured = trainer.progress.step, self._pending["measured"]
            self.retention.load_state_dict(self._pending, until=step)
            self.retention.add(step, self._score(step))
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """What is kept, and the newest score, which may be that of the step being saved."""
        return self.retention.state_dict() | {"measured": self._measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Wait until the step is known."""
        self._pending = state

    def _score(self, step: int) -> float | None:
        return self._measured[1] if self._measured is not None and self._measured[0] == step else None


def _at_least_one(key: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"callbacks.checkpoint.{key} is {value}; it is at least 1, or null", f"callbacks.checkpoint.{key}=1")
