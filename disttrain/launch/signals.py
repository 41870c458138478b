"""Signals of the process that owns a run: they ask for a stop instead of ending it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from disttrain.launch.outcome import INTERRUPTED, PREEMPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send to warn of an end."""


ONE_PRESS_SECONDS = 0.5
"""A Ctrl-C this soon after the first is the same one: it came to the process by itself, and with its group."""


class StopAsked(KeyboardInterrupt):
    """A stop signal came while nothing is running that could stop at a step. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """That of a run which the signal ended."""
        return exit_code_of(signal.Signals(self.number).name)


def exit_code_of(name: str) -> int:
    """The exit code of a run that the signal of this name ended."""
    return INTERRUPTED if name == "SIGINT" else PREEMPTED


@contextmanager
def stop_raises() -> Iterator[None]:
    """A stop signal raises StopAsked in the block, instead of ending the process without a word."""

    def ask(number: int, frame: FrameType | None) -> None:
        raise StopAsked(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stops_ignored() -> Iterator[None]:
    """A stop signal does nothing in the block, which is short and must come to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """While entered, a stop signal is noted and passed on to `request`. A Ctrl-C after it asks for an end at once.

    Python lets only the main thread listen; entered in another one, it does nothing.
    """

    def __init__(self, request: Callable[[int], None]) -> None:
        """`request(number)` is called once, inside the signal handler."""
        self.name: str | None = None
        """Of the signal that asked first."""
        self.asked_at = 0.0
        """Its monotonic time."""
        self.wants_end = False
        self._request = request
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self.asked_at = signal.Signals(number).name, time.monotonic()
            self._request(number)
        elif number == signal.SIGINT and time.monotonic() - self.asked_at > ONE_PRESS_SECONDS:
            self.wants_end = True

    @property
    def exit_code(self) -> int:
        """That of a run which the signal stopped."""
        return exit_code_of(self.name or "")
