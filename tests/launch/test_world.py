"""The supervisor: ranks start, talk, answer, and end together whatever happens to one of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from disttrain.errors import ConfigError, LaunchError, UserError
from disttrain.launch import local
from disttrain.launch.local import choose_start_method
from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.rank import leave
from disttrain.launch.world import run_world, supervise
from tests.launch import entries
from tests.launch.processes import exit_code, fork_owner, sign_in, signed_in, still_alive


def summed(place: Place) -> float:
    total = torch.tensor(float(place.rank))
    dist.all_reduce(total)
    return float(total)


# --- results --------------------------------------------------------------------------------------------------


@pytest.mark.world(4)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    offset = torch.arange(3)

    def entry(place: Place, factor: int) -> tuple[int, torch.Tensor]:
        if place.world_size > 1:
            assert summed(place) == world_size * (world_size - 1) / 2
        return place.rank, offset * factor

    results = run_world(entry, world_size, (7,))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(value, torch.tensor([0, 7, 14])) for _, value in results)


@pytest.mark.world(2)
def test_a_result_larger_than_any_pipe_comes_back() -> None:
    results = run_world(lambda place: bytes(5_000_000), 2)
    assert [len(result) for result in results] == [5_000_000] * 2


@pytest.mark.world(2)
def test_spawned_ranks_do_the_same() -> None:
    assert run_world(entries.plus, 2, (5,), start_method="spawn") == [(5, "spawn"), (6, "spawn")]


@pytest.mark.world(2)
def test_two_worlds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """B01: nothing is fixed that two runs could want; a taken 29500 hurts nobody."""
    codes = [fork_owner(lambda: 0 if run_world(summed, 2) == [1.0, 1.0] else 1) for _ in range(2)]
    assert [exit_code(pid) for pid in codes] == [0, 0]


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.world(4)
def test_a_rank_that_raises_ends_the_others_in_their_collective() -> None:
    """B02, M26."""

    def entry(place: Place) -> None:
        for step in range(10):
            if step == 3 and place.rank == 1:
                raise ValueError("planted at step 3")
            dist.all_reduce(torch.ones(2))

    start = time.monotonic()
    outcome = supervise(entry, 4)
    assert time.monotonic() - start < 10
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind, outcome.failure.message) == (1, "ValueError", "planted at step 3")
    assert "in entry" in outcome.failure.traceback
    with pytest.raises(WorldError, match="planted at step 3"):
        outcome.raise_failure()


@pytest.mark.world(2)
def test_a_rank_that_raises_in_backward_while_the_other_waits(tmp_path: Path) -> None:
    """B04: the summary names rank, exception type, message and log file."""

    def entry(place: Place) -> None:
        weight = torch.ones(2, requires_grad=True)

        def hook(grad: torch.Tensor) -> None:
            if place.rank == 0:
                raise OverflowError("planted in backward")
            dist.all_reduce(grad)

        weight.register_hook(hook)
        weight.sum().backward()

    start = time.monotonic()
    outcome = supervise(entry, 2, log_file=lambda rank: tmp_path / f"rank-{rank}.log")
    assert time.monotonic() - start < 10
    shown = str(outcome.failure)
    assert re.search(r"rank 0 failed: OverflowError: planted in backward\nits log: .*rank-0\.log$", shown)
    assert shown.count("Traceback") == 1
    assert "planted in backward" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.world(2)
@pytest.mark.parametrize("prints", [False, True])
def test_a_killed_rank_is_said_to_be_once_with_its_log_if_it_wrote_one(tmp_path: Path, prints: bool) -> None:
    def entry(place: Place) -> None:
        if place.rank == 1:
            if prints:
                print("a word", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2))

    outcome = supervise(entry, 2, log_file=lambda rank: tmp_path / f"rank-{rank}.log")
    log = f"\nits log: {tmp_path / 'rank-1.log'}" if prints else ""
    assert str(outcome.failure) == f"rank 1 failed: SIGKILL: the process was killed; the kernel does this when memory runs out{log}"


@pytest.mark.world(2)
def test_a_rank_that_never_hears_of_the_failure_is_ended_and_says_where_it_stood(tmp_path: Path) -> None:
    def entry(place: Place) -> None:
        if place.rank == 0:
            raise ValueError("planted")
        time.sleep(100)

    start = time.monotonic()
    assert supervise(entry, 2, log_file=lambda rank: tmp_path / f"{rank}.log").exit_code == 1
    assert time.monotonic() - start < 30
    assert "in entry" in (tmp_path / "1.log").read_text()


@pytest.mark.world(3)
def test_a_wait_in_vain_names_the_rank_that_did_not_come() -> None:
    def entry(place: Place) -> None:
        if place.rank == 1:
            time.sleep(100)
        dist.all_reduce(torch.ones(2))

    outcome = supervise(entry, 3, timeout_seconds=1.0)
    assert outcome.exit_code == 1
    assert "waited in vain for rank 1, still busy elsewhere or gone: " in outcome.reason


@pytest.mark.world(2)
def test_a_users_mistake_in_a_rank_is_its_message_only() -> None:
    def entry(place: Place) -> None:
        raise ConfigError("found this", "key=that")

    outcome = supervise(entry, 2)
    assert outcome.exit_code == 2
    assert str(outcome.failure) == "found this\n  try: key=that"
    with pytest.raises(UserError, match="found this"):
        outcome.raise_failure()


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("ending", "kind"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(0), "exit"), (lambda: leave(3), "exit")],
)
def test_a_rank_that_ends_without_a_word_is_a_failure(ending: object, kind: str) -> None:
    def entry(place: Place) -> None:
        if place.rank == 1:
            ending()  # type: ignore[operator]
        summed(place)

    outcome = supervise(entry, 2)
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (1, kind)


@pytest.mark.world(2)
def test_a_result_that_cannot_cross_is_a_failure_with_its_reason() -> None:
    with pytest.raises(WorldError, match="pickle"):
        run_world(lambda place: lambda: None, 2)


@pytest.mark.world(2)
def test_workers_of_a_failed_rank_and_of_its_peer_are_gone(tmp_path: Path) -> None:
    def entry(place: Place) -> None:
        worker = multiprocessing.get_context("fork").Process(target=lambda: (sign_in(tmp_path), time.sleep(100)), daemon=True)
        worker.start()
        signed_in(tmp_path, 2)
        if place.rank == 0:
            raise ValueError("planted")
        time.sleep(100)

    assert supervise(entry, 2).exit_code == 1
    assert not still_alive(signed_in(tmp_path, 2), seconds=0.5)


# --- restarts ---------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_all_ranks_start_again_after_a_failure_and_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    def entry(place: Place) -> int:
        if place.attempt < 2 and place.rank == 1:
            raise ValueError(f"planted in attempt {place.attempt}")
        summed(place)
        return place.attempt

    outcome = supervise(entry, 2, max_restarts=3)
    assert (outcome.exit_code, outcome.results, outcome.num_restarts) == (0, [2, 2], 2)
    shown = capsys.readouterr().err
    assert "planted in attempt 1" in shown
    assert "(2 of 3, launch.max_restarts)" in shown


@pytest.mark.world(2)
def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    def entry(place: Place) -> None:
        sign_in(tmp_path)
        signed_in(tmp_path, 2)
        raise ConfigError("wrong")

    assert supervise(entry, 2, max_restarts=3).exit_code == 2
    assert len(signed_in(tmp_path, 2)) == 2


# --- threads, environment, streams ----------------------------------------------------------------------------


@pytest.mark.world(2)
def test_ranks_get_their_threads_and_compute_with_them() -> None:
    """J05; and a fork that took a thread pool along would hang here."""

    def entry(place: Place) -> tuple[int, str, float]:
        x = torch.ones(300, 300)
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], float((x @ x).sum())

    assert run_world(entry, 2, threads=2) == [(2, "2", 300.0**3)] * 2
    assert torch.get_num_threads() == 1


@pytest.mark.world(2)
def test_variables_reach_ranks_and_leave_no_trace() -> None:
    def entry(place: Place) -> tuple[str | None, ...]:
        inherited = subprocess.run(["printenv", "PLANTED"], capture_output=True, text=True, check=True).stdout.strip()
        return os.environ["PLANTED"], inherited, os.environ["GLOO_SOCKET_IFNAME"]

    assert run_world(entry, 2, env={"PLANTED": "a,b: 'c'"}) == [("a,b: 'c'", "a,b: 'c'", "lo")] * 2
    assert "PLANTED" not in os.environ


@pytest.mark.world(2)
def test_a_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert run_world(lambda place: os.environ["NCCL_SOCKET_IFNAME"], 2) == ["eth7"] * 2


@pytest.mark.world(2)
def test_output_goes_to_the_logs_native_codes_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def entry(place: Place) -> None:
        print(f"printed by {place.rank}")
        os.write(1, f"native {place.rank}\n".encode())
        logging.getLogger("mine").info("logged by %d", place.rank)

    run_world(entry, 2, log_file=lambda rank: tmp_path / f"{rank}.log")
    shown = capfd.readouterr()
    assert "native 0" in shown.out
    assert "native 1" not in shown.out + shown.err
    one, zero = (tmp_path / "1.log").read_text(), (tmp_path / "0.log").read_text()
    assert all(text in one for text in ("printed by 1", "native 1", "INFO mine: logged by 1"))
    assert "INFO mine: logged by 0" in zero
    assert "logged by 0" in shown.err


# --- fork or spawn ----------------------------------------------------------------------------------------------


def test_a_fork_is_refused_where_a_thread_pool_may_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_start_method("auto") == "fork"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert choose_start_method("auto") == "spawn"
    with pytest.raises(LaunchError, match="8, not 1"):
        choose_start_method("fork")


def test_a_fork_is_refused_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert choose_start_method("auto") == "spawn"
    assert "CUDA" in str(local.reason_not_to_fork())
