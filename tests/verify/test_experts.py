"""A mixture of experts computes what one device computes, in every layout; what expert parallelism holds and sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.layout import Cut
from disttrain.verify import verb
from tests import tiny
from tests.parallel.ranks import prepared, run_step

WHOLE = {"zero": 0}
LLAMA = tiny.LLAMA | {"experts": tiny.EXPERTS | {"every": 1, "num_shared": 1, "top_k": 1}}
CAPACITY = tiny.MOE | {"experts": tiny.EXPERTS | {"capacity_factor": 0.75}}
DEEP = tiny.MOE | {"num_layers": 4}

EP2 = {"shard": 2, "ep": 2, "strategy": WHOLE, "micro_batch_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "ddp2": {"dp": 2, "micro_batch_size": 2},
    "ep2": EP2,
    "ep4": {"shard": 4, "ep": 4, "strategy": WHOLE, "micro_batch_size": 1},
    "ep2_capacity": EP2 | {"model": CAPACITY},
    "ep2_llama_shared_top1": EP2 | {"model": LLAMA},
    "dp2_ep2": {"dp": 2, "shard": 2, "ep": 2, "strategy": WHOLE, "micro_batch_size": 1},
    "outer2_ep2": {"shard": 4, "ep": 2, "strategy": WHOLE, "micro_batch_size": 1},
    "ep2_tp2": {"shard": 2, "ep": 2, "tp": 2, "strategy": WHOLE, "micro_batch_size": 2, "model": LLAMA},
    "pp2_ep2_zbv": {"pp": 2, "shard": 2, "ep": 2, "strategy": WHOLE | {"schedule": "zbv"}, "micro_batch_size": 2, "model": DEEP},
    "tp2_sequence": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 4, "model": LLAMA},
    "cp2": {"cp": 2, "micro_batch_size": 4, "model": LLAMA},
    "ep2_cp2_recomputed": {"shard": 2, "ep": 2, "cp": 2, "strategy": WHOLE | {"recompute": "full"}, "micro_batch_size": 2},
    "ep2_recomputed": EP2 | {"strategy": WHOLE | {"recompute": "full"}},
}
LONG: dict[str, dict[str, Any]] = {
    "ddp4": {"dp": 4, "micro_batch_size": 1},
    "tp2": {"tp": 2, "micro_batch_size": 4},
    "fsdp2": {"shard": 2, "strategy": {"zero": 3}, "micro_batch_size": 2},
    "fsdp2_ep2": EP2 | {"strategy": {"zero": 3}},
    "fsdp4_ep2": {"shard": 4, "ep": 2, "strategy": {"zero": 2}, "micro_batch_size": 1},
    "pp2": {"pp": 2, "strategy": {"schedule": "1f1b"}, "micro_batch_size": 4, "model": DEEP},
    "pp2_ep2": {"pp": 2, "shard": 2, "ep": 2, "strategy": WHOLE | {"schedule": "1f1b"}, "micro_batch_size": 2, "model": DEEP},
    "cp2_tp2_sequence": {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4},
    "tp2_sequence_capacity": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 4, "model": CAPACITY},
    "pp2_cp2": {"pp": 2, "cp": 2, "micro_batch_size": 4, "model": DEEP},
    "ep2_tp2_sequence": {"shard": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "strategy": WHOLE, "micro_batch_size": 2},
    "dp2_ep2_tp2": {"dp": 2, "shard": 2, "ep": 2, "tp": 2, "strategy": WHOLE, "micro_batch_size": 1},
}


def prove(case: dict[str, Any]) -> verb.Proof:
    """Two micro-batches a step, a short window, ignored targets, clipping."""
    return verb.prove(tiny.config(**{"model": tiny.MOE} | case))


@pytest.mark.world(4)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name: str) -> None:
    proof = prove(CASES[name])
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.tolerance == 1e-10


@pytest.mark.world(8)
@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_other_layouts_are_equal_too(name: str) -> None:
    proof = prove(LONG[name])
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.world(4)
def test_experts_are_cut_and_their_gradients_summed_beside_ep_only() -> None:
    def entry(place: Place) -> tuple[list[int], bool, list[str]]:
        trainer = prepared(place, model=tiny.MOE, **CASES["dp2_ep2"])
        layout = trainer.layouts["blocks.1.mlp.experts.up"]
        assert layout.placements["ep"] == Cut(0)
        assert not layout.reductions()
        assert trainer.layouts["blocks.1.mlp.router.weight"].replicas() == 4
        names = [sync.axis.name for sync in trainer.strategy.syncs]  # type: ignore[attr-defined]
        return list(trainer.parameters["blocks.1.mlp.experts.up"].shape), layout.replicas() == 2, names

    assert run_world(entry, 4) == [([2, 24, 32], True, ["grad", "grad_beside_ep"])] * 4


@pytest.mark.world(2)
def test_what_moves_is_what_the_page_says() -> None:
    """One layer with experts, two micro-batches: a rank's n k rows of d there and back, forward and backward, and its counts."""

    def entry(place: Place) -> list[int]:
        trainer = prepared(place, model=tiny.MOE, **EP2)
        axis = trainer.mesh.axis("ep")
        axis.traffic.clear()
        run_step(trainer, 0)
        return axis.traffic["all_to_all"]

    by_rank = run_world(entry, 2)
    micro, tokens, top_k, width, item = 2, 2 * tiny.CONTEXT, 2, 32, 4
    assert [calls for calls, _ in by_rank] == [micro * 5] * 2
    rows = 4 * tokens * top_k * width * item
    assert sum(moved for _, moved in by_rank) == 2 * micro * (rows + tiny.EXPERTS["num_experts"] * 8)  # type: ignore[operator]


@pytest.mark.world(2)
def test_every_rank_reports_each_term_and_perplexity_is_of_the_tokens_alone() -> None:
    """The same on one rank, on two that see other samples, and on two that share out experts."""

    def entry(place: Place, layout: dict[str, Any]) -> dict[str, float]:
        trainer = prepared(place, model=tiny.MOE, dtype="float64", steps=2, log_every=1, callbacks={}, **layout)
        return dict(trainer.fit().metrics)

    (alone,) = run_world(entry, 1, ({"micro_batch_size": 4},))
    assert alone["train/loss"] == pytest.approx(alone["train/loss_tokens"] + alone["train/loss_balance"], rel=1e-12)
    assert alone["val/loss"] == pytest.approx(alone["val/loss_tokens"] + alone["val/loss_balance"], rel=1e-12)
    assert alone["val/perplexity"] == pytest.approx(torch.tensor(alone["val/loss_tokens"]).exp().item(), rel=1e-6)
    assert alone["val/loss_balance"] >= 0.1
    for layout in ({"dp": 2, "micro_batch_size": 2}, EP2):
        for found in run_world(entry, 2, (layout,)):
            for name in ("train/loss_tokens", "train/loss_balance", "val/loss_tokens", "val/loss_balance", "train/grad_norm"):
                assert found[name] == pytest.approx(alone[name], rel=1e-10)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"model": tiny.GPT, **EP2}, "names none in its plan"),
        (
            {"model": tiny.MOE | {"experts": tiny.EXPERTS | {"num_experts": 3}}, **EP2},
            "3 experts of .* are not divisible",
        ),
        ({"model": CAPACITY, "cp": 2}, "gives a capacity to the first tokens of each sequence"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(layout: dict[str, Any], message: str) -> None:
    def entry(place: Place) -> bool:
        with pytest.raises(ConfigError, match=message):
            prepared(place, **layout)
        return True

    assert all(run_world(entry, 2))
