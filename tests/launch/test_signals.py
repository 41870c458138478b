"""Signals: the parent alone listens, passes on one stop request, and no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain.launch import local
from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.signals import ONE_PRESS_SECONDS
from disttrain.launch.world import run_world, supervise
from tests.launch.processes import exit_code, fork_owner, sign_in, signed_in, still_alive


def until_stopped(place: Place, folder: Path) -> int:
    """Steps with a collective each, until all ranks know that one was asked to stop."""
    sign_in(folder)
    step = 0
    while True:
        step += 1
        asked = torch.tensor(float(place.stop_requested() is not None))
        dist.all_reduce(asked)
        if asked:
            return step
        time.sleep(0.005)


def stubborn(place: Place, folder: Path) -> None:
    sign_in(folder)
    time.sleep(100)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [
        *((signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGUSR1, 143, False), (signal.SIGUSR2, 143, False)),
        *((signal.SIGINT, 130, True), (signal.SIGUSR1, 143, True)),
    ],
)
def test_a_signal_is_one_stop_request_for_all_ranks(number: signal.Signals, code: int, to_group: bool, tmp_path: Path) -> None:
    """B07, B10: to the parent only, or to the whole foreground group as a terminal does."""

    def own() -> int:
        outcome = supervise(until_stopped, 2, (tmp_path,))
        return outcome.exit_code if outcome.results[0] == outcome.results[1] else 98

    parent = fork_owner(own)
    ranks = signed_in(tmp_path, 2)
    (os.killpg if to_group else os.kill)(parent, number)
    assert exit_code(parent) == code
    assert not still_alive(ranks, seconds=0)


@pytest.mark.world(2)
def test_ctrl_c_ends_loader_workers_too(tmp_path: Path) -> None:
    """B10."""

    def entry(place: Place) -> None:
        context = multiprocessing.get_context("fork")
        for _ in range(4):
            context.Process(target=lambda: (sign_in(tmp_path), time.sleep(100)), daemon=True).start()
        until_stopped(place, tmp_path)

    for to_group in (False, True):
        for old in tmp_path.iterdir():
            old.unlink()
        parent = fork_owner(lambda: supervise(entry, 2).exit_code)
        pids = signed_in(tmp_path, 2 + 8)
        (os.killpg if to_group else os.kill)(parent, signal.SIGINT)
        assert exit_code(parent) == 130
        assert not still_alive(pids, seconds=0.5)


@pytest.mark.world(2)
def test_ranks_that_do_not_stop_are_ended_after_the_grace_time(tmp_path: Path) -> None:
    parent = fork_owner(lambda: supervise(stubborn, 2, (tmp_path,), grace_seconds=0.5).exit_code)
    ranks = signed_in(tmp_path, 2)
    start = time.monotonic()
    os.kill(parent, signal.SIGTERM)
    assert exit_code(parent) == 143
    assert 0.4 < time.monotonic() - start < 5
    assert not still_alive(ranks, seconds=0)


@pytest.mark.world(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_at_once_what_only_computes(number: signal.Signals, tmp_path: Path) -> None:
    def own() -> int:
        try:
            run_world(stubborn, 2, (tmp_path,))
        except WorldError as error:
            return error.outcome.exit_code if str(error) == f"stopped by {number.name}" else 98
        return 99

    parent = fork_owner(own)
    ranks = signed_in(tmp_path, 2)
    start = time.monotonic()
    os.kill(parent, number)
    assert exit_code(parent) == 128 + number
    assert time.monotonic() - start < 5
    assert not still_alive(ranks, seconds=0)


@pytest.mark.world(2)
def test_a_second_ctrl_c_ends_ranks_at_once(tmp_path: Path) -> None:
    parent = fork_owner(lambda: supervise(stubborn, 2, (tmp_path,), grace_seconds=60).exit_code)
    ranks = signed_in(tmp_path, 2)
    start = time.monotonic()
    os.kill(parent, signal.SIGINT)
    time.sleep(ONE_PRESS_SECONDS + 0.1)
    os.kill(parent, signal.SIGINT)
    assert exit_code(parent) == 130
    assert time.monotonic() - start < 5
    assert not still_alive(ranks, seconds=0)


@pytest.mark.world(2)
def test_one_press_that_comes_twice_is_one(tmp_path: Path) -> None:
    """A terminal, or `timeout`, may signal the process and then its group."""
    parent = fork_owner(lambda: supervise(stubborn, 2, (tmp_path,), grace_seconds=1.5).exit_code)
    signed_in(tmp_path, 2)
    start = time.monotonic()
    os.kill(parent, signal.SIGINT)
    time.sleep(0.05)
    os.kill(parent, signal.SIGINT)
    assert exit_code(parent) == 130
    assert time.monotonic() - start > 1.4


@pytest.mark.world(2)
def test_a_run_that_ends_before_it_hears_of_the_stop_is_done() -> None:
    def entry(place: Place) -> None:
        time.sleep(0.5)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    assert supervise(entry, 2).exit_code == 0


@pytest.mark.world(2)
def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    folder = tmp_path / "pids"
    folder.mkdir()

    def own() -> int:
        os.environ["TMPDIR"] = str(temporary)
        return supervise(stubborn, 2, (folder,)).exit_code

    parent = fork_owner(own)
    ranks = signed_in(folder, 2)
    os.kill(parent, signal.SIGKILL)
    assert exit_code(parent) == -signal.SIGKILL
    assert not still_alive(ranks)
    assert not list(temporary.iterdir())


@pytest.mark.world(1)
@pytest.mark.parametrize(("restarts", "code"), [(3, 143), (0, 1)])
@pytest.mark.parametrize("moment", ["_frozen_heap", "wait_all"])
def test_a_stop_ends_a_run_that_would_have_started_again(moment: str, restarts: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the ranks of an attempt that fails are started, or while they are ended."""
    as_it_is = getattr(local, moment)

    def entry(place: Place) -> None:
        raise ValueError("planted")

    def stopped(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return as_it_is(*given)

    monkeypatch.setattr(local, moment, stopped)
    outcome = local.Supervisor(1, max_restarts=restarts).run(entry)
    assert (outcome.exit_code, outcome.num_restarts) == (code, 0)
    assert [one.message for one in outcome.failures] == ["planted"]
