"""How a world of ranks ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disttrain.errors import UserError

DONE, FAILED, USER_ERROR, INTERRUPTED, PREEMPTED = 0, 1, 2, 130, 143
"""Exit codes."""

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
    raised_at: float = 0.0
    """Monotonic time of this machine, to tell cause from consequence."""

    def __str__(self) -> str:
        """What is shown, once."""
        if self.is_users:
            return self.message
        lines = [self.traceback.rstrip()] if self.traceback else []
        lines.append(f"{'the launch' if self.rank is None else f'rank {self.rank}'} failed: {self.kind}: {self.message}")
        if self.log_file is not None:
            lines.append(f"its log: {self.log_file}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """How a world ended: exit code, the reason in words, what the ranks returned."""

    exit_code: int
    reason: str = ""
    failure: Failure | None = None
    results: list[Any] = field(default_factory=list)
    """By rank; None for a rank that returned nothing, or had no time to."""
    num_restarts: int = 0
    folder: Path | None = None
    """The run folder, if there is one."""

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
