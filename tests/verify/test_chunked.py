"""A loss computed some tokens at a time is the same training, in every layout that has a head."""

from __future__ import annotations

from typing import Any

import pytest

from disttrain.verify import verb
from tests import tiny

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": (tiny.GPT, {}),
    "dp2": (tiny.LLAMA, {"dp": 2}),
    "fsdp2": (tiny.GPT, {"shard": 2, "strategy": {"zero": 3}}),
    "tp2": (tiny.LLAMA, {"tp": 2}),
    "tp2_sp": (tiny.GPT, {"tp": 2, "sequence_parallel": True}),
    "cp2": (tiny.GPT, {"cp": 2}),
    "cp2_tp2_sp": (tiny.LLAMA, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "pp2": (tiny.GPT, {"pp": 2}),
    "pp2_cp2": (tiny.LLAMA, {"pp": 2, "cp": 2, "strategy": {"attention": "ring"}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_device_with_whole_logits(layout: str) -> None:
    """Chunks of 7 rows: the last is short. One device's record has none."""
    model, arguments = LAYOUTS[layout]
    strategy = arguments.get("strategy", {}) | {"loss_chunk": 7}
    proof = verb.prove(tiny.config(**arguments | {"strategy": strategy}, model=model, micro_batch_size=2))
    assert proof.equal, (proof.failed, proof.cause)
