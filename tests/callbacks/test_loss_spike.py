"""The loss-spike guard: what it takes for a spike, what it does about it, and a roll-back that ends where it should."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from disttrain import build
from disttrain.callbacks.loss_spike import LossSpike
from disttrain.checkpoint.files import read_manifest
from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.step import Report, Verdict
from disttrain.parallel.strategy import Strategy
from disttrain.record import RunFolder
from disttrain.train.progress import Progress
from tests import tiny
from tests.callbacks.fakes import FakeTrainer, report


def drive(guard: LossSpike, losses: list[float], trainer: Any = None) -> list[set[Verdict]]:
    """What is asked for at each of these losses."""
    trainer = trainer or FakeTrainer()
    found = []
    for step, loss in enumerate(losses, start=1):
        asked = guard.judge_global(trainer, report(loss)).tolist()
        trainer.progress.step = step
        found.append({verdict for verdict in Verdict if asked[verdict] > 0})
    return found


STEADY = [2.0, 2.1, 1.9, 2.0, 2.05]


def test_a_jump_is_a_spike_and_noise_is_none() -> None:
    found = drive(LossSpike(min_steps=4, window=8), [*STEADY, 2.2, 9.0, 2.0, math.nan, 1.0])
    assert [number for number, asked in enumerate(found) if asked] == [6, 8]
    assert found[6] == {Verdict.SKIP}


def test_nothing_is_judged_before_there_is_enough_to_judge_by_but_a_nan() -> None:
    assert drive(LossSpike(min_steps=4, window=8), [2.0, 90.0, math.inf]) == [set(), set(), {Verdict.SKIP}]


def test_by_ratio_alone() -> None:
    guard = LossSpike(zscore=None, ratio=3.0, min_steps=4, window=8)
    assert drive(guard, [*STEADY, 5.9, 6.1])[-2:] == [set(), {Verdict.SKIP}]


def test_the_window_moves_with_a_loss_that_falls() -> None:
    guard = LossSpike(zscore=None, ratio=2.0, min_steps=2, window=3)
    assert drive(guard, [8.0, 7.0, 6.0, 3.0, 2.0, 1.5, 3.0, 4.5])[-2:] == [set(), {Verdict.SKIP}]


def test_one_spike_too_many_stops_with_a_reason() -> None:
    guard, trainer = LossSpike("roll_back", min_steps=2, window=8, max_roll_backs=2), FakeTrainer()
    asked = drive(guard, [*STEADY, 50.0, 60.0, 2.0, 70.0], trainer)
    rolls = {Verdict.SKIP, Verdict.ROLL_BACK}
    assert asked[5:] == [rolls, rolls, set(), {Verdict.SKIP, Verdict.STOP}]
    guard.on_log(trainer, {"train/loss": 2.0})
    assert trainer.progress.reasons == ["FAILED: the loss has jumped 3 times (callbacks.loss_spike.max_roll_backs)"]


def test_it_goes_on_with_the_window_it_had() -> None:
    whole, first, second = (LossSpike(min_steps=4, window=5) for _ in range(3))
    losses = [*STEADY, 2.2, 9.0, 1.9, 2.6, 9.0]
    drive(first, losses[:7])
    second.load_state_dict(first.state_dict())
    assert drive(second, losses[7:]) == drive(whole, losses)[7:]


@pytest.mark.parametrize("window", [3, 5, 16])
def test_another_window_goes_on_with_the_newest_losses(window: int) -> None:
    """Twelve losses seen through a window of five: the guard that goes on judges as one that saw the newest of these alone."""
    first = LossSpike(min_steps=2, window=5)
    losses = [50.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.2]
    drive(first, losses)
    second, alone = (LossSpike(zscore=None, ratio=1.5, min_steps=2, window=window) for _ in range(2))
    second.load_state_dict(first.state_dict())
    drive(alone, losses[-5:])
    tried = [9.0, 2.0, 2.4, 2.9, 1.1, 1.0, 2.2, 1.7]
    assert drive(second, tried) == drive(alone, tried)


def test_a_loss_below_zero_is_judged_by_its_distance_too() -> None:
    guard = LossSpike(zscore=None, ratio=3.0, min_steps=4, window=8)
    asked = drive(guard, [-1.0, -1.1, -1.2, -1.3, -1.35, -1.4, 0.9, 1.4])
    assert [bool(one) for one in asked] == [False] * 7 + [True]


def test_a_roll_back_needs_checkpoints() -> None:
    with pytest.raises(ConfigError, match="none is made on the way"):
        LossSpike("roll_back").on_fit_start(FakeTrainer())


def test_a_stop_that_comes_with_a_roll_back_follows_it() -> None:
    progress = Progress()
    asked = report().verdict
    asked[Verdict.STOP] = asked[Verdict.ROLL_BACK] = 1.0
    assert progress.settle(asked, drain=True) is Verdict.ROLL_BACK
    flags = progress.flags()
    assert flags is not None
    assert flags[Verdict.STOP] == 1.0


@pytest.mark.world(2)
def test_all_ranks_roll_back_and_go_on_past_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 7 jumps; the verdict comes a step late, at step 8, whose checkpoint is that of step 6 again."""
    folder = RunFolder.make(tmp_path)
    callbacks = {
        "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", "every": 2, "keep_last": None},
        "loss_spike": {"_target_": "disttrain.callbacks.loss_spike.LossSpike", "action": "roll_back", "min_steps": 3},
    }
    finish = Strategy.finish

    def jumps(self: Strategy, local: Any, step: Any, *rest: Any) -> Report:
        agreed = finish(self, local, step, *rest)
        if step.number == 7:
            agreed.losses = agreed.losses * 100.0
        return agreed

    monkeypatch.setattr(Strategy, "finish", jumps)

    def entry(place: Place) -> tuple[int, float]:
        trainer = build.build_trainer(tiny.config(dp=2, callbacks=callbacks, steps=10), folder, place)
        trainer.fit()
        return trainer.progress.step, float(trainer.update.updates)

    assert run_world(entry, 2) == [(10, 8.0)] * 2, "ten steps, of which the seventh and the eighth left no trace"

    def tensors(step: int) -> dict[str, str]:
        lines = read_manifest(folder.step_folder(step))
        return {line.path: line.crc32 for line in lines if line.path.endswith(".safetensors")}

    assert tensors(8) == tensors(6) != tensors(10)
