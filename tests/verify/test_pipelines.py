"""Every pipeline schedule computes what one device computes: float64, 1e-10, alone and with the data and the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch.distributed.fsdp
import torch.distributed.pipelining  # noqa: F401  (seconds; imported once, before ranks are forked)

from disttrain.config.schedules import SCHEDULES
from disttrain.errors import UserError
from disttrain.verify import verb
from tests import tiny

DEEP = {"num_layers": 4}
MODELS: dict[str, Mapping[str, Any]] = {"gpt": tiny.GPT | DEEP, "llama": tiny.LLAMA | DEEP}

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp2_pp2": {"dp": 2, "pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sp_pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "dp2_tp2_pp2": {"dp": 2, "tp": 2, "pp": 2},
    "dp2_tp2_sp_pp2": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
}

SOME = [
    ("gpt", "pp2", "gpipe"),
    ("llama", "pp4", "1f1b"),
    ("gpt", "dp2_pp2", "interleaved_1f1b"),
    ("llama", "tp2_sp_pp2", "interleaved_zero_bubble"),
    ("gpt", "tp2_pp2", "zbv"),
    ("gpt", "pp4", "dualpipev"),
    ("gpt", "dp2_pp2", "zbv"),
    ("gpt", "dp2_tp2_sp_pp2", "1f1b"),
    ("llama", "dp2_tp2_pp2", "interleaved_zero_bubble"),
]
"""Each schedule, each model and each layout at least once; four micro-batches or more, short windows, ignored targets, clipping."""

OTHERS = [case for case in product(MODELS, LAYOUTS, SCHEDULES) if case not in SOME]


def prove(model: str, layout: str, schedule: str, **more: Any) -> verb.Proof:
    """`model` in at least four micro-batches a step, two stages a rank where the schedule takes them."""
    degrees = LAYOUTS[layout]
    fields = dict(MODELS[model])
    ranks = degrees["pp"]
    stages = ranks * (1 if schedule in ("gpipe", "1f1b") else 2)
    fields["num_layers"] = max(4, stages)
    num_micro = max(4, stages)
    data = degrees.get("dp", 1)
    arguments = {"model": fields, "strategy": {"schedule": schedule}, "micro_batch_size": 1, "global_batch_size": num_micro * data} | more
    verify = {"steps": 2, "shrink": False} | more.pop("verify", {})
    return verb.prove(tiny.config(**degrees, **arguments | {"verify": verify}))


@pytest.mark.parametrize(("model", "layout", "schedule"), SOME)
def test_equal_to_one_device(model: str, layout: str, schedule: str) -> None:
    proof = prove(model, layout, schedule)
    assert proof.equal, (proof.failed, proof.cause)
    assert {"start", "batch", "gradient", "norm", "loss", "update"} <= {error.quantity for error in proof.errors}


@pytest.mark.long
@pytest.mark.parametrize(("model", "layout", "schedule"), OTHERS)
def test_the_other_pipelines_are_equal_to_one_device(model: str, layout: str, schedule: str) -> None:
    proof = prove(model, layout, schedule)
    assert proof.equal, (proof.failed, proof.cause)


def test_every_schedule_model_and_layout_is_proved_by_default() -> None:
    assert {schedule for _, _, schedule in SOME} == set(SCHEDULES)
    assert {model for model, _, _ in SOME} == set(MODELS)
    assert {layout for _, layout, _ in SOME} == set(LAYOUTS)


@pytest.mark.parametrize(("dtype", "schedule"), [("bf16", "1f1b"), ("fp16", "zbv")])
def test_lower_precision_within_its_tolerance(dtype: str, schedule: str) -> None:
    proof = prove("gpt", "pp2", schedule, verify={"dtype": dtype})
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.worst("gradient") > 1e-10, "this was not computed in a lower precision"


def test_layers_that_do_not_divide_and_cuts_by_name() -> None:
    """H10: five layers on two ranks, and embeddings alone on a rank by the config's word."""
    for fields, strategy in (({"num_layers": 5}, {}), ({"num_layers": 1}, {"stage_split": ["blocks.0"]})):
        config = tiny.config(pp=2, model=tiny.GPT | fields, strategy=strategy, micro_batch_size=4, verify={"steps": 2})
        proof = verb.prove(config)
        assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.parametrize(
    ("schedule", "degrees", "model"),
    [
        ("1f1b", {"shard": 2, "strategy": {"zero": 1}}, "gpt"),
        ("zbv", {"shard": 2, "strategy": {"zero": 1}}, "llama"),
        ("interleaved_zero_bubble", {"shard": 2, "strategy": {"zero": 1}}, "gpt"),
        pytest.param("gpipe", {"shard": 2, "tp": 2, "strategy": {"zero": 1}}, "llama", marks=pytest.mark.long),
        pytest.param("dualpipev", {"shard": 2, "strategy": {"zero": 1}}, "llama", marks=pytest.mark.long),
        pytest.param("interleaved_1f1b", {"shard": 2, "dp": 2, "strategy": {"zero": 1}}, "llama", marks=pytest.mark.long),
        ("1f1b", {"cp": 2}, "llama"),
        ("zbv", {}, "moe"),
        pytest.param("1f1b", {"shard": 2, "ep": 2, "strategy": {"zero": 0}}, "moe", marks=pytest.mark.long),
    ],
)
def test_other_axes_beside_a_pipeline(schedule: str, degrees: dict[str, Any], model: str) -> None:
    knobs = degrees.get("strategy", {}) | {"schedule": schedule}
    fields = tiny.MOE | DEEP if model == "moe" else MODELS[model]
    config = tiny.config(**degrees | {"strategy": knobs}, pp=2, model=fields, micro_batch_size=1, verify={"steps": 2, "shrink": False})
    proof = verb.prove(config)
    assert proof.equal, (proof.failed, proof.cause)


def test_a_weight_tied_within_a_rank_is_not_sharded() -> None:
    config = tiny.config(shard=2, pp=2, model=MODELS["gpt"], micro_batch_size=1, strategy={"schedule": "zbv", "zero": 1})
    with pytest.raises(UserError, match="stands in two pipeline stages of one rank"):
        verb.prove(config)


def test_shrinking_keeps_what_the_schedule_takes() -> None:
    config = tiny.config(pp=2, model=MODELS["gpt"], strategy={"schedule": "dualpipev"}, micro_batch_size=4, global_batch_size=32)
    proof = verb.prove(config)
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.notes == ["global batch 32 -> 8 (4 x 2 x 1)"]


def test_dropout_masks_agree_in_the_tensor_group_of_every_stage() -> None:
    config = tiny.config(tp=2, pp=2, model=MODELS["gpt"] | {"dropout": 0.1}, micro_batch_size=2, verify={"steps": 1})
    proof = verb.prove(config)
    assert proof.equal, (proof.failed, proof.cause)
    assert any("dropout 0.1" in note for note in proof.notes)
