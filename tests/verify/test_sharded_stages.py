"""Pipeline stages whose weights are shared out: every schedule computes what one device computes, and weights cross once a step."""

from __future__ import annotations

from typing import Any

import pytest

from disttrain.config.schedules import SCHEDULES
from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.verify import verb
from tests import tiny
from tests.parallel.ranks import prepared, run_step

WARM = ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"]
LLAMA = tiny.LLAMA | {"num_layers": 4}
TIED = tiny.GPT | {"num_layers": 4}
UNBROKEN = {"steps": 2, "shrink": False}
"""Four micro-batches stay four."""


def layout(schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"pp": 2, "shard": 2, "micro_batch_size": 1, "strategy": {"schedule": schedule, "zero": 1}} | more


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", [pytest.param(name, marks=() if name in ("1f1b", "zbv") else pytest.mark.long) for name in SCHEDULES])
def test_every_schedule_over_sharded_stages_is_equal_to_one_device(schedule: str) -> None:
    proof = verb.prove(tiny.config(**layout(schedule), model=LLAMA, verify=UNBROKEN))
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.long
@pytest.mark.world(8)
@pytest.mark.parametrize("more", [{"tp": 2}, {"dp": 2, "global_batch_size": 16}, {"cp": 2}], ids=["tp", "replicas", "cp"])
def test_sharded_stages_beside_another_axis(more: dict[str, Any]) -> None:
    proof = verb.prove(tiny.config(**layout(**more), model=LLAMA, verify=UNBROKEN))
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.world(4)
def test_tied_weights_on_two_ranks_are_shared_out_on_each() -> None:
    proof = verb.prove(tiny.config(**layout(), model=TIED, verify=UNBROKEN))
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.world(4)
def test_tied_weights_in_two_stages_of_one_rank_are_refused() -> None:
    with pytest.raises(UserError, match=r"'tokens.weight' stands in two pipeline stages of one rank.*zbv"):
        run_ranks(lambda place: prepared(place, **layout("zbv"), model=TIED), 4, warm=WARM)


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_weights_and_gradients_cross_once_a_step(schedule: str) -> None:
    """All bytes of a rank's stages (rows divide here), whatever the four micro-batches."""

    def traffic(place: Place) -> tuple[dict[str, list[int]], int, int]:
        trainer = prepared(place, **layout(schedule), model=LLAMA)
        run_step(trainer, 0)  # what crosses the border is seen in a forward of its own
        axis = trainer.mesh.axis("dp_shard")
        axis.traffic.clear()
        for parameter in trainer.parameters.values():
            parameter.grad = None
        run_step(trainer, 1)
        units = sum(len(sync._units) for sync in trainer.strategy.syncs)  # type: ignore[attr-defined]
        return axis.traffic, units, 2 * sum(parameter.nbytes for parameter in trainer.parameters.values())

    for found, units, nbytes in run_ranks(traffic, 4, warm=WARM):
        assert {kind: bytes_ for kind, (_, bytes_) in found.items()} == {"all_gather": nbytes, "reduce_scatter": nbytes}
        assert all(calls <= units for calls, _ in found.values()), "a unit without parameters sends nothing"
