"""The life of a rank that the supervisor started: from its first instruction to `os._exit`.

A rank dies with the supervisor, leaves Ctrl-C and the schedulers' signals to it, and ends by `os._exit` once
its streams are flushed: nothing that a library put at interpreter exit can make it hang. Who must finish
something (W&B, TensorBoard) does so in a hook before.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from disttrain.errors import SAME_AGAIN, DivergedError, UserError
from disttrain.launch import wire
from disttrain.launch.advice import advice_for, allocator_summary
from disttrain.launch.outcome import DONE, FAILED, USER_ERROR, Failure
from disttrain.launch.place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Entry = Callable[[Place], Any]
"""What a rank runs; its return value goes back to the supervisor."""

_PR_SET_PDEATHSIG = 1
_assignments: list[Assignment] = []
"""This process's own last, if a supervisor started it as a rank."""


@dataclass(frozen=True)
class Assignment:
    """What the supervisor tells a rank."""

    rank: int
    world_size: int
    launcher: str
    attempt: int
    supervisor: int
    """Its process id."""
    threads: int
    store: str
    stop: str
    result: str
    """Paths of the shared files."""
    log_file: Path | None

    def place(self) -> Place:
        """The rank's place, as the entry gets it."""
        return Place(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.rank,
            local_world_size=self.world_size,
            launcher=self.launcher,
            make_store=self._open_store if self.world_size > 1 else None,
            stop_requested=wire.StopPage(self.stop).requested,
            log_file=self.log_file,
            attempt=self.attempt,
        )

    def _open_store(self, timeout: timedelta) -> Store:
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        store: Store = FileStore(self.store, self.world_size)
        store.set_timeout(timeout)
        return store


def live(assignment: Assignment, entry: Entry) -> NoReturn:
    """Run `entry` on this rank's place, tell the supervisor how it went, and leave."""
    status = FAILED
    try:
        _assignments.append(assignment)
        _settle(assignment)
        wire.write(assignment.result, (None, entry(assignment.place())))
        status = DONE
    except BaseException as error:
        status = USER_ERROR if isinstance(error, UserError) else FAILED
        failure = describe(error, assignment.rank, assignment.log_file)
        note(failure)
        wire.write(assignment.result, (failure, None))
    finally:
        leave(status)


def give_up(error: Exception) -> NoReturn:
    """End this rank now, from any thread, as if its entry had raised `error`: for one whose main thread is stuck."""
    if _assignments:
        wire.write(_assignments[-1].result, (describe(error, _assignments[-1].rank, _assignments[-1].log_file), None))
    else:
        print(f"disttrain: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    leave(FAILED)


def describe(error: BaseException, rank: int | None, log_file: Path | None) -> Failure:
    """`error` as data, so that it can cross to another process whatever its class."""
    is_users = isinstance(error, UserError)
    says_all = is_users or isinstance(error, DivergedError)
    notes = [note for note in getattr(error, "__notes__", ()) if note != SAME_AGAIN]
    raised = traceback.TracebackException.from_exception(error)
    raised.__notes__ = None  # they stand in the message
    return Failure(
        rank=rank,
        kind=type(error).__qualname__,
        message="\n  ".join([str(error) or "(no message)", *notes]) + ("" if says_all else advice_for(error)),
        traceback="" if says_all else "".join(raised.format()),
        log_file=None if log_file is None else str(log_file),
        is_users=is_users,
        is_final=isinstance(error, DivergedError) or SAME_AGAIN in getattr(error, "__notes__", ()),
        raised_at=time.monotonic(),
    )


def load_function(name: str) -> Callable[..., Any]:
    """The function that 'module:function' names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def spawn_payload(assignment: Assignment, entry: Entry) -> tuple[Assignment, bytes]:
    """What `spawned` reads. The entry is packed apart: a rank that can't import it can still say so."""
    return assignment, wire.dump(entry)


def spawned(path: str) -> NoReturn:
    """First function of a rank in a new interpreter: what it needs lies in the supervisor's file at `path`."""
    assignment, packed = wire.read(path)
    live(assignment, lambda place: wire.load(packed)(place))


def _settle(assignment: Assignment) -> None:
    """Signals, streams and threads, before anything can go wrong."""
    _die_with(assignment.supervisor)
    os.setpgid(0, 0)  # a signal to the whole group (Ctrl-C, `timeout`, a scheduler) is the supervisor's to answer
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if assignment.log_file is not None:
        _open_log(assignment.log_file, keeps_terminal=assignment.rank == 0)
    if "torch" in sys.modules or assignment.launcher == "spawn":
        import torch

        torch.set_num_threads(assignment.threads)


def _die_with(supervisor: int) -> None:
    """Be killed when the supervisor ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before the call
        os._exit(FAILED)


def _open_log(path: Path, keeps_terminal: bool) -> None:
    """Send this rank's output, native code's too, to its log; rank 0 keeps the terminal and logs there too.

    The log also gets the stacks of all threads if this rank crashes, or is ended because another one failed.
    """
    log = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open as long as the rank lives)
    if not keeps_terminal:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGTERM, log, chain=True)
    log_to(log, show=keeps_terminal)


def log_to(log: Any, show: bool) -> None:
    """Let Python's logging write to the stream `log`, and to the terminal too where `show`."""
    to_file = logging.StreamHandler(log)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if show:
        handlers.append(logging.StreamHandler(sys.stderr))
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)


def note(failure: Failure) -> None:
    """Put a failure into this rank's own log."""
    if failure.log_file is not None:
        with contextlib.suppress(OSError), open(failure.log_file, "a", encoding="utf-8") as log:
            log.write(f"{failure.traceback}{failure.kind}: {failure.message}\n" if failure.traceback else f"{failure.message}\n")
            if failure.kind == "OutOfMemoryError":
                log.write(f"{allocator_summary()}\n")


def leave(status: int) -> NoReturn:
    """End now: no exit handlers, which may wait for other ranks, but nothing written is lost and no worker is left."""
    for child in multiprocessing.active_children():
        child.kill()
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
