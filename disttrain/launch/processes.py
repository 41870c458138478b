"""Ranks as processes of this one: start them, wait for them, end them, tell which failed first."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from disttrain.launch.advice import HINTS
from disttrain.launch.outcome import DONE, FAILED, Failure
from disttrain.launch.rank import Assignment, Entry, live, spawn_payload
from disttrain.launch.wire import SharedFile

if TYPE_CHECKING:
    import psutil

DIE_SECONDS = 1.0
"""From SIGTERM to SIGKILL; to a rank, SIGTERM means die, so only one that is stuck needs more."""
ORPHAN_SECONDS = 2.0
"""For processes that ranks started (loader workers, W&B's service) to see that their rank is gone."""


class RankProcess:
    """A rank as its supervisor sees it."""

    def __init__(self, assignment: Assignment, entry: Entry, result: SharedFile) -> None:
        """Start it: forked, or in a new interpreter, as the assignment's launcher says. Owns `result`."""
        self.rank = assignment.rank
        self.status: int | None = None
        """None while it lives; else its exit status, or minus the signal that ended it."""
        self._log_file = None if assignment.log_file is None else str(assignment.log_file)
        self._files = [result]
        self.pid = self._fork(assignment, entry) if assignment.launcher == "fork" else self._spawn(assignment, entry)
        self._handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @staticmethod
    def _fork(assignment: Assignment, entry: Entry) -> int:
        with warnings.catch_warnings():
            # From 3.12 on Python warns of any thread, numpy's too; which ones matter is what `reason_not_to_fork` asks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]  # as its own forks do: a socket of the parent's must not serve the rank's workers
            live(assignment, entry)
        return pid

    def _spawn(self, assignment: Assignment, entry: Entry) -> int:
        self._files.append(payload := SharedFile("entry"))
        payload.write(spawn_payload(assignment, entry))
        code = f"import sys; sys.path[:] = {sys.path!r}; from disttrain.launch.rank import spawned; spawned({payload.path!r})"
        return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)

    def poll(self) -> int | None:
        """Its status, asked for anew while it lives."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else waited for it; what it wrote tells how it ended
                answer = self.answer()
                self.status = DONE if answer is not None and answer[0] is None else FAILED
                return self.status
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def answer(self) -> tuple[Failure | None, Any] | None:
        """(failure, result) as the rank wrote it; None if it wrote nothing."""
        answer: tuple[Failure | None, Any] | None = self._files[0].read()
        return answer

    def failure(self) -> Failure | None:
        """What went wrong on it, if something did as far as is known."""
        answer = self.answer()
        if answer is not None:
            return answer[0]
        if self.status is None:
            return None
        if self.status < 0:
            name = signal.Signals(-self.status).name
            return Failure(self.rank, name, f"the process was killed{HINTS.get(name, '')}", log_file=self._written_log())
        return Failure(self.rank, "exit", f"the process left with exit status {self.status} and no word", log_file=self._written_log())

    def _written_log(self) -> str | None:
        """Its log, if there is something to read in it."""
        with contextlib.suppress(OSError):
            return self._log_file if self._log_file is not None and os.path.getsize(self._log_file) else None
        return None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Let go of what belongs to it."""
        for file in self._files:
            file.close()
        if self._handle is not None:
            os.close(self._handle)

    @staticmethod
    def wait_any(ranks: Sequence[RankProcess], seconds: float) -> None:
        """Sleep until one of these living ranks ends or the time is over."""
        handles = [rank._handle for rank in ranks if rank._handle is not None]
        if handles:
            select.select(handles, [], [], seconds)
        else:
            time.sleep(min(seconds, 0.02))


def first_failure(ranks: Sequence[RankProcess]) -> Failure | None:
    """The cause, not its consequences: when a rank goes, the others' collectives fail a moment later.

    A process that ended without an exception of its own comes before all that raised, and those are taken by time.
    """
    for rank in ranks:
        rank.poll()
    failures = [failure for rank in ranks if (failure := rank.failure()) is not None]
    return min(failures, key=lambda failure: failure.raised_at, default=None)


def end(ranks: Sequence[RankProcess]) -> None:
    """End those that live, and what they started, and come back when all are gone."""
    if all(rank.poll() is not None for rank in ranks):
        return
    below = _descendants(ranks)
    for rank in ranks:
        rank.send(signal.SIGTERM)
    wait_all(ranks, DIE_SECONDS)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    wait_all(ranks, float("inf"))
    _end_orphans(below)


def wait_all(ranks: Sequence[RankProcess], seconds: float) -> None:
    """Come back when all have ended, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while (alive := [rank for rank in ranks if rank.poll() is None]) and time.monotonic() < deadline:
        RankProcess.wait_any(alive, min(deadline - time.monotonic(), 1.0))


def _descendants(ranks: Sequence[RankProcess]) -> list[psutil.Process]:
    import psutil

    found = []
    for rank in ranks:
        if rank.status is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(rank.pid).children(recursive=True)
    return found


def _end_orphans(below: list[psutil.Process]) -> None:
    import psutil

    if not below:
        return
    _, left = psutil.wait_procs(below, timeout=ORPHAN_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
