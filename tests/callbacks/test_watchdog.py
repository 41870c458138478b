"""The watchdog: a hang ends, with the stacks of all ranks, and the rank that did not come is named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from disttrain.callbacks.watchdog import NUM_STEPS, Watchdog, compare
from disttrain.errors import ConfigError
from disttrain.launch import job
from disttrain.launch.environment import Environment
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.callbacks.fakes import FakeTrainer, report


class Sleeps(Callback):
    """Rank 1 does not come to step 3: it sleeps, or its process is stopped."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_step_start(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 1 and trainer.progress.step == 2:
            if self.how == "sleeps":
                time.sleep(100)
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("how", "words"), [("sleeps", "rank 1 did not come, it is in on_train_step_start"), ("stops", "rank 1 did not come, without a word")]
)
def test_a_rank_that_does_not_come_is_named(how: str, words: str, tmp_path: Path) -> None:
    callbacks = {
        "sleeps": {"_target_": "tests.callbacks.test_watchdog.Sleeps", "how": how},
        "watchdog": {"_target_": "disttrain.callbacks.watchdog.Watchdog", "seconds": 5.0},
    }
    config = tiny.config(dp=2, callbacks=callbacks)
    began = time.monotonic()
    outcome = job.run(job.Job(config, "disttrain.build:train", outputs=tmp_path), Environment("alone"))
    assert time.monotonic() - began < 60
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.kind == "HangError"
    assert words in outcome.failure.message
    assert re.search(r"rank 0 in all_reduce over \w+", outcome.failure.message)
    assert outcome.folder is not None
    assert "collectives.py" in (outcome.folder / "logs" / "rank-0.log").read_text(), "the stack"
    if how == "sleeps":
        assert "in on_train_step_start" in (outcome.folder / "logs" / "rank-1.log").read_text()


def test_who_waits_where_in_words() -> None:
    waits = {"collective": "all_gather", "axis": "tp", "at": "all_gather (collectives.py:1)"}
    other = {"collective": "all_reduce_", "axis": "world", "at": "all_reduce_ (collectives.py:1)"}
    assert compare({0: waits, 1: waits, 2: other}, 4) == (
        "rank 3 did not come, without a word (stopped, or its machine is gone); "
        "ranks 0, 1 in all_gather over tp; rank 2 in all_reduce over world"
    )


def test_the_limit_follows_the_median_once_there_is_one() -> None:
    dog, trainer = Watchdog(factor=10.0, min_seconds=0.5, seconds=1000.0), FakeTrainer()
    assert dog.limit() == 1000.0
    for _ in range(NUM_STEPS // 10):
        dog.on_train_step_start(trainer)
        dog._since -= 2.0
        dog.on_train_step_end(trainer, report())
    assert dog.limit() == 1000.0, "between steps"
    dog.on_train_step_start(trainer)
    assert dog.limit() == pytest.approx(20.0, rel=0.1)
    with pytest.raises(ConfigError, match=r"watchdog\.factor is 0\.5"):
        Watchdog(factor=0.5)
