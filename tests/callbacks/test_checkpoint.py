"""When a run is saved and what stays, with real files."""

import pytest
import torch

from disttrain.callbacks import checkpoint as module
from disttrain.callbacks.checkpoint import Checkpoint
from disttrain.checkpoint.files import read_values
from disttrain.checkpoint.state import State
from disttrain.errors import ConfigError
from disttrain.parallel.layout import Layout
from disttrain.parallel.step import Verdict
from tests.callbacks.fakes import FakeTrainer


def train(trainer, callback, steps, losses=None):
    """What the loop does with the callback: evaluation before save, each where it is due, and the end."""
    for step in steps:
        trainer.progress.step = step
        callback.on_train_step_start(trainer)
        if losses and step in losses:
            callback.on_validation_end(trainer, {"val/loss": losses[step]})
        if "save" in callback.due(trainer, step) or step == trainer.num_steps:
            state = State({"model/w": (torch.full((4,), float(step)), Layout((4,)))})
            state.values = {"callbacks": {"checkpoint": callback.state_dict()}}
            callback.on_save_checkpoint(trainer, state)
    callback.on_fit_end(trainer)


def kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_multiples_and_the_end(tmp_path):
    trainer, callback = FakeTrainer(tmp_path, num_steps=10), Checkpoint(every=4, keep_last=None)
    train(trainer, callback, range(1, 11))
    assert kept(tmp_path) == [4, 8, 10]


def test_only_the_end_by_default(tmp_path):
    trainer = FakeTrainer(tmp_path, num_steps=5)
    train(trainer, Checkpoint(), range(1, 6))
    assert kept(tmp_path) == [5]


def test_last_and_best_stay(tmp_path):
    """E10: keep_last=2, best at step 1, 5 saves."""
    trainer, callback = FakeTrainer(tmp_path, num_steps=5), Checkpoint(every=1, keep_last=2, keep_best=1)
    trainer.eval_every = 1
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-99-mine").mkdir()
    train(trainer, callback, range(1, 6), {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.2})
    (tmp_path / "checkpoints" / "step-99-mine").rmdir()
    assert kept(tmp_path) == [1, 4, 5]
    assert callback.best(trainer) == tmp_path / "checkpoints" / "step-1"


def test_a_best_one_is_saved_where_it_was_measured(tmp_path):
    trainer, callback = FakeTrainer(tmp_path, num_steps=100), Checkpoint(keep_last=1, keep_best=1)
    trainer.eval_every = 10
    train(trainer, callback, range(1, 60), {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.2, 50: 2.1})
    assert kept(tmp_path) == [20, 50]


def test_best_is_remembered_over_a_resume(tmp_path):
    """E11: top 2 of 4 evaluations, resume from the last, 4 more: the 2 best overall and the last."""
    losses = {1: 0.9, 2: 0.3, 3: 0.8, 4: 0.7, 5: 0.95, 6: 0.2, 7: 0.6, 8: 0.85}
    trainer, callback = FakeTrainer(tmp_path, num_steps=8), Checkpoint(every=1, keep_last=1, keep_best=2)
    trainer.eval_every = 1
    train(trainer, callback, range(1, 5), losses)
    assert kept(tmp_path) == [2, 4]
    again = Checkpoint(every=1, keep_last=1, keep_best=2)
    again.load_state_dict(read_values(tmp_path / "checkpoints" / "step-4")["callbacks"]["checkpoint"])
    trainer.progress.step = 4
    again.on_load_checkpoint(trainer, State())
    train(trainer, again, range(5, 9), losses)
    assert kept(tmp_path) == [2, 6, 8]


def test_the_checkpoint_resumed_from_keeps_its_score(tmp_path):
    """Its own state was written before it was among the kept; it must not be forgotten, nor its score."""
    trainer, callback = FakeTrainer(tmp_path, num_steps=9), Checkpoint(every=2, keep_last=1, keep_best=1)
    trainer.eval_every = 2
    train(trainer, callback, range(1, 5), {2: 0.9, 4: 0.1})
    again = Checkpoint(every=2, keep_last=1, keep_best=1)
    again.load_state_dict(read_values(tmp_path / "checkpoints" / "step-4")["callbacks"]["checkpoint"])
    again.on_load_checkpoint(trainer, State())
    train(trainer, again, range(5, 9), {6: 0.5, 8: 0.6})
    assert kept(tmp_path) == [4, 8]


def test_the_clock_asks_on_rank_0(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for rank, asked in ((0, 1.0), (1, 0.0)):
        trainer, callback = FakeTrainer(tmp_path, rank=rank), Checkpoint(every_minutes=1.0)
        callback.on_train_step_start(trainer)
        assert trainer.progress.flags() is None
        now[0] += 61.0
        callback.on_train_step_start(trainer)
        flags = trainer.progress.flags() or [0.0] * len(Verdict)
        assert flags[Verdict.SAVE] == asked
        callback.on_train_step_start(trainer)
        assert trainer.progress.flags() is None


def test_wrong_values_are_named():
    with pytest.raises(ConfigError, match="every is 0"):
        Checkpoint(every=0)
    with pytest.raises(ConfigError, match="keep_last is 0"):
        Checkpoint(keep_last=0)
    with pytest.raises(ConfigError, match="mode is 'best'; it may be min or max"):
        Checkpoint(mode="best")
    with pytest.raises(ConfigError, match="monitor is 'val/acc', which no evaluation gives"):
        Checkpoint(keep_best=1, monitor="val/acc").on_validation_end(FakeTrainer(), {"val/loss": 1.0})
