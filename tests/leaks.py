"""Whether a piece of code leaves the process as it found it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

GRACE_SECONDS = 3.0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
SET_BY_IMPORTS = {
    "PYTEST_CURRENT_TEST",  # pytest's own
    "KMP_INIT_AT_FORK",  # scikit-learn, at import
    "KMP_DUPLICATE_LIB_OK",  # the same
    "TF2_BEHAVIOR",  # tensorboard, at import
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when something first imports its compiler (the flop counter does)
    "TRITON_CACHE_DIR",  # the same
}
STAYS_ALIVE = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "loky")
"""Helpers of the standard library and of joblib that live as long as the process and end with it."""
LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def environment() -> dict[str, str]:
    """The environment, without what imports set."""
    return {name: value for name, value in os.environ.items() if name not in SET_BY_IMPORTS}


def below(pid: int) -> Iterator[int]:
    """Ids of all processes under `pid`, zombies included. Asked twice a test: Linux keeps lists, else every process is looked at."""
    if not LISTS_CHILDREN:
        yield from (process.pid for process in psutil.Process(pid).children(recursive=True))
        return
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                yield child
                yield from below(child)


def children() -> dict[int, str]:
    """Command line of every process below this one, zombies included, by id."""
    found = {}
    for pid in below(os.getpid()):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.status()
        except psutil.NoSuchProcess:
            continue
        if not any(name in command for name in STAYS_ALIVE):
            found[pid] = command
    return found


def leaked_children(before: dict[int, str]) -> dict[int, str]:
    """Children that were not there `before` and do not end within the grace time."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        left = {pid: command for pid, command in children().items() if pid not in before}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def in_process_state() -> dict[str, Any]:
    """What a test may change for itself only."""
    return {
        "signal handlers": {number.name: signal.getsignal(number) for number in SIGNALS},
        "environment": environment(),
        "working folder": os.getcwd(),
        "process group": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def restore(before: dict[str, Any]) -> None:
    """Put back what a test has left changed, so that one leak fails one test."""
    if dist.is_initialized() and not before["process group"]:
        dist.destroy_process_group()
    for name, handler in before["signal handlers"].items():
        signal.signal(signal.Signals[name], handler)
    for name in environment().keys() - before["environment"].keys():
        del os.environ[name]
    os.environ.update(before["environment"])
    os.chdir(before["working folder"])
    torch.set_num_threads(before["torch threads"])
    torch.set_default_dtype(before["default dtype"])
    if torch.are_deterministic_algorithms_enabled() != before["deterministic algorithms"]:  # setting it imports the compiler
        torch.use_deterministic_algorithms(before["deterministic algorithms"])


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What changed, one line each; of mappings only the entries that differ."""
    lines = []
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict) and was != now:
            keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
            lines += [f"{name}: {key} was {was.get(key)!r}, is {now.get(key)!r}" for key in keys]
        elif was != now:
            lines.append(f"{name} was {was!r}, is {now!r}")
    return "\n".join(lines)


@contextmanager
def untouched() -> Iterator[None]:
    """Fail if the body leaves processes, environment, process groups, signal handlers or torch settings behind."""
    processes, before = children(), in_process_state()
    yield
    left = leaked_children(processes)
    changed = difference(before, in_process_state())
    if not left and not changed:
        return
    for pid in left:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
    restore(before)
    pytest.fail("\n".join(["left behind:", *(f"process {pid}: {command}" for pid, command in left.items()), changed]), pytrace=False)
