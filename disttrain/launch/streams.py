"""The three standard streams of a process, as one may find them."""

from __future__ import annotations

import io
import os
import sys


def settle_streams() -> None:
    """Let every stream take what is written, whatever this process was started with.

    One that is closed (`>&-`) leads nowhere from now on: the next file that is opened would get its number, and what is printed.
    A character that the encoding of the terminal lacks becomes a question mark.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (open as long as the process lives)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
