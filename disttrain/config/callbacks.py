"""Which callbacks may stand beside each other, what numbers they take, and what they need of the rest of a config. No torch here."""

from __future__ import annotations

from disttrain.config.limits import PLACE, check_limits
from disttrain.config.local_sgd import AMP, CHECKPOINT
from disttrain.config.schema import Config
from disttrain.errors import ConfigError

EARLY_STOPPING = "disttrain.callbacks.early_stopping.EarlyStopping"


def check_callbacks(config: Config) -> None:
    """No callback of ours twice: two would declare, or write, the same thing. Their numbers. Precision belongs to float32 weights."""
    seen: dict[str, str] = {}
    for key, value in config.callbacks.items():
        target = value["_target_"]
        if target in seen and target.startswith("disttrain."):
            raise ConfigError(f"callbacks.{seen[target]} and callbacks.{key} are the same callback twice ({target})", f"~callbacks.{key}")
        seen[target] = key
        if target.startswith(PLACE):
            check_limits(target.removeprefix(PLACE).split(".")[0], value, key)
    check_evaluations(config)
    amp = key_of(config, AMP)
    precision = "fp32" if amp is None else config.callbacks[amp].get("precision", "fp32")
    key = f"callbacks.{amp or 'amp'}.precision"
    if config.train.dtype == "float64" and precision != "fp32":
        raise ConfigError(f"train.dtype=float64 is for proofs and {key}={precision} for speed: not both", f"{key}=fp32")
    if config.train.dtype == "bfloat16" and precision == "fp16":
        raise ConfigError(f"train.dtype=bfloat16 with {key}=fp16: weights in one half type, products in the other", "train.dtype=float32")
    if config.strategy.gather_dtype == "bf16" and precision != "bf16":
        raise ConfigError(
            f"strategy.gather_dtype=bf16 rounds weights, and {key}={precision} computes with more of them than is left",
            f"{key}=bf16, or strategy.gather_dtype=weights",
        )


def check_evaluations(config: Config) -> None:
    """What goes by evaluations on the way has some; a callback of the user's own may ask for them."""
    for what in waiting_for_evaluations(config) if config.train.eval_every is None else ():
        if all(value["_target_"].startswith("disttrain.") for value in config.callbacks.values()):
            every = min(100, max(1, (config.train.steps or 100) // 2))
            every += -every % config.strategy.sync_every
            found = f"{what} goes by evaluations, and train.eval_every=null makes one at the end only"
            raise ConfigError(found, f"train.eval_every={every}")


def waiting_for_evaluations(config: Config) -> dict[str, str]:
    """What is without effect where nothing is evaluated, and the override that leaves it out."""
    found = {}
    for key, value in config.callbacks.items():
        if value["_target_"] == EARLY_STOPPING:
            found[f"callbacks.{key}"] = f"~callbacks.{key}"
        if value["_target_"] == CHECKPOINT and value.get("keep_best"):
            found[f"callbacks.{key}.keep_best={value['keep_best']}"] = f"callbacks.{key}.keep_best=0"
    return found


def key_of(config: Config, target: str) -> str | None:
    """Under which key the config has the callback of the class `target`; None where it has none."""
    return next((key for key, value in config.callbacks.items() if value["_target_"] == target), None)
