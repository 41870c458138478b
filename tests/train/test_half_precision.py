"""Under bf16 and fp16 (autocast, float32 weights) every layout follows one device in the same precision, over fifty steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.train.runs import curve

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp, zero 1": {"shard": 2, "strategy": {"zero": 1}},
    "fsdp, zero 3": {"shard": 2},
    "tensor": {"tp": 2},
    "tensor, sequence": {"tp": 2, "sequence_parallel": True},
    "context, gather": {"cp": 2},
    "context, ring": {"cp": 2, "strategy": {"attention": "ring"}},
    "pipeline": {"pp": 2},
    "hybrid": {"dp": 2, "tp": 2, "pp": 2},
}


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def one_device(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[float]]:
    """A precision's config, and its losses on one device."""
    amp = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": request.param}}
    config = {"steps": 50, "callbacks": amp, "optimizer": tiny.ADAMW | {"lr": 3e-3}, "dataset": tiny.TOKENS | {"uneven": True}}
    return config, curve(**config, micro_batch_size=4)


@pytest.mark.world(8)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_steps_follow_one_device(layout: str, one_device: tuple[dict[str, Any], list[float]]) -> None:
    config, alone = one_device
    assert len(alone) == 50
    assert alone[-1] < 0.98 * alone[0], "weights that do not move would pass"
    micro = 2 if layout == "hybrid" else 4  # two micro-batches a data rank, which a pipeline of two stages wants
    assert curve(**config, micro_batch_size=micro, **LAYOUTS[layout]) == pytest.approx(alone, rel=1e-3)
