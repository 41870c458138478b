"""Ranks on this machine: a small supervisor that starts them, waits for them and ends them.

They are forked from one warm import, so that a world starts in a tenth of a second, or spawned where a fork would
not be safe. They meet at a shared file and talk over loopback: a run needs no port and is not seen from outside.
The supervisor computes nothing. It alone listens to signals and passes them on as one stop request.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain.launch.outcome import DONE, FAILED, USER_ERROR, Failure, Outcome
from disttrain.launch.processes import RankProcess, end, first_failure, wait_all
from disttrain.launch.rank import Assignment, Entry
from disttrain.launch.signals import StopSignals
from disttrain.launch.wire import SharedFile, StopPage

POLL_SECONDS = 0.2
"""How late the supervisor sees a signal or a deadline; the end of a rank wakes it at once."""
LEAVE_SECONDS = 3.0
"""From a rank's failure to the end of the others. A collective with a rank that has gone fails at once, so they can tell
their callbacks (W&B marks the run as failed); one that is stuck elsewhere hears nothing and is ended."""


def say(message: str | Failure) -> None:
    """Show a message of the launcher's own; a failure's traceback stands above it."""
    if isinstance(message, Failure):
        if message.traceback:
            print(message.traceback.rstrip(), file=sys.stderr)
        message = message.words
    print(f"disttrain: {message}", file=sys.stderr, flush=True)


def reason_not_to_fork() -> str | None:
    """Why ranks can't be forked from this process as it is; None if they can. To be asked before `import_warm`.

    A pool of threads does not survive a fork: every forked rank with two threads would hang in its first parallel
    operation. Whether one exists can't be seen, so a torch that may have made one counts as one that has.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in this process"
    if torch is not None and torch.get_num_threads() > 1:
        return f"torch may have started threads in this process (torch.get_num_threads() is {torch.get_num_threads()}, not 1)"
    if "ipykernel" in sys.modules:
        return "this is a notebook, whose kernel has threads of its own"
    return None if hasattr(os, "fork") else "this system can't fork"


def choose_start_method(asked: str) -> str:
    """'fork' or 'spawn'. Raises LaunchError if a fork is asked for where it would hang."""
    if asked == "spawn":
        return "spawn"
    reason = reason_not_to_fork()
    if reason is not None and asked == "fork":
        raise LaunchError(f"ranks can't be forked: {reason}", "launch.start_method=spawn")
    return "fork" if reason is None else "spawn"


def import_warm(modules: Iterable[str] = ()) -> None:
    """Import torch with one thread, and `modules`: what forked ranks then share, and no pool that would break them."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)


@dataclass
class Supervisor:
    """Starts a world of ranks on this machine and sees it through."""

    world_size: int
    start_method: str = "fork"
    """'fork' or 'spawn'; see `choose_start_method`."""
    threads: int = 1
    """CPU threads a rank."""
    max_restarts: int = 0
    """Starts after a failure that is not the user's."""
    grace_seconds: float = 30.0
    """From a stop request to the end of ranks that have not left."""
    ends_at_once: bool = False
    """Whether a stop signal ends the ranks instead of asking them to stop: they hold nothing that could be lost."""
    log_file: Callable[[int], Path] | None = None
    """Where the output of rank n goes; None: where this process's goes."""
    announce: Callable[[str | Failure], None] = say

    def run(self, entry: Entry) -> Outcome:
        """Run `entry(place)` on every rank and wait for the end of all. Under 'spawn', `entry` must be picklable."""
        with ExitStack() as stack:
            stop = stack.enter_context(closing(SharedFile("stop")))
            page = stack.enter_context(closing(StopPage(stop.path)))
            signals = stack.enter_context(StopSignals(page.request))
            before: list[Failure] = []
            while True:
                outcome = self._attempt(entry, len(before), stop, page, signals)
                failure = outcome.failure
                is_last = failure is None or failure.is_users or failure.is_final or len(before) == self.max_restarts
                if failure is None or is_last:
                    return replace(outcome, before=before)
                if signals.name is not None:  # it is the stop that ends the run, which would have gone on after the failure
                    reason = f"stopped by {signals.name}, before another start after: {outcome.reason}"
                    self.announce(f"{signals.name}: the run stops instead of starting again")
                    return replace(outcome, exit_code=signals.exit_code, reason=reason, before=before)
                before.append(failure)
                self.announce(failure)
                self.announce(f"starting all ranks again ({len(before)} of {self.max_restarts}, launch.max_restarts)")

    def _attempt(self, entry: Entry, attempt: int, stop: SharedFile, page: StopPage, signals: StopSignals) -> Outcome:
        """One start of all ranks, on a rendezvous of its own, to the end of all."""
        ranks: list[RankProcess] = []
        with closing(SharedFile("store")) as store:
            try:
                with _frozen_heap():
                    for rank in range(self.world_size):
                        ranks.append(self._start(rank, attempt, entry, store, stop))
                cut_short = self._watch(ranks, signals)
                if cut_short is None:
                    wait_all(ranks, LEAVE_SECONDS)
                failure = first_failure(ranks)
                if failure is not None:
                    failure = failure.waiting_for([rank.rank for rank in ranks if rank.poll() is None])
                end(ranks)
                results = [(rank.answer() or (None, None))[1] for rank in ranks]
            finally:
                end(ranks)
                for process in ranks:
                    process.close()
        if cut_short is not None:
            return Outcome(signals.exit_code, cut_short, None, results)
        if failure is not None:
            code = USER_ERROR if failure.is_users else FAILED
            return Outcome(code, f"rank {failure.rank}: {failure.kind}: {failure.message}", failure, results)
        if page.was_seen or (self.ends_at_once and signals.name is not None):
            return Outcome(signals.exit_code, f"stopped by {signals.name}", None, results)
        return Outcome(DONE, "", None, results)

    def _start(self, rank: int, attempt: int, entry: Entry, store: SharedFile, stop: SharedFile) -> RankProcess:
        result = SharedFile(f"rank-{rank}")
        assignment = Assignment(
            rank=rank,
            world_size=self.world_size,
            launcher=self.start_method,
            attempt=attempt,
            supervisor=os.getpid(),
            threads=self.threads,
            store=store.path,
            stop=stop.path,
            result=result.path,
            log_file=self.log_file(rank) if self.log_file is not None else None,
        )
        return RankProcess(assignment, entry, result)

    def _watch(self, ranks: Sequence[RankProcess], signals: StopSignals) -> str | None:
        """Wait until all are done or one has failed. Returns why they must be ended before, if they must."""
        announced = False
        while alive := [rank for rank in ranks if rank.poll() is None]:
            if first_failure([rank for rank in ranks if rank.status is not None]) is not None:
                return None
            if signals.name is not None and self.ends_at_once:
                return f"stopped by {signals.name}"
            if signals.name is not None and not announced:
                self.announce(f"{signals.name}: the run stops after its step (Ctrl-C ends it at once)")
                announced = True
            if signals.wants_end:
                return f"ended at once by a second signal after {signals.name}"
            if signals.name is not None and time.monotonic() - signals.asked_at > self.grace_seconds:
                return f"{signals.name}: ended after launch.grace_seconds={self.grace_seconds:g}, without stopping on its own"
            RankProcess.wait_any(alive, POLL_SECONDS)
        return None


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the collector of forked ranks away from inherited objects: touching them would copy their pages."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
