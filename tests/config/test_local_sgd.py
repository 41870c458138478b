"""What can't stand beside `strategy.sync_every` is told before any rank starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.schema import Config
from disttrain.errors import ConfigError

Make = Callable[..., Config]
EVERY_FOUR = ["strategy=ddp", "strategy.sync_every=4", "callbacks.checkpoint.every=40"]


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (["train.eval_every=10"], "train.eval_every=10 is no multiple of strategy.sync_every=4", "train.eval_every=8"),
        (["train.eval_every=3"], "nearest: train.eval_every=4", "train.eval_every=4"),
        (["callbacks.checkpoint.every=50"], "callbacks.checkpoint.every=48 or callbacks.checkpoint.every=52", "every=48"),
        (["strategy.dp_shard=2"], "strategy.dp_shard=2: replicas", "strategy.dp_shard=1"),
        (["strategy.cp=2"], "strategy.cp=2: replicas", "strategy.cp=1"),
        (["strategy.pp=2"], "strategy.pp=2: replicas", "strategy.pp=1"),
        (["strategy.dp_replicate=1"], "has no other", "strategy.sync_every=1"),
        (["strategy.compression=bf16"], "sends no gradients", "strategy.compression=none"),
        (["callbacks.amp.precision=fp16"], "loss scale", "callbacks.amp.precision=bf16"),
        (["callbacks=[default,ema]"], "weights of its own", "~callbacks.ema"),
        (["strategy.sync_every=0"], "strategy.sync_every=0 must be more than zero", "strategy.sync_every=1"),
        (["strategy.outer_momentum=1.0"], "less than 1", "strategy.outer_momentum=0.9"),
        (["strategy.sync_every=1", "strategy.outer_lr=0.7"], "belongs to strategy.sync_every", "strategy.sync_every=8"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_remedy(checked: Make, words: list[str], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(*EVERY_FOUR, *words)
    assert found in str(refused.value)
    assert remedy in str(refused.value)


def test_tensor_groups_may_be_replicas(checked: Make) -> None:
    words = [*EVERY_FOUR, "strategy=ddp_tensor_parallel", "strategy.outer_lr=0.7", "strategy.outer_momentum=0.9"]
    strategy = checked(*words).strategy
    assert (strategy.sync_every, strategy.outer_lr, strategy.outer_momentum) == (4, 0.7, 0.9)
