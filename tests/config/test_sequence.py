"""Sequences that can't be cut as asked are told before ranks start, with the nearest that can."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.schema import Config
from disttrain.errors import ConfigError

Make = Callable[..., Config]

SEQUENCE = ["strategy=tensor_parallel", "strategy.sequence_parallel=true", "launch.world_size=2"]
CONTEXT = ["strategy=context_parallel", "launch.world_size=4"]
BOTH = ["strategy=context_tensor_parallel", "launch.world_size=4"]


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ([*SEQUENCE, "dataset.context=15"], r"dataset.context=15 is not divisible by 2,.*strategy.tp=2", "dataset.context=16"),
        (
            [*SEQUENCE, "model.max_seq_len=129", "dataset.context=64"],
            r"model.max_seq_len=129 is not divisible by 2",
            "model.max_seq_len=128",
        ),
        ([*CONTEXT, "dataset.context=60"], r"dataset.context=60 is not divisible by 8.*strategy.cp=4", "dataset.context=64"),
        ([*CONTEXT, "dataset.context=3"], r"dataset.context=3 is not divisible by 8", "dataset.context=8"),
        (
            [*BOTH, "dataset.context=126"],
            r"126 is not divisible by 4, as strategy.cp=2 and",
            "dataset.context=128",
        ),
        (
            [*CONTEXT, "model=transformer_block", "dataset=synthetic", "dataset.shape=[12,512]"],
            r"dataset.shape.0=12 is not divisible by 8",
            "dataset.shape=[16,512]",
        ),
    ],
)
def test_a_sequence_that_does_not_divide_is_told_with_the_nearest(checked: Make, words: list[str], message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        checked(*words)
    assert caught.value.remedy == remedy
    checked(*words, remedy)


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["strategy.attention=ring"], "needs strategy.cp of two or more", "strategy.attention=gather"),
        ([*CONTEXT, "strategy.attention=ring", "model.dropout=0.1"], "without the masks of model.dropout", "strategy.attention=gather"),
        ([*CONTEXT, "model=simple_cnn", "dataset=digits"], "strategy.cp=4 cut sequences .* images", "strategy=ddp"),
        ([*SEQUENCE, "model=simple_cnn", "dataset=digits"], "sequence_parallel=true cut .* images", "strategy.sequence_parallel=false"),
        (["strategy.sequence_parallel=true"], "needs strategy.tp", "strategy.sequence_parallel=false"),
    ],
)
def test_what_has_no_sequence_or_no_ring_is_refused(checked: Make, words: list[str], message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        checked(*words)
    assert caught.value.remedy == remedy


def test_a_context_parallel_world_is_two_ranks_unless_told(checked: Make) -> None:
    config = checked("strategy=context_parallel", "launch.device=cpu")
    assert (config.launch.world_size, config.strategy.cp, config.strategy.attention) == (2, 2, "gather")
