"""Two hosts, played by network namespaces joined by a cable, each with its own address and host name and two ranks of one torchrun.

The cable is cut, a host dies, a host is held up: the run recovers, or ends in time and names the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.words import TINY
from tests.launch.slow import HURRY, curve
from tests.launch.slurm import wait_for
from tests.quality.source import ROOT

CAN = os.geteuid() == 0 and all(shutil.which(name) for name in ("ip", "unshare"))
pytestmark = [pytest.mark.service, pytest.mark.skipif(not CAN, reason="needs root, ip and unshare")]

ONE, TWO = "dtone", "dttwo"
ADDRESSES = {ONE: "10.93.0.1", TWO: "10.93.0.2"}
PORT = 29400
TIMEOUT_SECONDS = 30
WORDS = [
    *TINY[:-3], "callbacks=minimal", "callbacks.grad_accumulation.micro_batch_size=2", "strategy=ddp", "launch.world_size=4",
    "train.eval_every=null", f"launch.timeout_seconds={TIMEOUT_SECONDS}", "callbacks.dawdles._target_=tests.launch.slow.Dawdles",
]  # fmt: skip
NO_SECOND_HOST = f"waited in vain for ranks 2, 3 on {TWO}, still busy elsewhere, gone or cut off: "
NO_FIRST_HOST = f"{ONE} can't be reached any longer from {TWO} (the store at {ADDRESSES[ONE]}:{PORT}): it is gone, or cut off: "


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """Both hosts and what runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torchruns: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *words: str) -> None:
        for number, name in enumerate(ADDRESSES):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"]
            meet = [f"--master-addr={ADDRESSES[ONE]}", f"--master-port={PORT}", "-m", "disttrain"]
            as_host = ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', name]
            env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            with (self.folder / f"{name}.log").open("wb") as log:
                command = [*as_host, *torchrun, *meet, *WORDS, *words]
                self.torchruns[name] = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)

    def train(self, steps: int = 5000) -> None:
        """Start, and come back when they are on their way."""
        self.start(f"train.steps={steps}")
        wait_for(lambda: any("train/loss" in path.read_text() for path in self.folder.glob("outputs/*/*/metrics.jsonl")), 100, "first row")

    def signal(self, name: str, number: signal.Signals) -> None:
        """To all processes of the host."""
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split():
            os.kill(int(pid), number)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def ends(self, name: str, seconds: float, saying: str) -> None:
        """It ends with exit code 1 within the time, and says that once at least."""
        assert self.torchruns[name].wait(seconds) == 1, self.log(name)
        assert saying in self.log(name), self.log(name)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two namespaces that reach each other over a cable."""
    ends = {name: f"c-{name}" for name in ADDRESSES}
    running = Hosts(tmp_path)
    try:
        for name in ADDRESSES:
            ip("netns", "add", name)
        ip("link", "add", ends[ONE], "netns", ONE, "type", "veth", "peer", "name", ends[TWO], "netns", TWO)
        for name, address in ADDRESSES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", ends[name])
            ip("-n", name, "link", "set", ends[name], "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield running
    finally:
        for name, torchrun in running.torchruns.items():
            running.signal(name, signal.SIGKILL)
            torchrun.wait()
        for name in ADDRESSES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_two_hosts_of_which_one_is_held_up_for_a_while_draw_the_curve_of_one(hosts: Hosts) -> None:
    hosts.train(steps=20)
    hosts.signal(TWO, signal.SIGSTOP)
    time.sleep(3)
    hosts.signal(TWO, signal.SIGCONT)
    (hosts.folder / HURRY).touch()
    assert [torchrun.wait(60) for torchrun in hosts.torchruns.values()] == [0, 0], hosts.log(ONE)
    one_host = [sys.executable, "-m", "disttrain", *WORDS, "train.steps=20", "paths.outputs=one"]
    subprocess.run(one_host, cwd=hosts.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    two, one = (curve(next(hosts.folder.glob(f"{outputs}/*/*"))) for outputs in ("outputs", "one"))
    assert len(two) == 20
    assert two == one


@pytest.mark.long
def test_a_cut_cable_ends_both_and_each_names_the_other(hosts: Hosts) -> None:
    hosts.train()
    ip("-n", ONE, "link", "set", f"c-{ONE}", "down")
    hosts.ends(ONE, TIMEOUT_SECONDS + 30, NO_SECOND_HOST)
    hosts.ends(TWO, 30, NO_FIRST_HOST)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "other", "words"), [(TWO, ONE, NO_SECOND_HOST), (ONE, TWO, NO_FIRST_HOST)])
def test_a_host_that_dies_is_named_at_once(victim: str, other: str, words: str, hosts: Hosts) -> None:
    hosts.train()
    hosts.signal(victim, signal.SIGKILL)
    hosts.ends(other, TIMEOUT_SECONDS / 2, words)


@pytest.mark.long
def test_a_host_that_is_held_up_for_too_long_is_named(hosts: Hosts) -> None:
    hosts.train()
    hosts.signal(TWO, signal.SIGSTOP)
    hosts.ends(ONE, TIMEOUT_SECONDS + 30, NO_SECOND_HOST)
    hosts.signal(TWO, signal.SIGCONT)
    hosts.ends(TWO, 30, NO_FIRST_HOST)
