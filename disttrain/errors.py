"""What can go wrong, in the words of the person who can mend it.

`UserError` and its kin carry one message (what was found, what is allowed, which override mends it) and end
the program with exit code 2, without a traceback. Everything else is a fault of the run and exits 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SAME_AGAIN = "another start would come to the same end"
"""Noted on an error that is not the user's and that a restart can't mend."""


class UserError(Exception):
    """A mistake that the user can mend. `remedy` is an override or a command that can be pasted."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}\n  try: {self.remedy}"

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str | None], dict[str, Any]]:
        return type(self), (self.message, self.remedy), self.__dict__  # notes, too


class ConfigError(UserError):
    """The config asks for something that does not exist or does not fit together."""


class DataError(UserError):
    """The data is missing, too small or not what the config says."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model."""


class LaunchError(UserError):
    """The world that was launched is not the one that was asked for."""


class DivergedError(ArithmeticError):
    """All ranks agree that the run has come to nothing: its loss is not finite. A fault of the run, whose message is enough."""


class MissingExtraError(UserError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, what_for: str) -> None:
        super().__init__(f"{what_for} needs the package '{package}', which is not installed", f"pip install 'disttrain[{extra}]'")
        self.given = (package, extra, what_for)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str], dict[str, Any]]:  # type: ignore[override]
        return type(self), self.given, self.__dict__


@contextmanager
def same_at_every_start() -> Iterator[None]:
    """An error raised in here ends the run, whatever restarts are left; one of the system (a disk, a network) may pass."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (UserError, OSError)):
            error.add_note(SAME_AGAIN)
        raise


_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's memory has run out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or bool(_OUT_OF_MEMORY.search(str(error)))
