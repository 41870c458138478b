"""Whether a sequence can be cut as `cp` and sequence parallelism ask, before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from disttrain.config.components import TAKES
from disttrain.config.schema import Config, StrategyConfig
from disttrain.errors import ConfigError


def tokens_multiple_of(cp: int, cut_by_tp: int) -> int:
    """What a number of tokens must be a multiple of: two chunks a rank of `cp`, whose tokens `tp` may cut once more."""
    return cp * math.lcm(2 if cp > 1 else 1, cut_by_tp)


def unit_of(strategy: StrategyConfig) -> int:
    """`tokens_multiple_of` for a strategy."""
    return tokens_multiple_of(strategy.cp, strategy.tp if strategy.sequence_parallel else 1)


def check_sequence(config: Config) -> None:
    """There is a sequence, what cuts it divides it, and attention can be computed as asked."""
    strategy, model = config.strategy, config.model
    if strategy.sequence_parallel and strategy.tp == 1:
        raise ConfigError("strategy.sequence_parallel=true needs strategy.tp of two or more", "strategy.sequence_parallel=false")
    if strategy.attention == "ring" and strategy.cp == 1:
        raise ConfigError("strategy.attention=ring needs strategy.cp of two or more", "strategy.attention=gather")
    if strategy.attention == "ring" and model.get("dropout"):
        raise ConfigError(
            f"strategy.attention=ring computes its softmax anew in backward, without the masks of model.dropout={model['dropout']}",
            "strategy.attention=gather",
        )
    cutting = [f"strategy.cp={strategy.cp}"] if strategy.cp > 1 else []
    cutting += ["strategy.sequence_parallel=true"] if strategy.sequence_parallel else []
    if cutting and TAKES.get(str(model.get("_target_"))) == "images":
        remedy = "strategy.sequence_parallel=false" if strategy.sequence_parallel else "strategy=ddp"
        raise ConfigError(f"{' and '.join(cutting)} cut sequences of tokens, and the model ({model['_target_']}) takes images", remedy)
    unit = unit_of(strategy)
    for key, length in lengths(config.dataset, model):
        if unit > 1 and length % unit:
            raise ConfigError(
                f"{key}={length} is not divisible by {unit}, as {' and '.join(cutting)} need"
                + (f" (two chunks on each of {strategy.cp} ranks)" if strategy.cp > 1 else f" (strategy.tp={strategy.tp})"),
                _remedy(config, key, max(1, round(length / unit)) * unit),
            )


def lengths(dataset: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """What says how many tokens a sequence has."""
    shape = dataset.get("shape") if TAKES.get(str(model.get("_target_"))) == "vectors" else None
    named = {"dataset.context": dataset.get("context"), "dataset.shape.0": shape[0] if shape else None}
    named["model.max_seq_len"] = model.get("max_seq_len")
    for key, length in named.items():
        if isinstance(length, int):
            yield key, length


def _remedy(config: Config, key: str, nearest: int) -> str:
    """The override that gives `key` a length that fits."""
    if key == "dataset.shape.0":
        return f"dataset.shape=[{','.join(map(str, [nearest, *config.dataset['shape'][1:]]))}]"
    return f"{key}={nearest}"
