"""Sequences cut over ranks compute what one device computes: every model that has tokens, each way of attending, with other axes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from disttrain.verify import verb
from tests import tiny

MODELS: dict[str, Mapping[str, Any]] = tiny.SEQUENCE_MODELS | {"llama_deep": tiny.LLAMA | {"num_layers": 4}}
RING = {"attention": "ring"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp2_ring": {"cp": 2, "strategy": RING},
    "cp4": {"cp": 4},
    "cp4_ring": {"cp": 4, "strategy": RING},
    "dp2_cp2": {"dp": 2, "cp": 2},
    "dp2_cp2_ring": {"dp": 2, "cp": 2, "strategy": RING},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "cp2_tp2_sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2_tp2_sp_ring": {"cp": 2, "tp": 2, "sequence_parallel": True, "strategy": RING},
    "dp2_cp2_tp2_sp": {"dp": 2, "cp": 2, "tp": 2, "sequence_parallel": True},
    "fsdp2_cp2": {"shard": 2, "cp": 2},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "zbv_cp2_ring": {"pp": 2, "cp": 2, "strategy": RING | {"schedule": "zbv"}},
    "recompute_cp2_ring": {"cp": 2, "strategy": RING | {"recompute": "selective"}},
}
SOME = [
    ("gpt", "cp2"),
    ("gpt", "cp4_ring"),
    ("gpt", "cp2_tp2_sp"),
    ("gpt_separate", "dp2_cp2"),
    ("llama", "cp2_ring"),
    ("llama", "cp4"),
    ("llama", "cp2_tp2"),
    ("llama_merged", "cp2_tp2_sp_ring"),
    ("block", "cp4"),
    ("block", "dp2_cp2_ring"),
    ("gpt", "dp2_cp2_tp2_sp"),
    ("llama", "fsdp2_cp2"),
    ("gpt", "pp2_cp2"),
    ("llama_deep", "zbv_cp2_ring"),
    ("llama", "recompute_cp2_ring"),
]
"""Each model and each layout at least once."""


def prove(model: str, layout: str, **more: Any) -> verb.Proof:
    """Two micro-batches a step, targets ignored unevenly, norms clipped."""
    arguments = LAYOUTS[layout]
    micro = 8 // arguments.get("dp", 1) // 2
    return verb.prove(tiny.config(**arguments, model=MODELS[model], micro_batch_size=micro, **more))


@pytest.mark.parametrize(("model", "layout"), SOME)
def test_equal_to_one_device(model: str, layout: str) -> None:
    proof = prove(model, layout)
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.tolerance == 1e-10
    assert {"start", "batch", "gradient", "norm", "loss", "update"} <= {error.quantity for error in proof.errors}


OTHERS = [case for case in product(MODELS, LAYOUTS) if case not in SOME and "pp" not in LAYOUTS[case[1]]]


@pytest.mark.long
@pytest.mark.parametrize(("model", "layout"), OTHERS)
def test_the_others_are_equal_to_one_device(model: str, layout: str) -> None:
    proof = prove(model, layout)
    assert proof.equal, (proof.failed, proof.cause)


def test_every_model_and_every_layout_is_proved_by_default() -> None:
    assert {model for model, _ in SOME} == set(MODELS)
    assert {layout for _, layout in SOME} == set(LAYOUTS)


@pytest.mark.parametrize("layout", ["cp2", "cp2_tp2", "cp2_tp2_sp"])
def test_each_rank_draws_masks_for_its_own_tokens(layout: str) -> None:
    """In a tensor group shared as ever: a rank's own for heads, and for tokens under sequence parallelism."""
    proof = verb.prove(tiny.config(**LAYOUTS[layout], model=tiny.GPT | {"dropout": 0.1, "num_layers": 1}, verify={"steps": 1}))
    assert proof.equal, (proof.failed, proof.cause)
    assert any("dropout 0.1" in note for note in proof.notes)


@pytest.mark.parametrize("plan", [{"head": "column_gather", "loss": "whole"}, {"blocks.*.mlp.down": "row", "loss": "whole"}])
def test_a_plan_of_the_users_beside_the_models(plan: dict[str, str]) -> None:
    proof = prove("llama", "cp2_tp2_sp", plan=plan)
    assert proof.equal, (proof.failed, proof.cause)
