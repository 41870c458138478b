"""Every strategy computes what one device computes, for every model: gradients, norm, loss, updates, at 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from disttrain import build
from disttrain.verify import verb
from tests import tiny

MODELS: dict[str, Mapping[str, Any]] = tiny.SEQUENCE_MODELS

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp2": {"dp": 2},
    "ddp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4},
    "tp4_sp": {"tp": 4, "sequence_parallel": True},
    "ddp2_tp2": {"dp": 2, "tp": 2},
    "ddp2_tp2_sp": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "fsdp2": {"shard": 2},
    "fsdp4": {"shard": 4},
    "fsdp4_zero1": {"shard": 4, "strategy": {"zero": 1}},
    "fsdp2_zero2": {"shard": 2, "strategy": {"zero": 2}},
    "hsdp2x2": {"dp": 2, "shard": 2},
    "hsdp2x2_zero1": {"dp": 2, "shard": 2, "strategy": {"zero": 1}},
    "hsdp2x2_zero2": {"dp": 2, "shard": 2, "strategy": {"zero": 2}},
    "fsdp2_tp2": {"shard": 2, "tp": 2},
    "fsdp2_tp2_sp": {"shard": 2, "tp": 2, "sequence_parallel": True},
    "fsdp2_recomputed": {"shard": 2, "strategy": {"recompute": "full"}},
    "fsdp2_cp2": {"shard": 2, "cp": 2},
    "hsdp2x2_cp2_zero2": {"dp": 2, "shard": 2, "cp": 2, "strategy": {"zero": 2}},
    "fsdp2_tp2_sp_zero1": {"shard": 2, "tp": 2, "sequence_parallel": True, "strategy": {"zero": 1}},
}

SOME = [
    ("gpt", "single"),
    ("gpt", "ddp2"),
    ("gpt", "tp2"),
    ("gpt", "ddp2_tp2_sp"),
    ("gpt_separate", "tp2_sp"),
    ("llama", "tp2"),
    ("llama", "ddp2_tp2"),
    ("llama", "tp4_sp"),
    ("llama_merged", "ddp4"),
    ("block", "ddp2"),
    ("block", "tp4"),
    ("block", "tp2_sp"),
    ("gpt", "fsdp2"),
    ("llama", "fsdp4"),
    ("gpt", "fsdp4_zero1"),
    ("llama_merged", "fsdp2_zero2"),
    ("gpt", "hsdp2x2"),
    ("llama", "hsdp2x2_zero1"),
    ("gpt", "hsdp2x2_zero2"),
    ("llama", "fsdp2_tp2"),
    ("gpt", "fsdp2_tp2_sp"),
    ("gpt_separate", "fsdp2_tp2_sp_zero1"),
    ("gpt", "fsdp2_recomputed"),
    ("llama", "fsdp2_cp2"),
    ("gpt", "hsdp2x2_cp2_zero2"),
]
"""Each model and each strategy at least once."""

OTHERS = [case for case in product(MODELS, STRATEGIES) if case not in SOME]


def prove(model: str, strategy: str, **more: Any) -> verb.Proof:
    """`model` under `strategy`, in two micro-batches a step; four key-value heads where four ranks share them."""
    arguments = STRATEGIES[strategy]
    fields = dict(MODELS[model])
    if arguments.get("tp") == 4 and "num_kv_heads" in fields:
        fields["num_kv_heads"] = 4
    micro = 8 // arguments.get("dp", 1) // arguments.get("shard", 1) // 2
    return verb.prove(tiny.config(**arguments, model=fields, micro_batch_size=micro, **more))


@pytest.mark.parametrize(("model", "strategy"), SOME)
def test_equal_to_one_device(model: str, strategy: str) -> None:
    proof = prove(model, strategy)
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.tolerance == 1e-10
    compared = {error.quantity for error in proof.errors}
    assert {"start", "batch", "gradient", "norm", "loss", "update"} <= compared


@pytest.mark.long
@pytest.mark.parametrize(("model", "strategy"), OTHERS)
def test_the_other_layouts_are_equal_to_one_device(model: str, strategy: str) -> None:
    proof = prove(model, strategy)
    assert proof.equal, (proof.failed, proof.cause)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("sklearn")
    dataset = {"_target_": "disttrain.data.images.Digits", "data_dir": str(tmp_path_factory.mktemp("digits"))}
    build.prepare(tiny.config(model=tiny.CNN, dataset=dataset))
    return dataset


@pytest.mark.parametrize(
    "strategy",
    ["ddp2", "tp2", "fsdp2", "hsdp2x2_zero2", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp4", "tp4", "ddp2_tp2"))],
)
def test_a_convolutional_net_on_digits(strategy: str, digits: dict[str, Any]) -> None:
    proof = verb.prove(tiny.config(**STRATEGIES[strategy], model=tiny.CNN, dataset=digits, verify={"steps": 2}))
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.parametrize("optimizer", [tiny.SGD | {"momentum": 0.9}, {"_target_": "torch.optim.Adam", "lr": 1e-3}], ids=["sgd", "adam"])
def test_other_optimizers_make_the_same_updates(optimizer: dict[str, Any]) -> None:
    proof = prove("gpt", "ddp2_tp2", optimizer=optimizer)
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [
        ("float32", "ddp2_tp2_sp"),
        ("bf16", "tp2"),
        ("fp16", "ddp2"),
        pytest.param("bf16", "ddp2_tp2_sp", marks=pytest.mark.long),
        pytest.param("fp16", "tp2_sp", marks=pytest.mark.long),
    ],
)
def test_lower_precision_within_its_tolerance(dtype: str, strategy: str) -> None:
    proof = prove("gpt", strategy, verify={"dtype": dtype})
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.worst("gradient") > 1e-10, "this was not computed in a lower precision"


@pytest.mark.parametrize("strategy", ["tp2", "tp2_sp"])
def test_dropout_masks_are_shared_as_the_plan_says(strategy: str) -> None:
    arguments = STRATEGIES[strategy]
    proof = verb.prove(tiny.config(**arguments, model=tiny.GPT | {"dropout": 0.1}, verify={"steps": 1}))
    assert proof.equal, (proof.failed, proof.cause)
    assert any("dropout 0.1" in note for note in proof.notes)


@pytest.mark.parametrize("strategy", ["tp2", pytest.param("ddp2_tp2_sp", marks=pytest.mark.long)])
def test_a_plan_of_the_users_with_gathered_logits(strategy: str) -> None:
    """M1's layer: the head's output is made whole, and each rank computes the whole loss."""
    proof = prove("llama", strategy, plan={"head": "column_gather", "loss": "whole"})
    assert proof.equal, (proof.failed, proof.cause)


def test_a_tolerance_below_rounding_is_not_met() -> None:
    proof = prove("gpt", "tp2", verify={"tolerance": 1e-18})
    assert not proof.equal


def test_every_model_and_every_strategy_is_proved_by_default() -> None:
    assert {model for model, _ in SOME} == set(MODELS)
    assert {strategy for _, strategy in SOME} == set(STRATEGIES)
