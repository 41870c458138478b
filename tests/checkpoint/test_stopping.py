"""A run that is asked to stop saves where it stops, if it is given the time; if not, what it saved before is still there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from disttrain import build
from disttrain.checkpoint import files
from disttrain.checkpoint.load import latest_good
from disttrain.launch.place import Place
from disttrain.launch.world import supervise
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from tests import tiny
from tests.launch.processes import exit_code, fork_owner, sign_in, signed_in, still_alive


class SignsIn(Callback):
    """Leaves its process's id once the run has a checkpoint; steps are slow enough to be stopped between."""

    def __init__(self, into: str) -> None:
        self.into = into

    def on_train_step_start(self, trainer: Any) -> None:
        time.sleep(0.3 if trainer.progress.step < 6 else 0.02)  # the first checkpoint is sealed before a later one blocks the loop
        if trainer.progress.step > 2 and files.steps_in(trainer.folder.checkpoints) and not (Path(self.into) / str(os.getpid())).exists():
            sign_in(Path(self.into))


def run_slow(place: Place, folder: Path, seconds: float) -> int:
    """A long run whose writer takes `seconds` a file after its first checkpoint; the step that it stops at."""
    plain = files.write_blocks

    def slow(path: Path, root: Path, blocks: files.Blocks) -> files.Entry:
        if ".step-2." not in str(path) and path.suffix == ".safetensors":
            time.sleep(seconds)
        return plain(path, root, blocks)

    files.write_blocks = slow  # in this rank's process only
    callbacks = {
        "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", "every": 2, "keep_last": None},
        "signs_in": {"_target_": "tests.checkpoint.test_stopping.SignsIn", "into": str(folder / "here")},
    }
    trainer = build.build_trainer(tiny.config(dp=2, steps=100_000, callbacks=callbacks), RunFolder(folder), place)
    step = trainer.fit().step
    (folder / f"rank-{place.rank}").write_text(str(step))
    return step


@pytest.mark.world(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_with_time_enough_all_ranks_save_at_the_step_they_stop_at(number: signal.Signals, tmp_path: Path) -> None:
    """B05, B07: writing takes longer than any step, and the grace time is longer still."""
    (tmp_path / "here").mkdir()
    parent = fork_owner(lambda: supervise(run_slow, 2, (tmp_path, 0.5), grace_seconds=60.0).exit_code)
    ranks = signed_in(tmp_path / "here", 2, seconds=60)
    os.kill(parent, number)
    assert exit_code(parent) == 143
    assert not still_alive(ranks, seconds=1)
    stopped = {int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)}
    assert len(stopped) == 1
    found = latest_good(tmp_path)
    assert found.folder is not None
    assert (found.folder.name, found.passed_over) == (f"step-{stopped.pop()}", [])


@pytest.mark.world(2)
def test_without_it_the_run_is_ended_and_the_earlier_checkpoint_is_taken(tmp_path: Path) -> None:
    """B05: the grace time ends in the middle of writing."""
    (tmp_path / "here").mkdir()
    parent = fork_owner(lambda: supervise(run_slow, 2, (tmp_path, 100.0), grace_seconds=0.5).exit_code)
    ranks = signed_in(tmp_path / "here", 2, seconds=60)
    os.kill(parent, signal.SIGTERM)
    assert exit_code(parent) == 143
    assert not still_alive(ranks, seconds=1)
    found = latest_good(tmp_path)
    assert found.folder == tmp_path / "checkpoints" / "step-2"
    assert found.passed_over == []
    assert list((tmp_path / "checkpoints").glob(".step-*.partial")), "what was being written bears no final name"
