"""What policies that refuse a step do about it: skip it, stop, or roll back to the newest checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from disttrain.callbacks.checkpoint import Checkpoint
from disttrain.errors import ConfigError
from disttrain.parallel.step import Verdict, vote
from disttrain.train.progress import FAILED

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.train.trainer import Trainer

ACTIONS = ("skip", "stop", "roll_back")


class Reaction:
    """The verdict on refused steps. Their own update is always skipped; one more than `max_roll_backs` roll-backs stops."""

    def __init__(self, key: str, action: str, max_roll_backs: int) -> None:
        """`key`: where the config says `action` (skip | stop | roll_back)."""
        if action not in ACTIONS:
            raise ConfigError(f"{key} is '{action}'; it may be {', '.join(ACTIONS)}", f"{key}=skip")
        self.key, self.action, self.max_roll_backs = key, action, max_roll_backs
        self._skip, self._stop = vote(Verdict.SKIP), vote(Verdict.STOP)
        self._refused = self._skip + {"skip": torch.zeros(len(Verdict)), "stop": self._stop, "roll_back": vote(Verdict.ROLL_BACK)}[action]

    def prepare(self, trainer: Trainer) -> None:
        """Move to the device. ConfigError if there will be nothing to roll back to."""
        saves = any(isinstance(one, Checkpoint) and one.saves_on_the_way for one in trainer.callbacks.values())
        if self.action == "roll_back" and not saves:
            raise ConfigError(
                f"{self.key}=roll_back goes back to the newest checkpoint, and none is made on the way", "callbacks.checkpoint.every=100"
            )
        self._skip, self._stop, self._refused = (one.to(trainer.device) for one in (self._skip, self._stop, self._refused))

    def verdict(self, is_refused: Tensor, num_before: Tensor) -> Tensor:
        """Counters [5] on the device, for a step that is refused or not; `num_before` were. No host read."""
        if self.action != "roll_back":
            return self._refused * is_refused
        return torch.where(num_before >= self.max_roll_backs, self._skip + self._stop, self._refused) * is_refused

    def stop_of(self, where: Tensor) -> Tensor:
        """Counters [5] that stop where `where` is true."""
        return self._stop * where

    def reason(self, what: str, number: int, told: int) -> str | None:
        """Why the run stops, if it does: `number` steps were refused so far, `told` when this was last asked."""
        if number > told and self.action == "stop":
            return f"{FAILED}: {what} ({self.key}=stop)"
        if number > max(told, self.max_roll_backs) and self.action == "roll_back":
            return f"{FAILED}: {what} {number} times ({self.key.rpartition('.')[0]}.max_roll_backs)"
        return None
