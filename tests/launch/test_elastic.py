"""`torchrun --nnodes min:max`: machines, each played by an agent of torchrun's, are lost and join while a run goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from disttrain.launch.elastic import other_sizes
from disttrain.launch.environment import Environment
from disttrain.record import RunFolder
from tests.cli.words import TINY
from tests.launch.slow import HURRY, curve
from tests.launch.slurm import wait_for
from tests.quality.source import ROOT

STEPS = 200
WORDS = [
    *TINY[:-3], "callbacks=[minimal,checkpoint]", "callbacks.grad_accumulation.micro_batch_size=2", "callbacks.checkpoint.every=5",
    "callbacks.dawdles._target_=tests.launch.slow.Dawdles", "train.eval_every=null", f"train.steps={STEPS}", "strategy=ddp",
    "run_name=elastic", "resume=auto", "launch.timeout_seconds=60", "launch.threads=1",
]  # fmt: skip


class Agents:
    """Agents of one torchrun."""

    def __init__(self, folder: Path, nnodes: str, *words: str) -> None:
        self.folder, self.words = folder, words
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        conf = "last_call_timeout=2,join_timeout=100"
        self._torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=one", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"),
            *("--max-restarts=9", "--monitor-interval=0.5", "-m", "disttrain"),
        ]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """The first of all keeps the store by which they meet: it must stay."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        for name in names:
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen([*self._torchrun, *self.words], cwd=self.folder, env=env, stdout=log, stderr=log)
            wait_for(self._has_store, 60, "store")

    def _has_store(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def lose(self, name: str) -> None:
        """The whole machine at once."""
        lost = self.processes.pop(name)
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(lost.pid)
            for process in (agent, *agent.children(recursive=True)):  # ranks have sessions of their own
                process.kill()
        lost.wait()

    def said(self, text: str) -> bool:
        return any(text in log.read_text(errors="replace") for log in self.folder.glob("*.log"))

    def steps(self) -> int:
        """Steps of the run so far."""
        rows = [row["step"] for folder in self.folder.glob("outputs/*/*") for row in RunFolder(folder).read()]
        return max(rows, default=0)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[list[Agents]]:
    """A list for agents, which are ended afterwards."""
    started: list[Agents] = []
    yield started
    for agents in started:
        for name in list(agents.processes):
            agents.lose(name)


def unbroken(folder: Path, *words: str) -> dict[int, float]:
    """The same run on one device."""
    whole = [sys.executable, "-m", "disttrain", *WORDS, *words, "strategy=single", "paths.outputs=alone", "resume=null"]
    (folder / HURRY).touch()
    subprocess.run(whole, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return curve(next(folder.glob("alone/*/*")))


@pytest.mark.service
@pytest.mark.long
def test_a_machine_is_lost_and_another_joins_and_the_curve_is_that_of_one_device(tmp_path: Path, torchrun: list[Agents]) -> None:
    words = [*WORDS, "train.global_batch_size=12", "dataset.num_samples=60"]
    torchrun.append(agents := Agents(tmp_path, "2:3", *words))
    agents.start("a", "b", "c")
    wait_for(lambda: agents.steps() > 10, 120, "first steps")
    agents.lose("c")
    wait_for(lambda: agents.said("ranks          2 on cpu"), 120, "world of two")
    before = agents.steps()
    wait_for(lambda: agents.steps() > before + 5, 60, "steps of two")
    agents.start("d")
    wait_for(lambda: sum(log.read_text().count("ranks          3 on cpu") for log in tmp_path.glob("*.log")) == 2, 120, "world of three")
    (tmp_path / HURRY).touch()
    wait_for(lambda: all(process.poll() is not None for process in agents.processes.values()), 120, "end")
    assert [process.returncode for process in agents.processes.values()] == [0, 0, 0]
    (folder,) = tmp_path.glob("outputs/*/*")
    assert curve(folder) == pytest.approx(unbroken(tmp_path, *words[len(WORDS) :]), rel=1e-5)


@pytest.mark.service
@pytest.mark.long
def test_a_size_that_the_batch_can_not_be_shared_out_over_waits_for_one_that_it_can(tmp_path: Path, torchrun: list[Agents]) -> None:
    torchrun.append(agents := Agents(tmp_path, "2:4", *WORDS))
    agents.start("a", "b", "c")
    wait_for(lambda: agents.said("waiting for a world of 2 or 4 ranks, until a machine joins or leaves"), 120, "word")
    assert agents.said("3 data ranks (strategy.dp_replicate)")
    agents.lose("c")
    wait_for(lambda: agents.steps() > 3, 120, "steps of two")
    assert all(process.poll() is None for process in agents.processes.values())


# --- which sizes may come ---------------------------------------------------------------------------------------

THREE = Environment("torchrun", 0, 6, 0, 2, run_id="x")


@pytest.mark.parametrize(
    ("command", "env", "sizes"),
    [
        (["python", "/bin/torchrun", "--nnodes=2:4", "--nproc-per-node", "2", "-m", "disttrain"], {}, [4, 8]),
        (["python", "-m", "torch.distributed.run", "--nnodes", "1:3"], {}, [2, 4]),
        (["torchrun", "--nnodes=3"], {}, []),
        (["torchrun"], {"PET_NNODES": "3:4"}, [8]),
        (["torchrun"], {}, []),
    ],
)
def test_other_sizes_are_read_from_torchruns_command(command: list[str], env: dict[str, str], sizes: list[int]) -> None:
    assert other_sizes(THREE, env, [["bash", "-c", "x"], command, ["init"]]) == sizes


def test_only_torchrun_changes_the_size() -> None:
    assert other_sizes(Environment("slurm", 0, 6, 0, 2), {"PET_NNODES": "2:4"}, []) == []
