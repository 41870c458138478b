"""What is predicted of a run's traffic is what its ledger then measures, to the byte and by the same names."""

from __future__ import annotations

from typing import Any

import pytest

from disttrain.plan.constants import Constants
from disttrain.plan.planned import make, predicted
from disttrain.plan.settle import settle
from tests import tiny
from tests.plan.conftest import hardware
from tests.train.runs import rows

MEASURING = {"monitor": {"_target_": "disttrain.callbacks.monitor.Monitor"}, "ledger": {"_target_": "disttrain.callbacks.ledger.Ledger"}}
BF16 = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "bf16"}}
SIX, SHARED = tiny.MOE | {"num_layers": 6}, tiny.MOE | {"experts": tiny.EXPERTS | {"num_shared": 1}}
NAMED = ["blocks.1", "blocks.3", "norm"]

DEEP = {"zero": 1, "schedule": "interleaved_1f1b", "virtual_stages": 4}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp": {"dp": 2},
    "local SGD": {"dp": 2, "tp": 2, "strategy": {"sync_every": 2}},
    "tp": {"tp": 2, "sequence_parallel": True},
    "hsdp": {"dp": 2, "shard": 2, "model": tiny.LLAMA},
    "fsdp and a ring": {"shard": 2, "cp": 2, "strategy": {"zero": 2, "attention": "ring"}},
    "3d": {"dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2},
    "experts in every second block": {"dp": 2, "model": tiny.MOE},
    "experts under fsdp": {"dp": 2, "shard": 2, "ep": 2, "model": tiny.MOE, "callbacks": BF16},
    "experts and stages that differ": {"pp": 2, "dp": 2, "model": SIX, "micro_batch_size": 1, "strategy": {"schedule": "interleaved_1f1b"}},
    "narrow experts": {"tp": 2, "sequence_parallel": True, "model": tiny.MOE, "strategy": {"recompute": "full"}, "callbacks": BF16},
    "experts and a cut sequence": {"cp": 2, "tp": 2, "model": SHARED, "strategy": {"recompute": "selective"}},
    "powersgd": {"dp": 2, "tp": 2, "strategy": {"compression": "powersgd", "compression_rank": 2, "bucket_size": 0.02}},
    "weights in host memory": {"shard": 2, "strategy": {"offload": True}},
    "four stages a rank": {"pp": 2, "shard": 2, "model": tiny.GPT | {"num_layers": 8}, "micro_batch_size": 1, "strategy": DEEP},
    "named stages": {"pp": 2, "model": SIX, "micro_batch_size": 1, "strategy": {"schedule": "zbv", "stage_split": NAMED}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_sends_what_was_predicted(layout: str) -> None:
    """In the mean over a window with a log point and without; nothing is sent over an axis that the plan doesn't name."""
    config = dict(LAYOUTS[layout])
    settled = settle(tiny.config(**config))
    assert not settled.changes
    plan = make(settled.case, hardware("cpu"), Constants())
    last = rows(callbacks=MEASURING | config.pop("callbacks", {}), log_every=4, eval_every=1, steps=8, **config)[0][-1]
    measured = {key: number for key, number in last.items() if key.count("/") == 2 and key.endswith("_bytes") and number}
    assert measured == pytest.approx({key: number for key, number in predicted(plan).items() if key.startswith("comm/")}, rel=1e-12)
    assert bool(measured) == (settled.case.layout.world > 1)
