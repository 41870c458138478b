"""Processes of the tests: one that owns a run, to be sent signals; and what is left of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def fork_owner(own: Callable[[], int]) -> int:
    """Fork a process, at the head of a group of its own as under a shell, that exits with what `own()` returns."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setpgid(0, 0)
            status = own()
        finally:
            os._exit(status)
    return pid


def exit_code(pid: int) -> int:
    """Wait for the end of a forked process; minus the signal that ended it, if one did."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sign_in(folder: Path) -> None:
    """Leave this process's id in `folder`."""
    partial = folder / f".{os.getpid()}"
    partial.touch()
    partial.rename(folder / str(os.getpid()))


def signed_in(folder: Path, number: int, seconds: float = 20.0) -> list[int]:
    """Wait until `number` processes have left their ids."""
    deadline = time.monotonic() + seconds
    while len(found := [path.name for path in folder.iterdir() if path.name.isdigit()]) < number:
        assert time.monotonic() < deadline, f"{len(found)} of {number} came"
        time.sleep(0.01)
    return [int(name) for name in found]


def still_alive(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those of these processes that have not ended within the time."""

    def living() -> list[int]:
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    deadline = time.monotonic() + seconds
    while living() and time.monotonic() < deadline:
        time.sleep(0.02)
    return living()
