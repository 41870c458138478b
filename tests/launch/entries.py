"""Functions that spawned ranks import."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from disttrain.config.schema import Config
from disttrain.errors import DataError, DivergedError
from disttrain.launch.place import Place
from disttrain.record import RunFolder
from disttrain.texts import write_json
from tests.launch.processes import sign_in


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


def ends_well(config: Config, folder: RunFolder | None, place: Place) -> None:
    """Nothing to do."""


def raises_at_step_3(config: Config, folder: RunFolder | None, place: Place) -> None:
    for step in range(10):
        if step == 3 and place.rank == 1:
            raise ValueError("planted at step 3")
        dist.all_reduce(torch.ones(2))


def saves_and_diverges(config: Config, folder: RunFolder | None, place: Place) -> None:
    saves_and_raises(config, folder, place, DivergedError)


def saves_and_raises(config: Config, folder: RunFolder | None, place: Place, kind: type[Exception] = ValueError) -> None:
    assert folder is not None
    (folder.checkpoints / "step-2").mkdir(parents=True)
    raise kind("planted behind a checkpoint")


def never_comes(config: Config, folder: RunFolder | None, place: Place) -> None:
    if place.rank == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(2))


def users_mistake(config: Config, folder: RunFolder | None, place: Place) -> None:
    raise DataError("found three samples", "dataset.size=4")


def listens(config: Config, folder: RunFolder | None, place: Place) -> None:
    """Stays until it is told to stop, so that one can look at it from outside."""
    assert folder is not None
    sign_in(folder.subfolder("pids"))
    asked = torch.zeros(())
    while not asked:
        asked = torch.tensor(float(place.stop_requested() is not None))
        dist.all_reduce(asked)
        time.sleep(0.02)


def count_call(config: Config) -> None:
    """Preparation of data that notes each call."""
    with open(config.paths.data, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def refuse(config: Config) -> None:
    raise DataError("no network", "put files into paths.data")
