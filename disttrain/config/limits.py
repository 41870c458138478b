"""What numbers our callbacks take: told of a config before any rank starts, and of an object where it is made. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disttrain.errors import ConfigError

PLACE = "disttrain.callbacks."
"""Where our callbacks lie, one in a module, which is mostly its key too."""


@dataclass(frozen=True)
class Limit:
    """What a number must be, in words, whether one is that, and one that is."""

    words: str
    holds: Callable[[float], bool]
    instead: str


def at_least(least: int, instead: str) -> Limit:
    """`least` or more."""
    return Limit(f"at least {least}", lambda value: value >= least, instead)


def more_than(least: int, instead: str) -> Limit:
    """More than `least`."""
    return Limit(f"more than {least}", lambda value: value > least, instead)


OR_NULL = Limit("at least 1, or null", lambda value: value >= 1, "1")

LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "amp": {
        "init_scale": more_than(0, "65536"),
        "growth_factor": more_than(1, "2"),
        "backoff_factor": Limit("more than 0 and less than 1", lambda value: 0 < value < 1, "0.5"),
        "growth_interval": at_least(1, "2000"),
    },
    "breakdown": {"start": at_least(1, "10"), "steps": at_least(1, "10")},
    "checkpoint": {
        "every": OR_NULL,
        "every_minutes": Limit("more than 0, or null", lambda value: value > 0, "10"),
        "keep_last": OR_NULL,
        "keep_best": at_least(0, "1"),
    },
    "collective_check": {"seconds": more_than(0, "60")},
    "early_stopping": {"patience": at_least(1, "3")},
    "ema": {"decay": Limit("at least 0 and less than 1", lambda value: 0 <= value < 1, "0.999")},
    "loss_spike": {"min_steps": at_least(1, "16"), "max_roll_backs": at_least(0, "3")},
    "nan_guard": {"max_consecutive": at_least(1, "20"), "max_roll_backs": at_least(0, "3")},
    "profile": {"start": at_least(0, "10"), "steps": at_least(1, "3")},
    "replica_check": {"every": at_least(1, "100")},
    "watchdog": {"factor": more_than(1, "20"), "min_seconds": at_least(0, "60"), "seconds": more_than(0, "600")},
}


def check_limits(module: str, values: Mapping[str, object], key: str | None = None) -> None:
    """ConfigError for an argument of the callback in `module` that is beyond its limit; null is another matter.

    `key`: under which the config has it, if not the module's name.
    """
    for name, limit in LIMITS.get(module, {}).items():
        value = values.get(name)
        if isinstance(value, (int, float)) and not (math.isfinite(value) and limit.holds(value)):
            place = f"callbacks.{key or module}.{name}"
            words = limit.words if math.isfinite(value) else f"a finite number, {limit.words}"
            raise ConfigError(f"{place} is {value}; it is {words}", f"{place}={limit.instead}")
