"""What a run with the default callbacks shows to the network: nothing, by itself or by the processes it starts (W&B's too)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from disttrain.cli import main
from tests.cli.words import TINY
from tests.launch.processes import exit_code, fork_owner
from tests.launch.test_launched import can_make_namespaces, command, outside_loopback

pytestmark = [pytest.mark.service, pytest.mark.skipif(not shutil.which("ss"), reason="needs ss")]

LONG = [word for word in TINY if not word.startswith(("callbacks=", "train.steps"))] + ["train.steps=1000000", "train.log_every=1000"]


def sockets_of_a_training(cwd: Path) -> list[str]:
    """Sockets outside loopback that a run listens on while it trains and W&B is open. Nothing is left of the run."""
    os.chdir(cwd)
    owner = fork_owner(lambda: main(LONG))
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size > 7 for file in cwd.glob("outputs/*/*/wandb/*/*.wandb")):
        assert time.monotonic() < deadline, "the run has not begun"
        time.sleep(0.05)
    pids = [owner, *(process.pid for process in psutil.Process(owner).children(recursive=True))]
    assert len(pids) >= 4, "the parent, two ranks and W&B's service"
    found = outside_loopback(pids)
    os.kill(owner, signal.SIGTERM)
    assert exit_code(owner) == 143
    return found


@pytest.mark.world(2)
def test_a_training_listens_on_loopback_only(tmp_path: Path) -> None:
    """Must-show 7."""
    assert sockets_of_a_training(tmp_path) == []


@pytest.mark.world(2)
@pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make network namespaces")
def test_a_training_listens_on_loopback_only_where_its_host_name_is_an_outside_address(tmp_path: Path) -> None:
    """Must-show 7: in a network namespace of its own, where gloo by itself would take the host name's address."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n10.11.12.13 {socket.gethostname()}\n", encoding="utf-8")
    look = f"from tests.cli.test_network import *; found = sockets_of_a_training(Path('{tmp_path}')); print(found); sys.exit(len(found))"
    script = f"""
    ip link set lo up && ip link add outside type dummy && ip addr add 10.11.12.13/24 dev outside && ip link set outside up
    mount --bind {hosts} /etc/hosts
    exec {sys.executable} -c "{look}"
    """
    done = command("unshare", "-nm", "sh", "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
