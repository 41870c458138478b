"""Checkpoints go into and out of DeepSpeed's engine: weights, moments that its ranks share out, counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from disttrain.checkpoint.save import save
from disttrain.errors import CheckpointError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.models.task import Regression
from disttrain.train.state import load_weights, restore, state_of
from tests import tiny
from tests.parallel.test_deepspeed import COMMON, PATIENT, engine, needs_deepspeed, run
from tests.train.runs import notes_of, trainer_of

RunWorld = Callable[..., list[Any]]


@pytest.mark.long
@needs_deepspeed
@pytest.mark.parametrize(
    ("before", "after"),
    [(engine(1), engine(1)), (engine(2), engine(0)), (engine(2), {}), ({"dp": 2}, engine(2)), (engine(0), {"shard": 2})],
    ids=["same", "stage 2 to 0", "engine to one rank", "ddp to engine", "engine to fsdp"],
)
def test_a_checkpoint_goes_into_and_out_of_the_engine(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "step-3"

    def first_half(place: Place) -> None:
        trainer = trainer_of(place, **COMMON | before | {"steps": 6})
        trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 3 else ()))
        trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 3 else None)
        trainer.fit()

    def second_half(place: Place) -> list[dict[str, float]]:
        trainer = trainer_of(place, **COMMON | after | {"steps": 6, "micro_batch_size": 2 if after else 4})
        assert restore(trainer, folder) == []
        trainer.fit()
        return notes_of(trainer).rows

    run_ranks(first_half, 2, **PATIENT)
    size = 2 if after else 1
    (whole, *_) = run_ranks(lambda place: run(place, **after | {"steps": 6, "micro_batch_size": 2 if after else 4}), size, **PATIENT)
    for part in run_ranks(second_half, size, **PATIENT):
        for row, wanted in zip(part, whole[3:], strict=True):
            assert row == (wanted if before == after else pytest.approx(wanted, rel=2e-6))


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
def test_weights_alone_can_be_taken_up_and_counts_that_differ_are_refused(tmp_path: Path, run_world: RunWorld) -> None:
    """The engine updates a copy of the weights: it must hear of those that are loaded."""
    folder = tmp_path / "step-2"

    def write(place: Place) -> None:
        trainer = trainer_of(place, **COMMON | {"steps": 2})
        trainer.fit()
        save(state_of(trainer), folder, trainer.mesh)

    def go_on(place: Place, **config: Any) -> list[float]:
        trainer = trainer_of(place, **COMMON | config | {"steps": 2, "seed": 7})
        load_weights(trainer, folder)
        trainer.fit()
        return notes_of(trainer).column("train/loss")

    def uneven(place: Place) -> str:
        trainer = trainer_of(place, **COMMON | engine(1) | {"steps": 2})
        trainer.fit()
        moments = {
            name.removeprefix("optimizer/"): x for name, (x, _) in state_of(trainer).tensors.items() if name.startswith("optimizer/")
        }
        next(x for name, x in moments.items() if name.endswith("norm.weight/step")).add_(1)
        with pytest.raises(CheckpointError) as refused:
            trainer.update.load_tensors(moments)
        return str(refused.value)

    run_ranks(write, 1)
    (wanted,) = run_ranks(lambda place: go_on(place, micro_batch_size=4), 1)
    for found in run_world(lambda place: go_on(place, **engine(1)), **PATIENT):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert all("counts one for all" in said for said in run_world(uneven, **PATIENT))


class Bare(nn.Module):
    """Matrices only: the group of parameters without weight decay is empty, and the engine takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Regression()
        self.up = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
def test_a_group_without_parameters_is_kept_for_other_layouts(tmp_path: Path, run_world: RunWorld) -> None:
    folder = tmp_path / "step-2"
    bare: dict[str, Any] = {"model": {"_target_": "tests.checkpoint.test_deepspeed.Bare"}, "dataset": tiny.VECTORS, "callbacks": {}}

    def half(place: Place, **config: Any) -> list[float]:
        trainer = trainer_of(place, **COMMON | bare | {"steps": 4} | config)
        if folder.exists():
            restore(trainer, folder)
        trainer.fit()
        return notes_of(trainer).column("train/loss")

    def write(place: Place) -> None:
        trainer = trainer_of(place, **COMMON | bare | {"steps": 4})
        trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 2 else ()))
        trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 2 else None)
        trainer.fit()

    run_ranks(write, 1)
    (wanted,) = run_ranks(lambda place: half(place, micro_batch_size=4), 1)
    for found in run_world(lambda place: half(place, **engine(1)), **PATIENT):
        assert found == pytest.approx(wanted, rel=1e-6)
