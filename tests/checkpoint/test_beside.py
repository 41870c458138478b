"""A save costs the loop its copy: what is written is the state of its step, whatever training does meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import build
from disttrain.checkpoint import files, writer
from disttrain.checkpoint.load import latest_good, load
from disttrain.checkpoint.save import Saver
from disttrain.checkpoint.state import State
from disttrain.launch.place import Place
from disttrain.launch.world import run_world, supervise
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.record import RunFolder
from tests import tiny
from tests.train.runs import NOTES, notes_of

LIMIT_SECONDS = 20.0


def state(value: float, size: int = 8) -> State:
    return State({"model/w": (torch.full((size,), value), Layout((size,)))}, {"value": value})


def read(folder: Path) -> float:
    found = state(-1.0)
    load(found, folder, Mesh())
    tensor = found.tensors["model/w"][0]
    assert (tensor == tensor[0]).all()
    assert found.values["value"] == tensor[0]
    return float(tensor[0])


class Gate:
    """Holds back every file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        plain = files.write_blocks

        def held(path: Path, folder: Path, blocks: files.Blocks) -> files.Entry:
            assert self.open.wait(LIMIT_SECONDS)
            return plain(path, folder, blocks)

        monkeypatch.setattr(files, "write_blocks", held)


def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, saver, training = Gate(monkeypatch), Saver(tmp_path, Mesh()), state(1.0)
    saver.save(training, 1)
    training.tensors["model/w"][0].fill_(2.0)
    training.values["value"] = 2.0
    saver.save(training, 2)
    training.tensors["model/w"][0].fill_(3.0)
    assert saver.poll() == []
    assert files.steps_in(tmp_path) == []
    gate.open.set()
    assert [(saved.step, saved.error) for saved in saver.drain()] == [(1, None), (2, None)]
    saver.close()
    assert [read(tmp_path / f"step-{step}") for step in (1, 2)] == [1.0, 2.0]


def test_a_third_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, saver, training = Gate(monkeypatch), Saver(tmp_path, Mesh()), state(1.0)
    saver.save(training, 1)
    saver.save(training, 2)
    third = threading.Thread(target=saver.save, args=(training, 3))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    assert len(saver._copies) == 2, "memory is bounded"
    gate.open.set()
    third.join(LIMIT_SECONDS)
    assert not third.is_alive()
    assert len(saver.drain()) == 3
    saver.close()
    assert len(saver._copies) == 0


def test_memory_is_used_again(tmp_path: Path) -> None:
    saver, training = Saver(tmp_path, Mesh()), state(1.0)
    for step in range(1, 5):
        saver.save(training, step)
        saver.drain()
    assert len(saver._copies) == 1
    saver.save(state(5.0, size=9), 5)
    saver.drain()
    assert [copy.num_bytes for copy in saver._copies] == [36]
    saver.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="priorities of single threads are Linux's")
def test_the_writer_alone_has_the_lowest_priority(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Mesh())
    saver.save(state(1.0), 1)
    saver.drain()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == writer.LOWEST
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < writer.LOWEST
    saver.close()
    assert not thread.is_alive()


def test_it_pauses_after_each_block_unless_it_is_waited_for() -> None:
    def seconds(hurried: bool) -> float:
        one = writer.Writer()
        if hurried:
            one.hurry.set()
        before = time.perf_counter()
        for _ in one._paced(bytes(3 * writer.BLOCK)):
            time.sleep(0.1)
        return time.perf_counter() - before

    assert seconds(hurried=True) < seconds(hurried=False) >= 0.6


def test_what_runs_before_have_left_unfinished_goes_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-3.0a1b2c3d.partial", ".step-4.gone", ".step-5.mine.partial", "step-6-mine", ".step-7.old"):
        (tmp_path / name).mkdir()
    Saver(tmp_path, Mesh()).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".step-5.mine.partial", ".step-7.old", "step-6-mine"]


# --- a save that fails ----------------------------------------------------------------------------------------------


def trainer_with(place: Place, folder: Path, steps: int, **checkpoint: Any) -> Any:
    callback = {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", **checkpoint}
    config = tiny.config(dp=place.world_size, steps=steps, log_every=1, callbacks=NOTES | {"checkpoint": callback})
    return build.build_trainer(config, RunFolder(folder), place)


def full_disk_on_rank_1(place: Place, folder: Path, can_say_so: bool) -> tuple[str, float]:
    """Rank 1's disk is full when it writes step 4; it may not even be able to leave word of it."""
    plain = files.write_blocks

    def full(path: Path, root: Path, blocks: files.Blocks) -> files.Entry:
        if place.rank == 1 and ".step-4." in str(path) and not (can_say_so and path.suffix == ".json"):
            raise OSError(28, "No space left on device")
        return plain(path, root, blocks)

    files.write_blocks = full  # in this rank's process only
    trainer = trainer_with(place, folder, 400, every=2, keep_last=None)
    try:
        trainer.fit()
    except ArithmeticError as error:
        return str(error), notes_of(trainer).rows[-1]["step"]
    return "done", 0.0


@pytest.mark.world(2)
@pytest.mark.parametrize("can_say_so", [True, False])
def test_a_failed_write_stops_all_ranks_at_one_step_and_harms_no_earlier_checkpoint(tmp_path: Path, can_say_so: bool) -> None:
    told = run_world(full_disk_on_rank_1, 2, (tmp_path, can_say_so))
    assert told[0] == told[1]
    reason, step = told[0]
    assert reason == "the checkpoint of step 4 was not saved: rank 1: [Errno 28] No space left on device" or (
        reason == "the checkpoint of step 4 was not saved: [Errno 28] No space left on device"
    )
    assert 5 <= step < 400
    found = latest_good(tmp_path)
    assert found.folder is not None
    assert found.passed_over == []
    assert 2 in files.steps_in(tmp_path / "checkpoints")
    assert 4 not in files.steps_in(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob(".step-4.*"))


def disk_full_at_the_end(place: Place, folder: Path) -> None:
    plain = files.write_blocks

    def full(path: Path, root: Path, blocks: files.Blocks) -> files.Entry:
        if ".step-20." in str(path) and place.rank == 1:
            raise OSError(28, "No space left on device")
        return plain(path, root, blocks)

    files.write_blocks = full
    trainer_with(place, folder, 20, every=10).fit()


@pytest.mark.world(2)
def test_a_last_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    outcome = supervise(disk_full_at_the_end, 2, (tmp_path,))
    assert outcome.exit_code == 1
    assert "the checkpoint of step 20 was not saved: rank 1: [Errno 28]" in outcome.reason
    assert files.steps_in(tmp_path / "checkpoints") == [10]


def test_the_disk_is_asked_before_a_save_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [100]
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free[0]}))
    saver = Saver(tmp_path, Mesh())
    saver.save(state(1.0, size=20), 1)
    assert [saved.error for saved in saver.drain()] == [None]
    assert caplog.text == ""
    free[0] = 70
    saver.save(state(1.0, size=20), 2)
    (saved,) = saver.drain()
    assert saved.error is not None
    assert "80 bytes are to be written and 70 are free" in saved.error
    free[0] = 100
    monkeypatch.setattr(files, "check_space", lambda folder, num_bytes: None)
    free[0] = 79
    saver.save(state(1.0, size=20), 3)
    assert [saved.error for saved in saver.drain()] == [None]
    assert "the next checkpoint needs" in caplog.text
    saver.close()
    assert files.steps_in(tmp_path) == [1, 3]
