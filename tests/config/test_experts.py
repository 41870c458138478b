"""Expert parallelism as it is typed: what `ep` stands for, and what is refused before any rank starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.schema import Config
from disttrain.errors import ConfigError

Make = Callable[..., Config]
EP = ("strategy=expert_parallel", "model=moe_tiny")


def test_ep_takes_all_data_ranks_unless_it_is_given(checked: Make) -> None:
    config = checked(*EP)
    assert (config.launch.world_size, config.strategy.dp_shard, config.strategy.ep, config.strategy.zero) == (2, 2, 2, 0)
    config = checked(*EP, "strategy.ep=2", "strategy.dp_replicate=2", "launch.world_size=8")
    assert (config.strategy.dp_replicate, config.strategy.dp_shard, config.strategy.ep) == (2, 4, 2)


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (("strategy=expert_parallel",), "the model has none", "model=moe_tiny"),
        ((*EP, "strategy.ep=3", "launch.world_size=4"), "strategy.ep=3 does not divide strategy.dp_shard=4", "strategy.ep=2"),
        ((*EP, "strategy.ep=2"), None, None),
        ((*EP, "model.experts.num_experts=3"), "strategy.ep=2 does not divide model.experts.num_experts=3", "model.experts.num_experts=4"),
        ((*EP, "model.experts.top_k=9"), "model.experts.top_k=9 is more than model.experts.num_experts=8", "model.experts.top_k=8"),
        (
            ("model=moe_tiny", "+model.experts.every=0"),
            "model.experts.every=0 is not above zero",
            "model.experts.every=<a number above zero>",
        ),
        (("model=moe_tiny", "model.experts.top_k=0"), "model.experts.top_k=0 is not above zero", ""),
        (("model=moe_tiny", "model.num_layers=1"), "no block has experts", "model.num_layers=2, or model.experts.every=1"),
        ((*EP, "model.num_layers=2"), None, None),
        ((*EP, "strategy.compression=bf16"), "knows one set of ranks", "strategy.compression=none"),
        ((*EP, "strategy.offload=true"), "needs strategy.dp_shard of two or more, and strategy.zero", "strategy=fsdp"),
        ((*EP, "model.experts.num_expert=4"), "there is no key 'model.experts.num_expert'", ""),
        (("strategy.ep=0",), "strategy.ep=0 is no number of ranks", "strategy.ep=1"),
    ],
)
def test_what_does_not_fit_is_one_message(checked: Make, words: tuple[str, ...], message: str | None, remedy: str | None) -> None:
    if message is None:
        checked(*words)
        return
    with pytest.raises(ConfigError) as caught:
        checked(*words)
    assert message in caught.value.message
    assert (remedy or "") in str(caught.value.remedy)
