"""The replica check: one changed bit on one rank is named, and what differs by right is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from disttrain.callbacks.replicas import digest
from disttrain.data.dataset import Position
from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.step import Report
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import WARM, trainer_of, world_size

CHECK = {"replica_check": {"_target_": "disttrain.callbacks.replica_check.ReplicaCheck", "every": 2}}


class Flips(Callback):
    """Changes the last bit of one number of `name`, on one rank, after step 2."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if trainer.mesh.rank == 1 and trainer.progress.step == 2:
            trainer.parameters[self.name].detach().view(torch.int32).view(-1)[3] ^= 1


@pytest.mark.world(2)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_flipped_bit_on_one_rank_is_named(axis: str) -> None:
    name = "blocks.1.mlp_norm.weight"
    flips = {"flips": {"_target_": "tests.callbacks.test_replica_check.Flips", "name": name}}

    def entry(place: Place) -> None:
        trainer_of(place, flips | CHECK, steps=4, model=tiny.GPT, **{axis: 2}).fit()

    with pytest.raises(WorldError, match=f"at step 2 ranks 1 and 0 hold different values of '{name}'"):
        run_world(entry, 2)


@pytest.mark.world(2)
def test_parts_that_differ_by_right_are_no_fault() -> None:
    def entry(place: Place) -> int:
        trainer = trainer_of(place, CHECK, steps=4, tp=2)
        trainer.fit()
        return trainer.progress.step

    assert run_world(entry, 2) == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_changed_element_and_any_swap_changes_the_digest(dtype: torch.dtype) -> None:
    x = torch.arange(12).to(dtype).view(3, 4)
    found = {digest(x), digest(x.flip(0)), digest(x.view(4, 3).t().contiguous())}
    for place in range(12):
        changed = x.clone()
        changed.view(-1)[place] += 1
        found.add(digest(changed))
    assert len(found) == 3 + 12
    assert digest(x.t()) == digest(x.t().contiguous())


# --- debug=sync -----------------------------------------------------------------------------------------------------------

SYNC = {
    "replica_check": {
        "_target_": "disttrain.callbacks.replica_check.ReplicaCheck",
        "every": 1,
        "what": ["batches", "random", "gradients", "weights"],
    }
}
LAYOUTS = {
    "ddp": {"dp": 2},
    "fsdp": {"shard": 2},
    "hsdp": {"dp": 2, "shard": 2},
    "tp": {"tp": 2, "model": tiny.GPT | {"dropout": 0.1}},
    "sequence": {"tp": 2, "sequence_parallel": True, "model": tiny.GPT | {"dropout": 0.1}},
    "pp": {"pp": 2, "micro_batch_size": 2},
    "hybrid": {"dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2},
    "cp": {"cp": 2},
    "ep": {"shard": 2, "ep": 2, "model": tiny.MOE, "strategy": {"zero": 1}},
    "local sgd": {"dp": 2, "strategy": {"sync_every": 2}},
    "compressed": {"dp": 2, "strategy": {"compression": "bf16"}},
}


def fault_of(faults: Mapping[str, Any], **config: Any) -> str:
    """What a run with these callbacks ends with; empty if it ends well."""

    def entry(place: Place) -> None:
        trainer_of(place, dict(faults) | SYNC, steps=3, **config).fit()

    try:
        run_world(entry, world_size(config), warm=WARM if config.get("shard", 1) > 1 else ())
    except WorldError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_run_passes_every_comparison(layout: str) -> None:
    assert fault_of({}, **LAYOUTS[layout]) == ""


class Spoils(Callback):
    """Spoils something on one rank in step 2: after backward, after the update, before forward, or in the stream of random numbers."""

    def __init__(self, what: str, rank: int = 1, name: str = "blocks.1.mlp_norm.weight") -> None:
        self.what, self.rank, self.name = what, rank, name

    def on_train_step_start(self, trainer: Trainer) -> None:
        if self._is_now(trainer, "batch", 1) and trainer.step is not None:
            trainer.step.micro[0].inputs[0, 0] += 1
        if self._is_now(trainer, "numbers", 1) and trainer.step is not None:
            whole = trainer.feed.order.global_batch(Position(trainer.progress.epoch, trainer.progress.step_in_epoch))
            own = trainer.step.micro[0].indices
            own[0] = next(number for number in [*whole.tolist(), 63, 0] if number not in own)

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        if self._is_now(trainer, "gradient", 1):
            grad = trainer.parameters[self.name].grad
            assert grad is not None
            grad.view(-1)[0] += 0.5
        if self._is_now(trainer, "missing", 1):
            trainer.parameters[self.name].grad = None
        if self._is_now(trainer, "random", 1):
            torch.rand(1)

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if self._is_now(trainer, "weight", 2):
            trainer.parameters[self.name].detach().view(-1)[0] += 1e-7

    def _is_now(self, trainer: Trainer, what: str, step: int) -> bool:
        return self.what == what and trainer.mesh.rank == self.rank and trainer.progress.step == step


@pytest.mark.parametrize(
    ("what", "config", "words"),
    [
        (
            "gradient",
            {"dp": 2},
            ("different gradients of 'blocks.1.mlp_norm.weight'", "over dp_replicate", "difference 0.5", "not synchronised"),
        ),
        ("missing", {"dp": 2}, ("different gradients of 'blocks.1.mlp_norm.weight'", "not synchronised")),
        ("gradient", {"tp": 2}, ("different gradients of 'blocks.1.mlp_norm.weight'", "equal over tp", "strategy.plan")),
        ("gradient", {"dp": 2, "shard": 2}, ("ranks 3 and 1 hold different gradients", "over dp_replicate", "not synchronised")),
        ("weight", {"cp": 2}, ("different values of 'blocks.1.mlp_norm.weight'", "rounding", "debug=deterministic")),
        ("batch", {"tp": 2}, ("ranks 0 and 1 read the same samples, and hold different ones",)),
        ("numbers", {"dp": 2}, ("both train on sample",)),
        ("numbers", {"pp": 2, "micro_batch_size": 2}, ("have one data index and read different samples",)),
        ("random", {"tp": 2}, ("random streams of ranks 0 and 1", "drifted apart")),
    ],
)
def test_the_first_difference_ends_the_run_and_is_named(what: str, config: dict[str, Any], words: tuple[str, ...]) -> None:
    found = fault_of({"spoils": {"_target_": "tests.callbacks.test_replica_check.Spoils", "what": what}}, **config)
    assert found.count("at step 2") == 1
    for word in words:
        assert word in found
