"""The global batch is the experiment: a run's curve does not depend on strategy, ranks or accumulation."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.train.runs import curve

UNEVEN = tiny.TOKENS | {"uneven": True, "num_samples": 103}
"""Sequences count between one and all of their targets; the last batch of an epoch is short."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "tensor_parallel": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "ddp_tensor_parallel": {"dp": 2, "tp": 2},
}
PRECISIONS = {"float64": 1e-12, "float32": 1e-5}
ALONE: dict[str, list[float]] = {}


def alone(dtype: str) -> list[float]:
    """One device's curve, computed once."""
    if dtype not in ALONE:
        ALONE[dtype] = curve(steps=50, dataset=UNEVEN, dtype=dtype)
    return ALONE[dtype]


@pytest.mark.world(4)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_fifty_steps_draw_one_curve_in_every_layout(dtype: str, layout: str, accumulation: int) -> None:
    arguments = LAYOUTS[layout]
    micro = 8 // arguments.get("dp", 1) // accumulation
    found = curve(steps=50, dataset=UNEVEN, dtype=dtype, micro_batch_size=micro, **arguments)
    assert found == pytest.approx(alone(dtype), rel=PRECISIONS[dtype])
    assert found[-1] < 0.98 * found[0], "nothing was learned, so nothing was shown"


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_alone_changes_nothing(micro: int) -> None:
    assert curve(steps=50, dataset=UNEVEN, dtype="float64", micro_batch_size=micro) == pytest.approx(alone("float64"), rel=1e-12)


def test_two_runs_are_equal_to_the_bit_and_another_seed_is_another_run() -> None:
    """M27."""
    first = curve(steps=5, dataset=UNEVEN)
    assert curve(steps=5, dataset=UNEVEN) == first
    assert curve(steps=5, dataset=UNEVEN, seed=1) != first


@pytest.mark.world(4)
@pytest.mark.parametrize("optimizer", [tiny.SGD, tiny.SGD | {"momentum": 0.9}], ids=["sgd", "momentum"])
def test_other_optimizers_too(optimizer: dict[str, Any]) -> None:
    one = curve(steps=10, dtype="float64", optimizer=optimizer)
    assert curve(steps=10, dtype="float64", optimizer=optimizer, dp=2, tp=2) == pytest.approx(one, rel=1e-12)
