"""Functions that spawned ranks import."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from disttrain.config.schema import Config
from disttrain.launch.place import Place
from disttrain.record import RunFolder, write_json


def plus(place: Place, number: int) -> tuple[int, str]:
    return place.rank + number, place.launcher


def where(config: Config, folder: RunFolder | None, place: Place) -> dict[str, Any]:
    """What this rank sees of its world, also written into the run folder."""
    total = torch.full((), float(place.rank))
    dist.all_reduce(total)
    assert folder is not None
    seen = {
        "rank": place.rank,
        "launcher": place.launcher,
        "folder": str(folder.path),
        "threads": torch.get_num_threads(),
        "total": float(total),
        "environment": {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "OMP_NUM_THREADS", "PLANTED")},
    }
    write_json(folder.path / f"seen-{place.rank}.json", seen)
    return {"metrics": {"total": float(total)}}


def raises_at_step_3(config: Config, folder: RunFolder | None, place: Place) -> None:
    for step in range(10):
        if step == 3 and place.rank == 1:
            raise ValueError("planted at step 3")
        dist.all_reduce(torch.ones(2))
