"""A stop signal at any moment: ranks save at one step, leave inside the grace time, and nothing is lost (B05, B07, B13)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from disttrain.checkpoint.load import latest_good
from disttrain.config.schema import Config
from disttrain.data.synthetic import Synthetic
from disttrain.launch import job
from disttrain.launch.environment import Environment
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.launch.processes import exit_code, fork_owner, sign_in, signed_in

SECONDS_A_BATCH = 0.3


class Moment(Callback):
    """Tells when this rank is there."""

    def __init__(self, into: str, at: str) -> None:
        self.into, self.at = Path(into), at

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.at == "warm-up":
            sign_in(self.into)
            time.sleep(2.0)

    def on_train_step_start(self, trainer: Trainer) -> None:
        if self.at == "training" and trainer.progress.step == 1:
            sign_in(self.into)

    def on_validation_start(self, trainer: Trainer) -> None:
        if self.at == "evaluation":
            sign_in(self.into)


class SlowToValidate(Synthetic):
    """A minute of validation."""

    def validation(self) -> Any:
        split = super().validation()
        batch = split.batch

        def slow(indices: Tensor, seeds: Tensor) -> Any:
            time.sleep(SECONDS_A_BATCH)
            return batch(indices, seeds)

        split.batch = slow
        return split


def config_of(into: Path, at: str, steps: int) -> Config:
    callbacks = {
        "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint"},
        "jsonl": {"_target_": "disttrain.callbacks.jsonl.JSONL"},
        "moment": {"_target_": "tests.launch.test_moments.Moment", "into": str(into), "at": at},
    }
    data = tiny.TOKENS | ({"_target_": "tests.launch.test_moments.SlowToValidate", "num_validation": 1600} if at == "evaluation" else {})
    return tiny.config(dp=2, callbacks=callbacks, dataset=data, steps=steps, eval_every=2 if at == "evaluation" else None, log_every=1)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("at", "number", "steps"),
    [
        ("warm-up", signal.SIGTERM, 10_000),
        ("training", signal.SIGUSR1, 10_000),
        ("evaluation", signal.SIGTERM, 4),
        ("evaluation", signal.SIGINT, 2),
    ],
)
def test_all_ranks_save_at_one_step_and_leave(at: str, number: signal.Signals, steps: int, tmp_path: Path) -> None:
    into = tmp_path / "there"
    into.mkdir()
    made = job.Job(config_of(into, at, steps), "disttrain.build:train", outputs=tmp_path / "outputs")
    owner = fork_owner(lambda: job.run(made, Environment("alone")).exit_code)
    signed_in(into, 2, seconds=60)
    os.kill(owner, number)
    assert exit_code(owner) == (130 if number == signal.SIGINT else 143)
    (path,) = (tmp_path / "outputs").glob("*/*")
    result = RunFolder(path).result()
    assert result["reason"] in (number.name, f"stopped by {number.name}")
    checkpoint = latest_good(path).folder
    assert checkpoint is not None
    assert checkpoint.name == f"step-{result['step']}"
    rows = RunFolder(path).read()
    assert not any("val/loss" in row for row in rows), "an evaluation that was cut short is no measurement"
    if at == "evaluation":
        assert '"owes_evaluation": true' in (checkpoint / "state.json").read_text()
        assert result["step"] == 2
    if at == "warm-up":
        assert result["step"] <= 2


@pytest.mark.world(2)
def test_an_evaluation_that_was_cut_short_is_made_first_when_the_run_goes_on(tmp_path: Path) -> None:
    """The rows are the unbroken run's, none lost, none twice."""
    into = tmp_path / "there"
    into.mkdir()
    config = config_of(into, "evaluation", steps=3)
    config.dataset["num_validation"] = 64
    made = job.Job(config, "disttrain.build:train", outputs=tmp_path / "outputs")
    owner = fork_owner(lambda: job.run(made, Environment("alone")).exit_code)
    signed_in(into, 2, seconds=60)
    os.kill(owner, signal.SIGTERM)
    assert exit_code(owner) == 143
    (path,) = (tmp_path / "outputs").glob("*/*")
    config.resume = str(path)
    assert job.run(job.Job(config, made.entry, resume=path), Environment("alone")).exit_code == 0
    unbroken = job.run(job.Job(config_of(into, "never", 3), made.entry, outputs=tmp_path / "other"), Environment("alone"))
    assert unbroken.folder is not None
    rows, wanted = RunFolder(path).read(), RunFolder(unbroken.folder).read()
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 3]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [row["train/loss"] for row in wanted]


def slow_to_prepare(config: Config) -> None:
    sign_in(Path(config.paths.data))
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_before_there_are_ranks_it_ends_at_once_and_says_so(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny.config(dp=2)
    config.paths.data = str(tmp_path / "data")
    (tmp_path / "data").mkdir()
    made = job.Job(config, "disttrain.build:train", prepare="tests.launch.test_moments:slow_to_prepare", outputs=tmp_path / "outputs")
    owner = fork_owner(lambda: job.run(made, Environment("alone")).exit_code)
    signed_in(tmp_path / "data", 1)
    os.kill(owner, number)
    assert exit_code(owner) == 143
    (path,) = (tmp_path / "outputs").glob("*/*")
    assert RunFolder(path).result()["reason"] == f"{number.name}: before the ranks started"
    assert "its state was not saved: callbacks has no checkpoint" in capfd.readouterr().err
