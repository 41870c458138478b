"""What can go wrong, in the words of the person who can mend it.

`UserError` and its kin carry one message (what was found, what is allowed, which override mends it) and end
the program with exit code 2, without a traceback. Everything else is a fault of the run and exits 1.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend. `remedy` is an override or a command that can be pasted."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}\n  try: {self.remedy}"

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str | None]]:
        return type(self), (self.message, self.remedy)


class ConfigError(UserError):
    """The config asks for something that does not exist or does not fit together."""


class DataError(UserError):
    """The data is missing, too small or not what the config says."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model."""


class LaunchError(UserError):
    """The world that was launched is not the one that was asked for."""


class MissingExtraError(UserError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, what_for: str) -> None:
        super().__init__(f"{what_for} needs the package '{package}', which is not installed", f"pip install 'disttrain[{extra}]'")
        self.given = (package, extra, what_for)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), self.given
