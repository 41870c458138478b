"""Signals of the process that owns a run: they ask for a stop instead of ending it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from disttrain.launch.outcome import INTERRUPTED, PREEMPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send to warn of an end."""


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
        elif number == signal.SIGINT:
            self.wants_end = True

    @property
    def exit_code(self) -> int:
        """That of a run which the signal stopped."""
        return INTERRUPTED if self.name == "SIGINT" else PREEMPTED
