"""Who started this process: torchrun (or what sets the same variables), Slurm, or a person. No torch here."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from disttrain.errors import LaunchError
from disttrain.launch.network import loopback

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FLIGHT_RECORDS = 2000
"""Collectives that a rank's flight recorder remembers."""
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm numbers the steps that are no `srun` of ours (the batch script's, an interactive shell's) from here up."""


@dataclass(frozen=True)
class Environment:
    """The world that this process finds itself in."""

    launcher: str
    """'alone', 'torchrun' or 'slurm'."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    """Host and port of the store that the ranks meet at."""
    port: int = 0
    run_id: str = ""
    node: int = 0
    """Number of this machine among those of the world."""
    num_nodes: int = 1

    @property
    def on_several_machines(self) -> bool:
        """Whether some ranks are not on this one."""
        return self.num_nodes > 1

    @property
    def is_alone(self) -> bool:
        """Whether this process may start ranks of its own."""
        return self.launcher == "alone"

    def check_nodes(self, asked: int) -> int:
        """Machines of the world; LaunchError if the config asks for another number than the 1 that nobody has to type."""
        if not self.is_alone and asked not in (1, self.num_nodes):
            raise LaunchError(
                f"the config asks for {asked} machines (launch.nodes), but {self.launcher} launched on {self.num_nodes}",
                f"launch.nodes={self.num_nodes}, or leave it out",
            )
        return self.num_nodes

    def check_world(self, asked: int) -> None:
        """Raise LaunchError if the config asks for another number of ranks than were launched."""
        if not self.is_alone and asked != self.world_size:
            raise LaunchError(
                f"the config asks for {asked} ranks (launch.world_size), but {self.launcher} launched {self.world_size}",
                f"launch.world_size={self.world_size} with degrees that fit, or launch {asked} ranks",
            )


def detect(env: Mapping[str, str] | None = None) -> Environment:
    """The world that the environment variables tell of. Raises LaunchError where they contradict each other."""
    env = os.environ if env is None else env
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        return _torchrun(env)
    if _is_slurm_step(env):
        return _slurm(env)
    return Environment("alone")


def _torchrun(env: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN if name not in env]
    if missing:
        raise LaunchError(
            f"the environment names a rank of a world (RANK, WORLD_SIZE) but lacks {', '.join(missing)}",
            f"set {' and '.join(missing)}, or unset RANK and WORLD_SIZE to launch ranks from here",
        )
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
    local_rank = _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank % local_world_size
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is not below WORLD_SIZE={world_size}", "set RANK to 0 ... WORLD_SIZE - 1")
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    node = _integer(env, "GROUP_RANK") if "GROUP_RANK" in env else rank // local_world_size
    nodes = _integer(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else -(-world_size // local_world_size)
    address, port = env["MASTER_ADDR"], _integer(env, "MASTER_PORT")
    return Environment("torchrun", rank, world_size, local_rank, local_world_size, address, port, run_id, node, nodes)


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether `srun` started this as one of several tasks; one task alone may start ranks of its own."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    if any(name not in env for name in needed) or _integer(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return _num_tasks(env) > 1


def _num_tasks(env: Mapping[str, str]) -> int:
    """Tasks of this step; the job's own number may be another."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return _integer(env, name) if name in env else 1


def _slurm(env: Mapping[str, str]) -> Environment:
    job, step = _integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID")
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    tasks = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(_num_tasks(env)))
    node = int(env.get("SLURM_NODEID", "0"))
    return Environment(
        "slurm",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=_num_tasks(env),
        local_rank=_integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else 0,
        local_world_size=tasks[node] if node < len(tasks) else tasks[0],
        address=env.get("MASTER_ADDR", hosts[0]),
        # Every rank must find the same port unasked: one from the job's number, apart for the steps of a job,
        # below the ports that systems hand out to clients (32768 and up).
        port=int(env.get("MASTER_PORT", 15000 + (job * 7 + step) % 15000)),
        run_id=f"{job}.{step}",
        node=node,
        num_nodes=len(tasks),
    )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"the environment variable {name}={env[name]!r} is not a whole number") from None


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of host names: `a[1-2,07],b` is a1, a2, a07, b."""
    hosts = []
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        hosts += _expand(name)
    return hosts


def _expand(name: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if match is None:
        return [name]
    numbers = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return [whole for number in numbers for whole in _expand(name[: match.start()] + number + name[match.end() :])]


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of tasks by node: `2(x3),1` is 2, 2, 2, 1."""
    return [int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def uses_agent_store(env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun keeps a store at the address that it gives, so that rank 0 need not."""
    return (os.environ if env is None else env).get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def host_name(env: Mapping[str, str] | None = None) -> str:
    """This machine's name, as its scheduler knows it where that tells: a pod's or a container's own name leads nowhere."""
    env = os.environ if env is None else env
    return env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname()


def leave_out(hosts: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """The scheduler's line that keeps the next start off these hosts."""
    env = os.environ if env is None else env
    return f"kubectl cordon {' '.join(hosts)}" if "KUBERNETES_SERVICE_HOST" in env else f"#SBATCH --exclude={','.join(hosts)}"


def num_cores() -> int:
    """Cores that this process may use: its affinity, and a container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_rank(asked: int | str, num_local_ranks: int, env: Mapping[str, str] | None = None) -> int:
    """CPU threads for each of the ranks here: as asked, as OMP_NUM_THREADS says (in `env` first), else an even share of the cores."""
    if asked != "auto":
        return int(asked)
    users = str((env or {}).get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", ""))).split(",")[0]
    return int(users) if users.isdigit() and int(users) > 0 else max(1, num_cores() // num_local_ranks)


@contextmanager
def environ(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for the body, and for the processes started in it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def flight_recorder() -> dict[str, str]:
    """Switches on NCCL's memory of its last collectives, which the watchdog writes down at a hang; a user's own choice stays."""
    return {} if "TORCH_FR_BUFFER_SIZE" in os.environ else {"TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDS)}


def rank_environment(env: Mapping[str, str], threads: int, interface: str = "auto") -> dict[str, str]:
    """Variables for ranks on this machine: the config's own, the share of threads, and loopback as the only interface.

    A user's own choice of interface, in the environment or in `env`, stays.
    """
    values = {"OMP_NUM_THREADS": str(threads), **flight_recorder(), **env}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface != "auto":
            values.setdefault(name, interface)
        elif name not in os.environ:
            values.setdefault(name, loopback())
    return {name: str(value) for name, value in values.items()}
