"""The loop: hooks in their order, verdicts that all ranks follow together, evaluation, and going on from a saved state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from disttrain.checkpoint.state import State
from disttrain.data.dataset import Position
from disttrain.errors import ConfigError
from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel.step import Report, Verdict
from disttrain.train.assembly import check
from disttrain.train.batch import train_positions
from disttrain.train.hooks import Callback, StepPolicy
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import EVERY_STEP, curve, notes_of, rows, trainer_of

RunWorld = Callable[..., list[Any]]


class Diary(StepPolicy):
    """Writes down each hook as it fires."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _writes(name: str) -> Callable[..., None]:
    def hook(self: Diary, trainer: Trainer, *arguments: Any) -> None:
        self.events.append(f"{name.removeprefix('on_')} {trainer.progress.step}")

    return hook


for _name in sorted(Callback.HOOKS):
    setattr(Diary, _name, _writes(_name))
Diary.judge = _writes("judge")  # type: ignore[assignment]
Diary.judge_global = _writes("judge_global")  # type: ignore[assignment]
Diary.after_update = _writes("after_update")  # type: ignore[assignment]

DIARY = {"diary": {"_target_": "tests.train.test_loop.Diary"}}
THREE_A_EPOCH = tiny.TOKENS | {"num_samples": 24, "num_validation": 5}


def test_hooks_fire_in_the_order_that_is_drawn() -> None:
    def events(place: Place) -> list[str]:
        trainer = trainer_of(place, DIARY, steps=4, dataset=THREE_A_EPOCH, log_every=2)
        trainer.fit()
        return trainer.callbacks["diary"].events  # type: ignore[attr-defined, no-any-return]

    def step(number: int) -> list[str]:
        taken = number - 1
        before = ["train_step_start", "judge", "judge_global", "before_optimizer_step", "after_update"]
        return [*(f"{name} {taken}" for name in before), f"train_step_end {number}"]

    (found,) = run_ranks(events, 1)
    assert found == [
        *("fit_start 0", "train_epoch_start 0"),
        *(*step(1), "log 1"),
        *(*step(2), "log 2"),
        *(*step(3), "log 3", "train_epoch_end 3"),
        "train_epoch_start 3",
        *(*step(4), "validation_start 4", "validation_end 4", "log 4", "save_checkpoint 4", "fit_end 4"),
    ]


class Asks(Callback):
    """Asks for something at one step on one rank, and notes where the run was saved and evaluated."""

    def __init__(self, verdict: str = "GO", step: int = -1, rank: int = 0, due: Mapping[int, list[str]] | None = None) -> None:
        self.verdict, self.step, self.rank = Verdict[verdict], step, rank
        self.at = dict(due or {})
        self.saved: list[int] = []
        self.evaluated: list[int] = []

    def on_train_step_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step and trainer.mesh.rank == self.rank:
            trainer.progress.request(self.verdict, "the test wants it")

    def due(self, trainer: Trainer, step: int) -> frozenset[str]:
        return frozenset(self.at.get(step, ()))

    def on_save_checkpoint(self, trainer: Trainer, state: State) -> None:
        self.saved.append(trainer.progress.step)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.evaluated.append(trainer.progress.step)


def asks(**arguments: Any) -> dict[str, Any]:
    return {"asks": {"_target_": "tests.train.test_loop.Asks", **arguments}}


def followed(place: Place, callbacks: dict[str, Any], **config: Any) -> tuple[str, str, int, list[int], list[int]]:
    trainer = trainer_of(place, callbacks, **{"steps": 8, "log_every": 100} | config)
    result = trainer.fit()
    mine = trainer.callbacks["asks"]
    assert isinstance(mine, Asks)
    return result.status, result.reason, result.step, mine.saved, mine.evaluated


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=["ddp", "tp"])
def test_a_stop_asked_for_by_one_rank_ends_all_at_the_same_step(layout: dict[str, int], run_world: RunWorld) -> None:
    """Asked for in step 3, known one step late, saved, not evaluated; every rank has the reason."""
    found = run_world(lambda place: followed(place, asks(verdict="STOP", step=2, rank=1), **layout))
    assert found == [("stopped", "the test wants it", 4, [4], [])] * 2


@pytest.mark.world(2)
def test_a_save_asked_for_by_one_rank_is_made_by_all_and_the_run_goes_on(run_world: RunWorld) -> None:
    found = run_world(lambda place: followed(place, asks(verdict="SAVE", step=2, rank=1), dp=2))
    assert found == [("done", "", 8, [4, 8], [8])] * 2


@pytest.mark.world(2)
def test_what_is_due_happens_at_its_very_step(run_world: RunWorld) -> None:
    due = {3: ["save"], 5: ["evaluate", "save"], 6: ["evaluate"]}
    found = run_world(lambda place: followed(place, asks(due=due), dp=2, eval_every=4))
    assert found == [("done", "", 8, [3, 5, 8], [4, 5, 6, 8])] * 2


def test_a_stop_is_settled_before_a_save_that_is_due_at_the_same_step() -> None:
    """A due save drains the verdict, so the run is saved once and stops there."""
    (found,) = run_ranks(lambda place: followed(place, asks(verdict="STOP", step=2, due={3: ["save"]})), 1)
    assert found == ("stopped", "the test wants it", 3, [3], [])


def test_a_stop_in_the_last_step_is_a_finished_run() -> None:
    (found,) = run_ranks(lambda place: followed(place, asks(verdict="STOP", step=7)), 1)
    assert found == ("done", "", 8, [8], [8])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": "a"}, "train.steps=a is not allowed: it takes a whole number or null"),
        ({"steps": 2.5}, "train.steps=2.5 is not allowed"),
        ({"steps": 2, "global_batch_size": 0}, "train.global_batch_size=0 must be more than zero"),
        ({"steps": 2, "log_every": None}, "train.log_every=null is not allowed: it takes a whole number"),
        ({"steps": 2, "clip_norm": -1.0}, "train.clip_norm=-1.0 must be more than zero"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_answered_as_in_a_config(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Trainer(torch.nn.Linear(2, 2), [], **settings)


def test_numbers_of_numpy_are_settings() -> None:
    check(np.int64(5), None, np.int32(8), np.float32(1.0), 1, None)


@pytest.mark.world(2)
def test_a_signal_stops_all_ranks_and_is_the_reason(run_world: RunWorld) -> None:
    def entry(place: Place) -> tuple[str, str, int]:
        trainer = trainer_of(place, dp=2, steps=8)
        trainer._stop_requested = lambda: "SIGTERM" if trainer.progress.step == 3 and place.rank == 1 else None
        result = trainer.fit()
        return result.status, result.reason, result.step

    assert run_world(entry) == [("stopped", "SIGTERM", 5)] * 2


@pytest.mark.world(2)
def test_the_rank_that_raises_tells_its_callbacks(run_world: RunWorld, tmp_path: Path) -> None:
    def entry(place: Place) -> None:
        trainer = trainer_of(place, dp=2, steps=8)
        trainer._on["on_exception"].append(lambda t, error: (tmp_path / f"{place.rank}").write_text(f"{type(error).__name__} {error}"))

        def fail(t: Trainer) -> None:
            if place.rank == 1 and t.progress.step == 3:
                raise RuntimeError("planted")

        trainer._on["on_train_step_start"].append(fail)
        trainer.fit()

    with pytest.raises(WorldError, match="rank 1 failed: RuntimeError: planted"):
        run_world(entry)
    assert (tmp_path / "1").read_text() == "RuntimeError planted"


class Measures(Callback):
    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        return {"mine": float(trainer.mesh.rank * 10), "other": 1.0}

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        return {"twice": 2 * row["mine_max"]}


@pytest.mark.world(4)
def test_every_ranks_measures_are_in_the_row() -> None:
    by_rank = rows(dp=2, tp=2, steps=2, callbacks={"measures": {"_target_": "tests.train.test_loop.Measures"}}, log_every=2)
    for part in by_rank:
        (row,) = (row for row in part if row["step"] == 2)
        assert (row["mine"], row["mine_min"], row["mine_max"], row["twice"], row["other"]) == (15.0, 0.0, 30.0, 60.0, 1.0)
        assert row["train/targets"] == 8 * tiny.CONTEXT


class Doubled(Callback):
    """Offers twice the weights as a second set."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self.parameters = trainer.parameters

    def weight_sets(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"doubled": {name: 2 * parameter.detach() for name, parameter in self.parameters.items()}}


@pytest.mark.world(2)
def test_a_second_set_of_weights_is_evaluated_and_the_own_ones_come_back(run_world: RunWorld) -> None:
    def entry(place: Place) -> list[float]:
        trainer = trainer_of(place, {"doubled": {"_target_": "tests.train.test_loop.Doubled"}}, tp=2, steps=2)
        result = trainer.fit()
        again = trainer.evaluate()
        with torch.no_grad():
            for parameter in trainer.parameters.values():
                parameter.mul_(2)
        by_hand = trainer.evaluate()
        assert trainer.model.training
        return [result.metrics["val/loss"], again["val/loss"], result.metrics["val/loss_doubled"], by_hand["val/loss"]]

    for own, again, doubled, by_hand in run_world(entry):
        assert own == again != doubled
        assert doubled == pytest.approx(by_hand, rel=1e-6)


# --- overfit --------------------------------------------------------------------------------------------------------------


def test_overfit_takes_the_first_batch_again_and_again() -> None:
    def entry(place: Place) -> tuple[list[list[int]], list[float]]:
        trainer = trainer_of(place, steps=30, optimizer=tiny.ADAMW | {"lr": 1e-2}, clip_norm=1.0, **EVERY_STEP)
        trainer.overfit = True
        steps = trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 12, fixed=True))
        indices = [step.micro[0].indices.tolist() for step in steps]
        trainer.fit()
        return indices, notes_of(trainer).column("train/loss")

    ((indices, losses),) = run_ranks(entry, 1)
    assert indices == [indices[0]] * 12
    assert losses[-1] < 0.5 * losses[0]


def test_another_batch_size_is_another_experiment_and_epochs_are_counted() -> None:
    assert curve(steps=3, global_batch_size=4) != curve(steps=3, global_batch_size=8)
    ((*_, last),) = rows(steps=None, epochs=2, dataset=THREE_A_EPOCH, **EVERY_STEP)
    assert (last["step"], last["epoch"]) == (6, 1)


@pytest.mark.world(2)
def test_a_report_is_the_same_on_every_rank(run_world: RunWorld) -> None:
    """M16, M20: loss, norm and counts of each step, under data and tensor parallelism."""

    def entry(place: Place, layout: dict[str, int]) -> list[list[float]]:
        trainer = trainer_of(place, steps=3, **layout)
        seen: list[list[float]] = []

        def note(t: Trainer, report: Report) -> None:
            seen.append([float(report.loss), float(report.grad_norm), float(report.counts.sum()), float(report.skip)])

        trainer._on["on_train_step_end"].append(note)
        trainer.fit()
        return seen

    for layout in ({"dp": 2}, {"tp": 2}):
        first, second = run_world(entry, layout)
        assert first == second
        assert len(first) == 3
