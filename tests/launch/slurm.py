"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd of the test's own, gone when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS, PACKAGES = ("munged", "slurmctld", "slurmd", "srun"), ("slurm-wlm", "munge")

CONFIG = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=17000
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SwitchType=switch/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_not_to() -> str | None:
    """Why this machine can't run a Slurm of ours, once Debian's packages are asked for; None if it can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    if not all(shutil.which(name) for name in PROGRAMS) and shutil.which("apt-get"):
        quiet = {"check": False, "capture_output": True, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
        for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            subprocess.run(["apt-get", "-qq", *words], **quiet)  # type: ignore[call-overload]
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    return f"no {', '.join(missing)}: apt-get install {' '.join(PACKAGES)}" if missing else None


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Two idle nodes, n1 and n2; the environment variables by which `srun`, `sbatch` and their kin find them."""
    folder.mkdir(mode=0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder))
    munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")]
    env = os.environ | {"SLURM_CONF": str(config)}
    with ExitStack() as stack:
        for command in (
            ["munged", "--force", "--foreground", *munge],
            ["slurmctld", "-D", "-f", str(config)],
            *(["slurmd", "-D", "-N", node, "-f", str(config)] for node in ("n1", "n2")),
        ):
            stack.enter_context(_daemon(command, folder / f"{command[0]}.out"))
            time.sleep(0.5)
        wait_for(lambda: run(["sinfo", "-h", "-o", "%D %t"], env).split() == ["2", "idle"], 30, "two idle nodes")
        try:
            yield env
        finally:  # while there is somebody to tell the jobs
            run(["scancel", "--full", "--signal=KILL", "--user=root"], env)
            run(["scancel", "--user=root"], env)
            wait_for(lambda: not run(["squeue", "-h"], env), 30, "end of all jobs")


@contextmanager
def _daemon(command: list[str], out: Path) -> Iterator[None]:
    with out.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(command: list[str], env: dict[str, str]) -> str:
    """What a command of Slurm's prints."""
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60).stdout


def wait_for(is_so: object, seconds: float, what: str) -> None:
    """Come back when `is_so()`; fail after `seconds`."""
    assert callable(is_so)
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.2)
