"""What passes between the supervisor and its ranks: files without a name, and one page of shared memory.

On Linux they are anonymous memory, which ranks open as `/proc/<supervisor>/fd/<n>`: nothing is left on any disk,
not even when every process is killed. Elsewhere they are temporary files. Results and entries are pickled: they
go from one live process of ours to another and are never stored.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import tempfile
from typing import Any


class SharedFile:
    """A file that this process and its ranks can open by `path`; gone when this process closes it or ends."""

    def __init__(self, name: str) -> None:
        """`name` is for people who look at open files."""
        self._is_anonymous = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
        if self._is_anonymous:
            self._handle = os.memfd_create(f"disttrain-{name}")
            self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        else:
            self._handle, self.path = tempfile.mkstemp(prefix=f"disttrain-{name}-")

    def read(self) -> Any:
        """The value written last, or None."""
        return read(self.path)

    def write(self, value: Any) -> None:
        """Write `value` for the ranks to `read`."""
        write(self.path, value)

    def close(self) -> None:
        """Let it go."""
        os.close(self._handle)
        if not self._is_anonymous:
            os.unlink(self.path)


def write(path: str, value: Any) -> None:
    """Write `value` for `SharedFile.read` on the other side. What can't be pickled raises before a byte is written."""
    data = pickle.dumps(value)
    with open(path, "wb") as file:
        file.write(data)


def read(path: str) -> Any:
    """The value written last to a shared file, or None."""
    with open(path, "rb") as file:
        data = file.read()
    return pickle.loads(data) if data else None


def dump(value: Any) -> bytes:
    """`value` pickled, to be undone by `load` in another process of ours."""
    return pickle.dumps(value)


def load(data: bytes) -> Any:
    """The inverse of `dump`."""
    return pickle.loads(data)


class StopPage:
    """One stop request from the supervisor to all ranks: a byte in shared memory, cheap enough to read every step."""

    _SIGNAL, _SEEN = 0, 1

    def __init__(self, path: str) -> None:
        """Map the file at `path`; the supervisor and every rank map the same."""
        with open(path, "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def request(self, number: int) -> None:
        """Ask all ranks to stop, on behalf of this signal. Safe in a signal handler."""
        self._page[self._SIGNAL] = number

    def requested(self) -> str | None:
        """Name of the signal, if a stop was asked for. A rank that asks and hears of it marks it as seen."""
        number = self._page[self._SIGNAL]
        if not number:
            return None
        self._page[self._SEEN] = 1
        return signal.Signals(number).name

    @property
    def was_seen(self) -> bool:
        """Whether some rank has heard of the request."""
        return bool(self._page[self._SEEN])

    def close(self) -> None:
        """Unmap it."""
        self._page.close()
