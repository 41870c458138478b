"""When a run is saved, and which checkpoints stay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disttrain.callbacks.monitored import Monitored
from disttrain.checkpoint.files import found_in
from disttrain.checkpoint.retain import Retention
from disttrain.checkpoint.save import Saved, Saver
from disttrain.config.limits import check_limits
from disttrain.errors import DivergedError
from disttrain.parallel.collectives import barrier
from disttrain.parallel.step import Verdict
from disttrain.train.hooks import Callback
from disttrain.train.progress import FAILED

if TYPE_CHECKING:
    from disttrain.checkpoint.state import State
    from disttrain.train.trainer import Trainer

FINISH_SECONDS = 2.0
"""After an error on this rank, for a save that is under way: the supervisor ends ranks a little later."""


class Checkpoint(Callback):
    """Saves every so many steps or minutes, at the end, and, with `keep_best`, after every evaluation.

    A save costs the loop its copy to host memory and is written beside it. One that fails stops the run, on all ranks
    at the next step; the checkpoints before it stay.

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
        mode: Literal["min", "max"] = "min",
        path: str | None = None,
    ) -> None:
        """`every` in steps; `keep_last` null keeps all; `keep_best` by `monitor`, `mode` min | max.

        `path`: below which folder, or place in a store (s3://bucket/folder), checkpoints go; null: into the run folder.
        """
        given = {"every": every, "every_minutes": every_minutes, "keep_last": keep_last, "keep_best": keep_best}
        check_limits("checkpoint", given)
        self.path = path
        self.every = every
        self.every_seconds = None if every_minutes is None else 60.0 * every_minutes
        self.monitored = Monitored("checkpoint", monitor, mode)
        self.retention = Retention(keep_last, keep_best, mode)
        self._measured: tuple[int, float] | None = None
        self._saved_at = time.monotonic()
        self._pending: dict[str, Any] | None = None
        self._saver: Saver | None = None

    @property
    def saves_on_the_way(self) -> bool:
        """Whether it saves before the end, be there evaluations or not."""
        return self.every is not None or self.every_seconds is not None

    def best(self, trainer: Trainer) -> Path | None:
        """Folder of the best checkpoint, the same on every rank; None where none was measured or none is kept."""
        best = self.retention.best()
        return trainer.folder.step_folder(best[0]) if best and trainer.folder is not None else None

    def due(self, trainer: Trainer, step: int) -> frozenset[str]:
        """Save at multiples of `every` and, with `keep_best`, wherever the loop evaluates; the end is saved always."""
        intervals = (self.every, trainer.eval_every if self.retention.keep_best else None)
        return frozenset({"save"}) if any(every is not None and step % every == 0 for every in intervals) else frozenset()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Write down where checkpoints go, if not into the run folder. ConfigError where the best are to be kept and none is measured."""
        if self.retention.keep_best:
            self.monitored.must_be_measured(trainer)
        if self.path is not None and trainer.folder is not None:
            if trainer.is_lead:
                trainer.folder.keep_checkpoints_at(self.path)
                trainer.folder.checkpoints.mkdir(parents=True, exist_ok=True)  # a resume tells a run without any from a place that is gone
            barrier(trainer.mesh.axis("world"))

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Hear how saves ended; ask for one when rank 0's clock says so."""
        if self._saver is not None:
            self._settle(trainer, self._saver.poll())
        if self.every_seconds is not None and trainer.is_lead and time.monotonic() - self._saved_at >= self.every_seconds:
            self._saved_at = time.monotonic()
            trainer.progress.request(Verdict.SAVE, f"{self.every_seconds / 60:g} minutes have passed")

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Remember what this step is worth."""
        if self.retention.keep_best:
            self._measured = (trainer.progress.step, self.monitored.value(metrics))

    def on_save_checkpoint(self, trainer: Trainer, state: State) -> None:
        """Copy `state`; it is written while the run goes on."""
        if trainer.folder is None:
            return
        if self._saver is None:
            self._saver = Saver(trainer.folder.checkpoints, trainer.mesh, trainer.device)
        step = trainer.progress.step
        self.retention.add(step, self._score(step))
        self._saver.save(state, step)
        self._saved_at = time.monotonic()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Wait for the last save. OSError on all ranks if it failed."""
        if self._saver is not None:
            failed = self._settle(trainer, self._saver.drain())
            self._saver.close()
            self._saver = None
            if failed:
                raise OSError(failed)

    def on_roll_back(self, trainer: Trainer) -> None:
        """Finish what is under way, so that it can be gone back to."""
        if self._saver is not None:
            self._settle(trainer, self._saver.drain())

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Let a save under way be finished; where all ranks have agreed to fail, it is waited for."""
        if self._saver is not None and isinstance(error, DivergedError):
            self._settle(trainer, self._saver.drain())
        elif self._saver is not None:
            self._saver.leave(FINISH_SECONDS)

    def on_load_checkpoint(self, trainer: Trainer, state: State) -> None:
        """Take up what was kept until the step resumed from, that one included."""
        if self._pending is not None:
            step, self._measured = trainer.progress.step, self._pending["measured"]
            self.retention.load_state_dict(self._pending, until=step)
            self.retention.add(step, self._score(step))
            there = found_in(trainer.folder.checkpoints) if trainer.folder is not None else {}
            for kept in list(self.retention.scores):
                (self.retention.confirm if kept in there else self.retention.drop)(kept)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """What is kept, and the newest score, which may be that of the step being saved."""
        return self.retention.state_dict() | {"measured": self._measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Wait until the step is known."""
        self._pending = state

    def _settle(self, trainer: Trainer, ended: Sequence[Saved]) -> str | None:
        """Let older checkpoints go for new ones; ask all ranks to stop for one that failed. Returns what failed."""
        failed = None
        for saved in ended:
            if saved.error is None:
                self.retention.confirm(saved.step)
            else:
                self.retention.drop(saved.step)
                failed = f"the checkpoint of step {saved.step} was not saved: {saved.error}"
                trainer.progress.request(Verdict.STOP, failed)
                trainer.progress.reasons.append(f"{FAILED}: {failed}")
        expired = self.retention.expired() if ended else []
        if self._saver is not None and trainer.is_lead:
            self._saver.remove(expired)
        return failed

    def _score(self, step: int) -> float | None:
        return self._measured[1] if self._measured is not None and self._measured[0] == step else None
