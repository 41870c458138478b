"""Where a rank stands, and by what it reaches the others: the same under fork, spawn, torchrun and srun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch._C._distributed_c10d import Store


@dataclass
class Place:
    """One rank's place in the world."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    """'fork', 'spawn', 'torchrun', 'slurm' or 'alone'."""
    make_store: Callable[[timedelta], Store] | None
    """Opens the store that the process group meets at; None for a world of one."""
    stop_requested: Callable[[], str | None]
    """Name of the signal that asked this run to stop, if one did; cheap enough to ask every step."""
    log_file: Path | None = None
    attempt: int = 0
    """How often this run was restarted after a failure: above 0, go on from its own newest checkpoint."""


def alone() -> Place:
    """This process as a world of one, for a Trainer outside any launch."""
    return Place(0, 1, 0, 1, "alone", None, lambda: None)
