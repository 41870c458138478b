"""How a world of ranks ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disttrain.errors import DivergedError, UserError

DONE, FAILED, USER_ERROR, INTERRUPTED, PREEMPTED = 0, 1, 2, 130, 143
"""Exit codes."""
UNREAD = 141
"""The one where whoever read what is printed has left, as `| head` does: what a shell makes of SIGPIPE."""

_TIME_OUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)
_CLOSED = re.compile(r"connection (was )?(closed|reset|refused|lost)|broken pipe|socket closed|remote process exited", re.IGNORECASE)

STATUS = {DONE: "done", FAILED: "failed", USER_ERROR: "user_error", INTERRUPTED: "interrupted", PREEMPTED: "preempted"}


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong on a rank."""

    rank: int | None
    """None: before any rank started."""
    kind: str
    """Name of the exception's class, or what ended the process without one."""
    message: str
    traceback: str = ""
    """Empty for a user's mistake and for a process that ended without an exception."""
    log_file: str | None = None
    is_users: bool = False
    is_final: bool = False
    """Whether another start would come to the same end."""
    raised_at: float = 0.0
    """Monotonic time of this machine, to tell cause from consequence."""

    def __str__(self) -> str:
        """The traceback, if there is one, and the words below it."""
        return f"{self.traceback.rstrip()}\n{self.words}" if self.traceback else self.words

    def waiting_for(self, absent: Sequence[int], hosts: Sequence[str] = ()) -> Failure:
        """The same, naming the ranks that did not come to where this one waited, if its time ran out there.

        With `hosts`, by rank, their machines too. Then a connection that was closed counts as well: nobody here sees a process there end.
        """
        pattern = (_TIME_OUT, _CLOSED) if hosts else (_TIME_OUT,)
        if not absent or not any(one.search(self.message) for one in pattern):
            return self
        who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        where = f" on {', '.join(dict.fromkeys(hosts[rank] for rank in absent))}" if hosts else ""
        end = "still busy elsewhere, gone or cut off" if hosts else "still busy elsewhere or gone"
        return replace(self, message=f"waited in vain for {who}{where}, {end}: {self.message.splitlines()[0]}")

    @property
    def words(self) -> str:
        """What is shown, once."""
        if self.is_users:
            return self.message
        if self.kind == DivergedError.__name__:
            return f"the run has diverged: {self.message}"
        who = "the launch" if self.rank is None else f"rank {self.rank}"
        where = "" if self.log_file is None else f"\nits log: {self.log_file}"
        return f"{who} failed: {self.kind}: {self.message}{where}"


@dataclass(frozen=True)
class Outcome:
    """How a world ended: exit code, the reason in words, what the ranks returned."""

    exit_code: int
    reason: str = ""
    failure: Failure | None = None
    results: list[Any] = field(default_factory=list)
    """By rank; None for a rank that returned nothing, or had no time to."""
    before: list[Failure] = field(default_factory=list)
    """What ended each start before the last."""
    folder: Path | None = None
    """The run folder, if there is one."""

    @property
    def failures(self) -> list[Failure]:
        """What ended each start, in order; the last one may have ended well."""
        return [*self.before, *([self.failure] if self.failure is not None else [])]

    @property
    def num_restarts(self) -> int:
        """Starts after the first."""
        return len(self.before)

    @property
    def status(self) -> str:
        """`done`, `failed`, `user_error`, `interrupted` or `preempted`."""
        return STATUS[self.exit_code]

    @property
    def result(self) -> Any:
        """What rank 0 returned."""
        return self.results[0] if self.results else None

    def raise_failure(self) -> None:
        """Raise UserError or WorldError unless the world is done."""
        if self.failure is not None and self.failure.is_users:
            raise UserError(self.failure.message)
        if self.exit_code != DONE:
            raise WorldError(self)


class WorldError(RuntimeError):
    """A world of ranks did not end well; `outcome` tells more."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.failure) if outcome.failure else outcome.reason)
        self.outcome = outcome
