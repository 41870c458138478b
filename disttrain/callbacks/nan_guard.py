"""What happens when a loss or a gradient is not a number."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from disttrain.callbacks import nonfinite
from disttrain.callbacks.reaction import Reaction
from disttrain.config.limits import check_limits
from disttrain.parallel.step import Report, Step
from disttrain.train.hooks import StepPolicy
from disttrain.train.progress import FAILED

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.train.trainer import Trainer

NUM_NORMS = 6
"""Gradient norms kept, that of the bad step with them."""
KEPT_STEPS = 3
"""Batches held on to: on a GPU the verdict on a step is known here when the next one is over."""

_log = logging.getLogger(__name__)


class NaNGuard(StepPolicy):
    """Skips, stops or rolls back at a step whose agreed loss or gradient is not finite, and stops after too many skips in a row.

    Loss and gradient norm are sums over the world, so one rank's NaN is everybody's and all do the same. It is decided on the
    device. Under fp16's loss scale gradients that overflow are that one's affair: they are skipped anyway, and here only
    count as skips in a row. The first time, the batch is run again with a look at every operation (`nonfinite.py`), and the
    module, rank and direction in which the first such value arose are named.
    """

    def __init__(
        self,
        on_nan: Literal["skip", "stop", "roll_back"] = "skip",
        max_consecutive: int = 20,
        max_roll_backs: int = 3,
        explain: bool = True,
    ) -> None:
        """`on_nan`: skip | stop (at the first bad step) | roll_back; `max_consecutive`: skipped steps in a row that end the run.

        Twenty is more than fp16 needs to bring its first scale of 65536 down to one. `explain`: run the batch again.
        """
        check_limits("nan_guard", {"max_consecutive": max_consecutive, "max_roll_backs": max_roll_backs})
        self.reaction = Reaction("callbacks.nan_guard.on_nan", on_nan, max_roll_backs)
        self.max_consecutive, self.explains = max_consecutive, explain
        self.counts = torch.zeros(2)
        """Bad steps in all, and skips in a row; on the device from the start of the run."""
        self._norms = torch.full((NUM_NORMS,), torch.nan, dtype=torch.float64)
        self._told = 0.0
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._found = ""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Move the counters to the device. ConfigError if there will be nothing to roll back to."""
        self.reaction.prepare(trainer)
        self.counts, self._norms = self.counts.to(trainer.device), self._norms.to(trainer.device)

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Look into a bad step before its weights change, where it is known by now (on a CPU it is)."""
        self._explain(trainer)
        if self.explains and trainer.step is not None:
            self._steps.append(trainer.step)

    def judge_global(self, trainer: Trainer, report: Report) -> Tensor:
        """SKIP at a bad step, and what `on_nan` says; STOP where skips in a row, with this step, reach their limit."""
        judged = report.loss if trainer.strategy.loss_scale is not None else report.loss + report.grad_norm.to(report.loss)
        is_bad = ~judged.isfinite()
        verdict = self.reaction.verdict(is_bad, self.counts[0]) + self.reaction.stop_of(self.counts[1] + is_bad >= self.max_consecutive)
        self.counts[0] += is_bad
        self._norms[trainer.progress.step % NUM_NORMS] = report.grad_norm
        return verdict

    def after_update(self, trainer: Trainer, report: Report) -> None:
        """Count skips in a row, whoever asked for them."""
        self.counts[1] += 1
        self.counts[1] *= report.skip

    def on_roll_back(self, trainer: Trainer) -> None:
        """The weights are about to change."""
        self._explain(trainer)

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Say so, once for all bad steps since the last log point, and give the reason of a stop asked for on the device."""
        if "train/loss" not in row:
            return
        self._explain(trainer)
        bad, in_a_row = self.counts.tolist()
        if bad > self._told and trainer.is_lead:
            what = "a loss or a gradient that is not finite"
            _log.warning("step %d: %.0f steps since the last log point had %s", trainer.progress.step, bad - self._told, what)
        reason = self.reaction.reason("a loss or gradient was not finite", int(bad), int(self._told))
        self._told = bad
        if reason is None and in_a_row >= self.max_consecutive:
            reason = f"{FAILED}: {in_a_row:.0f} updates in a row were skipped (callbacks.nan_guard.max_consecutive)"
        if reason is not None:
            trainer.progress.reasons.append(reason + (f"\n  {self._found}" if self._found else ""))

    def _explain(self, trainer: Trainer) -> None:
        """Run the first bad step's batch again, once a start of the run. Every rank calls it, and knows the same."""
        number = trainer.progress.skipped_at
        step = next((step for step in self._steps if step.number + 1 == number), None)
        if step is None or not self.explains or not nonfinite.can_explain(trainer.strategy) or not self.counts[0]:
            return
        self.explains = False
        self._steps.clear()
        in_order = self._norms.roll(-number % NUM_NORMS).tolist()  # the bad step's last, and those of steps after it first
        norms = in_order[trainer.progress.step - number :]
        self._found = nonfinite.explain(trainer, step, norms, self.reaction.key)
        if trainer.is_lead:
            _log.warning("%s", self._found)

    def state_dict(self) -> dict[str, Any]:
        """Bad steps so far."""
        return {"bad_losses": int(self.counts[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; what stopped a run before is not to stop the one that goes on."""
        bad = state["bad_losses"]
        self.counts[0] = self._told = float(0 if bad > self.reaction.max_roll_backs and self.reaction.action == "roll_back" else bad)
