"""The callback by which a run of `kill.py` dies inside a save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer

OPERATIONS = ("open", "write", "fsync", "rename", "mkdir")


class Kill(Callback):
    """Counts what this rank's writer asks of the disk, and kills at one of these operations, once in the life of `once`."""

    def __init__(self, rank: int = 0, operation: int | None = None, victim: str = "rank", once: str = "") -> None:
        self.rank, self.operation, self.victim, self.once = rank, operation, victim, Path(once)
        self.count = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Stand between the writer and the system."""
        for name in OPERATIONS:
            setattr(os, name, partial(self._call, trainer.mesh.rank, getattr(os, name)))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Leave the count."""
        self.once.with_name(f"operations-{trainer.mesh.rank}").write_text(str(self.count))

    def _call(self, rank: int, plain: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            self.count += 1
            if (rank, self.count) == (self.rank, self.operation) and not self.once.exists():
                self.once.touch()
                os.kill(os.getppid() if self.victim == "parent" else os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)
