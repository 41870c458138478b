"""What happens when the loss jumps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from disttrain.callbacks.reaction import Reaction
from disttrain.config.limits import check_limits
from disttrain.errors import ConfigError
from disttrain.parallel.step import Report
from disttrain.train.hooks import StepPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.train.trainer import Trainer

TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SPREAD = 1e-2
"""Of the median: a loss that hardly moves is not judged by its noise."""

_log = logging.getLogger(__name__)


class LossSpike(StepPolicy):
    """Skips, stops or rolls back at a step whose agreed loss is far above those of the last `window` steps, or not finite.

    Far is `zscore` robust standard deviations (median and median absolute deviation; Iglewicz and Hoaglin 1993) or
    `ratio` times the median, whichever of both is given and reached; a median below zero counts by its amount.
    A spike's own update is always skipped and its loss kept out of the window. All is decided on the device from numbers
    that every rank has, so all do the same.
    """

    def __init__(
        self,
        action: Literal["skip", "stop", "roll_back"] = "skip",
        zscore: float | None = 10.0,
        ratio: float | None = None,
        window: int = 64,
        min_steps: int = 16,
        max_roll_backs: int = 3,
    ) -> None:
        """`action`: skip | stop | roll_back; `min_steps`: losses seen before any is judged; one spike more than `max_roll_backs` stops."""
        check_limits("loss_spike", {"min_steps": min_steps, "max_roll_backs": max_roll_backs})
        self.reaction = Reaction("callbacks.loss_spike.action", action, max_roll_backs)
        if zscore is None and ratio is None:
            raise ConfigError("callbacks.loss_spike has neither a zscore nor a ratio to judge by", "callbacks.loss_spike.zscore=10")
        if min_steps > window:
            raise ConfigError(
                f"callbacks.loss_spike.min_steps is {min_steps}; it is 1 to window={window}", f"callbacks.loss_spike.min_steps={window}"
            )
        self.window, self.min_steps = window, min_steps
        self.zscore = torch.inf if zscore is None else zscore
        self.ratio = torch.inf if ratio is None else ratio
        self._seen = torch.full((window,), torch.inf, dtype=torch.float64)
        self._counts = torch.zeros(2, dtype=torch.int64)
        """Losses taken into the window, and spikes."""
        self._slots = torch.arange(window)
        self._told = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Move to the device. ConfigError if there will be nothing to roll back to."""
        self.reaction.prepare(trainer)
        for name in ("_seen", "_counts", "_slots"):
            setattr(self, name, getattr(self, name).to(trainer.device))

    def judge_global(self, trainer: Trainer, report: Report) -> Tensor:
        """SKIP at a spike, and what `action` says; no host read."""
        loss = report.loss.to(torch.float64)
        num_seen, num_spikes = self._counts[0], self._counts[1]
        num_held = num_seen.clamp(max=self.window)
        middle = ((num_held - 1).clamp(min=0) // 2)[None]
        median = self._seen.sort().values.index_select(0, middle)[0]
        deviations = torch.where(self._slots < num_held, (self._seen - median).abs(), torch.inf)
        spread = torch.maximum(TO_SIGMA * deviations.sort().values.index_select(0, middle)[0], LEAST_SPREAD * median.abs())
        above = loss - median
        is_far = (above > self.zscore * spread) | (above > (self.ratio - 1.0) * median.abs())
        is_spike = ~loss.isfinite() | (is_far & (num_seen >= self.min_steps))
        here = (self._slots == num_seen % self.window) & ~is_spike
        self._seen = torch.where(here, loss, self._seen)
        self._counts = self._counts + torch.stack([~is_spike, is_spike]).long()
        return self.reaction.verdict(is_spike, num_spikes)

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Tell of spikes since the last log point, and give the reason of a stop asked for on the device."""
        if "train/loss" not in row:
            return
        num_spikes = int(self._counts[1])
        if num_spikes > self._told and trainer.is_lead:
            _log.warning("step %d: %d loss spikes since the last log point", trainer.progress.step, num_spikes - self._told)
        if reason := self.reaction.reason("the loss has jumped", num_spikes, self._told):
            trainer.progress.reasons.append(reason)
        self._told = num_spikes

    def state_dict(self) -> dict[str, Any]:
        """The window, oldest loss first, and the counts."""
        num_seen = int(self._counts[0])
        oldest = num_seen % self.window if num_seen > self.window else 0
        seen = self._seen[: min(num_seen, self.window)].roll(-oldest)
        return {"seen": seen.tolist(), "counts": self._counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on judging by the same losses; one of another window keeps the newest that fit. What stopped a run before is forgiven."""
        seen = state["seen"][-self.window :]
        self._seen[: len(seen)] = torch.tensor(seen, dtype=torch.float64)
        num_spikes = state["counts"][1]
        self._counts = torch.tensor([len(seen), num_spikes])
        self._told = num_spikes
        if num_spikes > self.reaction.max_roll_backs:
            self._counts[1] = self._told = 0
