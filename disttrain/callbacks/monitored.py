"""A metric that a callback decides by: its name, which way is better, and a clear word where there is none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disttrain.errors import ConfigError
from disttrain.train.hooks import defined

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


@dataclass(frozen=True)
class Monitored:
    """Metric `name` of evaluations for `callbacks.<owner>`; `mode` says whether less or more is better."""

    owner: str
    name: str
    mode: str

    def __post_init__(self) -> None:
        """Refuse an unknown mode."""
        if self.mode not in ("min", "max"):
            raise ConfigError(f"callbacks.{self.owner}.mode is '{self.mode}'; it may be min or max", f"callbacks.{self.owner}.mode=min")

    @property
    def sign(self) -> float:
        """1 where less is better, else -1: `sign * value` is always to be made small."""
        return 1.0 if self.mode == "min" else -1.0

    def must_be_measured(self, trainer: Trainer) -> None:
        """ConfigError where no evaluation is made on the way, unless somebody's own callback may ask for one."""
        others = any(defined(one, "due") and not type(one).__module__.startswith("disttrain.") for one in trainer.callbacks.values())
        if trainer.evaluator is None:
            raise ConfigError(f"callbacks.{self.owner} goes by {self.name}, and the data has no validation split")
        if trainer.eval_every is None and not others:
            raise ConfigError(f"callbacks.{self.owner} goes by {self.name}, which is measured at the end only", "train.eval_every=100")

    def value(self, metrics: Mapping[str, float]) -> float:
        """Its value in an evaluation; ConfigError, naming what there is, where it is missing."""
        if self.name in metrics:
            return metrics[self.name]
        near = difflib.get_close_matches(self.name, metrics, 1) or sorted(metrics)[:1]
        raise ConfigError(
            f"callbacks.{self.owner}.monitor is '{self.name}', which no evaluation gives; there are {', '.join(sorted(metrics))}",
            f"callbacks.{self.owner}.monitor={near[0]}" if near else None,
        )
