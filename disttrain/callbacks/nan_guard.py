"""What happens when the loss is not a number."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from disttrain.errors import ConfigError
from disttrain.parallel.step import Local, Report, Verdict
from disttrain.train.hooks import StepPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.train.trainer import Trainer

_log = logging.getLogger(__name__)


class NaNGuard(StepPolicy):
    """Skips the update of a step whose agreed loss is not finite, and stops after too many skips in a row.

    The loss is a sum over the world, so one rank's NaN is everybody's and all skip alike. Everything is decided
    on the device. Gradients that overflow under fp16 are the loss scale's affair: they are skipped anyway, and
    here only count as skips in a row.
    """

    def __init__(self, on_nan: str = "skip", max_consecutive: int = 20) -> None:
        """`on_nan`: skip | stop (at the first bad loss); `max_consecutive`: skipped steps in a row that end the run.

        Twenty is more than fp16 needs to bring its first scale of 65536 down to one.
        """
        if on_nan not in ("skip", "stop"):
            raise ConfigError(f"callbacks.nan_guard.on_nan is '{on_nan}'; it may be skip or stop", "callbacks.nan_guard.on_nan=skip")
        if max_consecutive < 1:
            raise ConfigError(
                f"callbacks.nan_guard.max_consecutive is {max_consecutive}; it is at least 1", "callbacks.nan_guard.max_consecutive=20"
            )
        self._limits = [1.0 if on_nan == "stop" else math.inf, float(max_consecutive)]
        self.limits = torch.tensor(self._limits)
        self.counts = torch.zeros(2)
        """Bad losses in all, and skips in a row; on the device from the start of the run."""
        self._stop = functional.one_hot(torch.tensor(int(Verdict.STOP)), len(Verdict)).float()
        self._told = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Move the counters to the device."""
        self.limits = torch.tensor(self._limits, device=trainer.device)
        self.counts, self._stop = self.counts.to(trainer.device), self._stop.to(trainer.device)

    def judge(self, trainer: Trainer, local: Local) -> Tensor:
        """STOP where either count, with this step's loss on this rank, reaches its limit."""
        return self._stop * (self.counts + _is_bad(local.losses.sum()) >= self.limits).any()

    def judge_global(self, trainer: Trainer, report: Report) -> Tensor:
        """Skip where the agreed loss is not finite."""
        bad = _is_bad(report.loss)
        self.counts[0] += bad
        return bad

    def after_update(self, trainer: Trainer, report: Report) -> None:
        """Count skips in a row, whoever asked for them."""
        self.counts[1] += 1
        self.counts[1] *= report.skip

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Say so, once for all bad losses since the last log point, and give the reason of a stop asked for on the device."""
        if "train/loss" not in row:
            return
        (bad, in_a_row), (max_bad, max_in_a_row) = self.counts.tolist(), self._limits
        if bad > self._told and trainer.is_lead:
            new = bad - self._told
            _log.warning("step %d: %.0f steps since the last log point had a loss that is not finite", trainer.progress.step, new)
        self._told = bad
        if bad >= max_bad:
            trainer.progress.reasons.append("FAILED: the loss is not finite (callbacks.nan_guard.on_nan=stop)")
        elif in_a_row >= max_in_a_row:
            trainer.progress.reasons.append(f"FAILED: {in_a_row:.0f} updates in a row were skipped (callbacks.nan_guard.max_consecutive)")

    def state_dict(self) -> dict[str, Any]:
        """Bad losses so far."""
        return {"bad_losses": int(self.counts[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; what stopped a run before is not to stop the one that goes on."""
        self._told = float(state["bad_losses"])
        self.counts[0] = self._told
        self._limits[0] += self._told


def _is_bad(loss: Tensor) -> Tensor:
    return (~torch.isfinite(loss)).float()
