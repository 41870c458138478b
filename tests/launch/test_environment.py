"""Who launched this process is told from the environment alone."""

from __future__ import annotations

import os

import pytest

from disttrain.cli import ready
from disttrain.errors import LaunchError
from disttrain.launch import environment
from disttrain.launch.environment import (
    Environment,
    detect,
    environ,
    expand_counts,
    expand_hosts,
    rank_environment,
    threads_per_rank,
)
from tests import tiny

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29401",
}
INTERACTIVE = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = INTERACTIVE | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
}


def test_alone() -> None:
    assert detect({}) == Environment("alone")
    assert detect({"WORLD_SIZE": "4"}).is_alone, "half a world is somebody's left-over"


def test_torchrun() -> None:
    """M22: the device goes by the local rank."""
    assert detect(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, "10.0.0.1", 29401, "none", node=1, num_nodes=2)


def test_variables_set_by_hand_or_by_kubernetes_count_like_torchruns() -> None:
    env = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert detect(env) == Environment("torchrun", 5, 8, 0, 1, "10.0.0.1", 29401, "", node=5, num_nodes=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "lacks MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x' is not a whole number"),
    ],
)
def test_what_contradicts_itself_is_named(change: dict[str, str | None], message: str) -> None:
    env = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        detect(env)


def test_a_slurm_step() -> None:
    """B08."""
    found = detect(STEP)
    assert (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size) == ("slurm", 5, 6, 1, 2)
    assert (found.address, found.run_id, found.node, found.num_nodes) == ("n1", "17.0", 1, 2)
    assert found.port == detect(STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).port
    assert 1024 < found.port < 32768


@pytest.mark.parametrize(
    "env",
    [
        INTERACTIVE,
        INTERACTIVE | {"SLURM_PROCID": "0"},  # the batch script itself
        STEP | {"SLURM_STEP_ID": "4294967290"},  # an interactive shell's own step
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # srun of one task, which starts its own ranks
    ],
)
def test_an_allocation_is_no_step(env: dict[str, str]) -> None:
    """B08."""
    assert detect(env).is_alone


def test_torchrun_under_srun_is_torchrun() -> None:
    assert detect(STEP | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("a[08-10,12],b-2.x", ["a08", "a09", "a10", "a12", "b-2.x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_slurms_host_names(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_slurms_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_a_world_of_another_size_than_asked_is_named() -> None:
    """B11."""
    with pytest.raises(LaunchError, match=r"asks for 4 ranks \(launch.world_size\), but torchrun launched 8"):
        detect(TORCHRUN).check_world(4)
    detect(TORCHRUN).check_world(8)
    detect({}).check_world(4)


def test_machines_are_those_that_are_found() -> None:
    assert [detect(STEP).check_nodes(asked) for asked in (1, 2)] == [2, 2]
    assert detect({}).check_nodes(1) == 1
    with pytest.raises(LaunchError, match=r"asks for 3 machines \(launch.nodes\), but slurm launched on 2"):
        detect(STEP).check_nodes(3)
    assert ready(tiny.config(dp=8), detect(TORCHRUN), "/").launch.nodes == 2


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """J05, M29."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    assert [threads_per_rank("auto", ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert threads_per_rank(5, 2) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank("auto", 2) == 3
    assert threads_per_rank("auto", 2, {"OMP_NUM_THREADS": "6"}) == 6


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "old")
    before = dict(os.environ)
    with environ({"PLANTED": "new", "PLANTED_TOO": "x"}):
        assert (os.environ["PLANTED"], os.environ["PLANTED_TOO"]) == ("new", "x")
    assert dict(os.environ) == before


def test_an_interface_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    values = rank_environment({"A": "1"}, 2, "eth0")
    assert values == {"OMP_NUM_THREADS": "2", "A": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
