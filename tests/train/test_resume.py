"""A restored run goes on as if it had never stopped, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain.checkpoint.save import save
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.train.state import restore, state_of
from tests import tiny
from tests.train.runs import EVERY_STEP, notes_of, rows, trainer_of

RunWorld = Callable[..., list[Any]]
THREE_A_EPOCH = tiny.TOKENS | {"num_samples": 24, "num_validation": 5, "uneven": True}


def unbroken(place: Place, folder: Path, **config: Any) -> None:
    """Eight steps, three an epoch; the fourth is saved."""
    trainer = trainer_of(place, **config)
    trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 4 else ()))
    trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 4 else None)
    trainer.fit()


def resumed_run(place: Place, folder: Path, **config: Any) -> list[dict[str, float]]:
    trainer = trainer_of(place, **config)
    notes = restore(trainer, folder)
    assert notes == []
    assert trainer.progress.step == 4
    trainer.fit()
    return notes_of(trainer).rows


COMMON: dict[str, Any] = {
    "steps": 8,
    "dataset": THREE_A_EPOCH,
    "dtype": "float64",
    "scheduler": {"_target_": "disttrain.train.optimizer.Cosine", "warmup_steps": 5},
    **EVERY_STEP,
}


@pytest.mark.world(2)
@pytest.mark.parametrize("optimizer", [tiny.ADAMW, tiny.SGD | {"momentum": 0.9}], ids=["adamw", "momentum"])
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), ({"tp": 2}, {"tp": 2}), ({"tp": 2, "sequence_parallel": True}, {"dp": 2}), ({"dp": 2}, {}), ({}, {"tp": 2})],
    ids=["same", "same tp", "tp to ddp", "ddp to one", "one to tp"],
)
def test_a_restored_run_goes_on_as_if_unbroken_in_any_layout(
    before: dict[str, Any], after: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "step-4"
    config = COMMON | {"optimizer": optimizer}
    run_ranks(lambda place: unbroken(place, folder, **config, **before), before.get("dp", 1) * before.get("tp", 1))
    whole = rows(**config, **after)
    resumed = run_ranks(lambda place: resumed_run(place, folder, **config, **after), after.get("dp", 1) * after.get("tp", 1))
    for part, wanted_rows in zip(resumed, whole, strict=True):
        assert [row["step"] for row in part] == [5, 6, 7, 8]
        for row, wanted in zip(part, wanted_rows[4:], strict=True):
            assert row == (wanted if before == after else pytest.approx(wanted, rel=1e-11))


@pytest.mark.world(2)
def test_state_holds_each_moment_as_its_parameter_lies(run_world: RunWorld) -> None:
    def entry(place: Place) -> dict[str, bool]:
        trainer = trainer_of(place, tp=2, steps=1)
        trainer.fit()
        state = state_of(trainer)
        moments = {name: held for name, held in state.tensors.items() if name.startswith("optimizer/") and name.endswith("exp_avg")}
        assert len(moments) == len(trainer.parameters)
        return {name: layout == trainer.layouts[name.split("/")[1]] for name, (_, layout) in moments.items()}

    assert all(all(part.values()) for part in run_world(entry))
