"""The window of `breakdown` is of steps alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from disttrain import build
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from tests import tiny

PAUSE = 0.1


class Slow(Callback):
    """Takes its time over evaluations and saves."""

    def on_validation_start(self, trainer: Any) -> None:
        time.sleep(PAUSE)

    def due(self, trainer: Any, number: int) -> set[str]:
        return {"save"}

    def on_save_checkpoint(self, trainer: Any, state: Any) -> None:
        time.sleep(PAUSE)


def columns(folder: Path, **callbacks: Any) -> list[dict[str, list[float]]]:
    """By rank, what the window of a run that evaluates after each step has seen."""
    breakdown = {"_target_": "disttrain.callbacks.breakdown.Breakdown", "start": 1, "steps": 2}
    config = tiny.config(dp=2, callbacks={"breakdown": breakdown, **callbacks}, eval_every=1, steps=4)

    def entry(place: Place) -> None:
        build.build_trainer(config, RunFolder(folder), place).fit()

    run_world(entry, 2)
    return [rank["columns"] for rank in json.loads((folder / "breakdown.json").read_text())["ranks"]]


@pytest.mark.world(2)
def test_evaluations_and_saves_are_of_no_step(tmp_path: Path) -> None:
    for own in columns(tmp_path, slow={"_target_": "tests.callbacks.test_breakdown.Slow"}):
        assert fmean(own["aside"]) >= 2 * PAUSE
        assert fmean(own["step"]) < PAUSE
        parts = sum(fmean(own[phase]) for phase in ("forward_backward", "finish", "update", "between"))
        assert fmean(own["step"]) == pytest.approx(parts, abs=1e-6)  # columns are rounded
        assert not [name for name in own if name.endswith("/aside")]
        assert "exposed/world/finish" in own
        assert "exposed/world/between" not in own  # an evaluation's sums


@pytest.mark.parametrize(("num_steps", "first", "steps"), [(1, 1, 1), (4, 2, 3), (7, 3, 5), (9, 4, 5)])
def test_a_run_too_short_for_the_window_has_it_earlier(tmp_path: Path, num_steps: int, first: int, steps: int) -> None:
    """Three steps, then five, where the run has as many; the first step of all is left out where there is another."""
    breakdown = {"_target_": "disttrain.callbacks.breakdown.Breakdown", "start": 3, "steps": 5}
    config = tiny.config(callbacks={"breakdown": breakdown}, steps=num_steps)
    run_world(lambda place: build.build_trainer(config, RunFolder(tmp_path), place).fit() and None, 1)
    found = json.loads((tmp_path / "breakdown.json").read_text())
    assert (found["first_step"], found["steps"]) == (first, steps)
