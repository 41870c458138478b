"""Worlds that somebody else launched, and what a run shows to the network: real torchrun, real sockets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from disttrain.launch.environment import host_name
from disttrain.launch.job import Job, run
from disttrain.record import RunFolder
from tests.launch.processes import exit_code, fork_owner, signed_in
from tests.launch.program import config_of
from tests.quality.source import ROOT

pytestmark = pytest.mark.service

PROGRAM = "tests.launch.program"


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=100, check=False)


def torchrun(entry: str, outputs: Path, timeout_seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return command(*launcher, "-m", PROGRAM, entry, "2", str(outputs), str(timeout_seconds))


@pytest.mark.world(2)
def test_ranks_of_torchrun_join_one_run(tmp_path: Path) -> None:
    """M23, A01: one folder, the launcher's variables as they were, data prepared once."""
    outputs = tmp_path / "outputs"
    done = torchrun("where", outputs)
    assert done.returncode == 0, done.stderr
    folder, *others = outputs.glob("*/*")
    assert not others
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert [one["launcher"] for one in seen] == ["torchrun"] * 2
    assert {one["folder"] for one in seen} == {str(folder)}
    assert [one["environment"]["RANK"] for one in seen] == ["0", "1"]
    assert len({one["environment"]["MASTER_PORT"] for one in seen}) == 1
    assert [one["environment"]["PLANTED"] for one in seen] == ["asked for"] * 2
    assert json.loads((folder / "environment.json").read_text())["env"] == {"PLANTED": "asked for"}
    assert RunFolder(folder).result()["status"] == "done"
    assert RunFolder(folder).log_file(1).exists()
    assert len(Path(f"{outputs}-prepared").read_text().split()) == 1


@pytest.mark.world(2)
def test_a_failure_under_torchrun_is_shown_by_its_rank_only(tmp_path: Path) -> None:
    done = torchrun("raises_at_step_3", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("rank 1 failed: ValueError: planted at step 3") == 1
    assert "rank 0 failed" not in done.stderr
    (folder,) = tmp_path.glob("*/*")
    assert RunFolder(folder).result()["reason"] == "rank 1: ValueError: planted at step 3"


@pytest.mark.world(2)
def test_a_config_error_under_torchrun_is_one_message(tmp_path: Path) -> None:
    done = torchrun("wrong", tmp_path)
    assert done.stderr.count("a wrong override") == 1
    assert "exitcode  : 2" in done.stderr  # of the rank that torchrun saw first; it may end the other before that says so
    assert "exitcode  : 1" not in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.world(2)
def test_a_missing_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    """B14."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start = time.monotonic()
    done = command(sys.executable, "-m", PROGRAM, "where", "2", str(tmp_path), "3", **world)
    assert 3 < time.monotonic() - start < 20
    assert done.returncode == 2
    assert f"1 of 2 ranks came to 127.0.0.1:{port} within 3 s; missing: 1" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.world(2)
def test_a_wait_in_vain_under_torchrun_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    """It takes as long as the wait, and then the grace time of the rank that torchrun's SIGTERM finds busy."""
    start = time.monotonic()
    done = torchrun("never_comes", tmp_path, timeout_seconds=8.0)
    assert time.monotonic() - start < 40
    assert done.returncode == 1
    assert done.stderr.count(f"waited in vain for rank 1 on {host_name()}, still busy elsewhere, gone or cut off: ") == 1


def outside_loopback(pids: list[int]) -> list[str]:
    """Listening sockets of these processes on any other address than the machine's own."""
    listening = command("ss", "-ltnpH").stdout
    mine = [line for line in listening.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    return [line for line in mine if not line.split()[3].startswith(("127.", "[::1]"))]


def look_at_a_run(outputs: Path) -> int:
    """Launch two ranks and return how many outside sockets they listen on; 90 for a run that did not end well."""
    owner = fork_owner(lambda: run(Job(config_of(2), "tests.launch.entries:listens", outputs=outputs)).exit_code)
    while not (folders := list(outputs.glob("*/*/pids"))):
        time.sleep(0.02)
    pids = signed_in(folders[0], 2)
    found = outside_loopback([owner, *pids])
    os.kill(owner, signal.SIGTERM)
    return len(found) if exit_code(owner) == 143 else 90


@pytest.mark.world(2)
@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss")
def test_a_run_listens_on_loopback_only(tmp_path: Path) -> None:
    """Must-show 7."""
    with socket.socket() as planted:
        planted.bind(("0.0.0.0", 0))
        planted.listen()
        assert outside_loopback([os.getpid()]), "the look finds what it looks for"
    assert look_at_a_run(tmp_path) == 0


def can_make_namespaces() -> bool:
    return (
        bool(shutil.which("unshare") and shutil.which("ip"))
        and not subprocess.run(["unshare", "-nm", "true"], capture_output=True).returncode
    )


@pytest.mark.world(2)
@pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make network namespaces")
def test_a_run_listens_on_loopback_only_where_its_host_name_is_an_outside_address(tmp_path: Path) -> None:
    """Must-show 7: gloo by itself would take the address of the host name."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n10.11.12.13 {socket.gethostname()}\n")
    script = f"""
    ip link set lo up && ip link add outside type dummy && ip addr add 10.11.12.13/24 dev outside && ip link set outside up
    mount --bind {hosts} /etc/hosts
    exec {sys.executable} -c "from tests.launch.test_launched import *; import sys; sys.exit(look_at_a_run(Path('{tmp_path}/outputs')))"
    """
    (tmp_path / "outputs").mkdir()
    done = command("unshare", "-nm", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert not psutil.Process().children()
