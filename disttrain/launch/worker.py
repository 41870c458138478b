"""What a rank does whoever launched it: device, threads, process group, then its entry; the group last."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain.config.frozen import thaw
from disttrain.config.schema import Config
from disttrain.errors import LaunchError
from disttrain.launch.place import Place
from disttrain.launch.rank import load_function
from disttrain.parallel.collectives import barrier
from disttrain.parallel.mesh import Axis
from disttrain.record import RunFolder

JobEntry = Callable[[Config, RunFolder | None, Place], Any]
"""What a job runs on every rank. It returns JSON values; rank 0's end up in result.json."""


def rank_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: by its number on this machine, never by the one in the world. Made current."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible here",
            "launch.device=cpu, or fewer ranks a machine",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join_group(place: Place, device: torch.device, backend: str = "auto", timeout_seconds: float = 600.0) -> None:
    """Make the world's process group, on the store of `place`. Every rank must call it; a world of one needs none."""
    if place.make_store is None:
        return
    if backend == "auto":
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend,
        store=place.make_store(timeout),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def leave_group() -> None:
    """Leave together and let the group go. Only after success: with a rank missing, this would wait for it."""
    if not dist.is_initialized():
        return
    size = dist.get_world_size()
    barrier(Axis("world", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD))
    dist.destroy_process_group()


def run_job(place: Place, text: str, folder: Path | None, entry: str) -> Any:
    """A rank's part of a job: the frozen config `text`, the run folder's path, the entry's name. Returns its result."""
    config = thaw(text)
    device = rank_device(config.launch.device, place.local_rank)
    join_group(place, device, config.launch.backend, config.launch.timeout_seconds)
    record = RunFolder(folder) if folder is not None else None
    job: JobEntry = load_function(entry)
    result = job(config, record, place)
    if record is not None:
        record.close()
    leave_group()
    return result


def run_in_group(place: Place, entry: Callable[..., Any], args: tuple[Any, ...], device: str, timeout_seconds: float) -> Any:
    """`entry(place, *args)` inside a process group; what `run_world` runs on a rank."""
    join_group(place, rank_device(device, place.local_rank), timeout_seconds=timeout_seconds)
    result = entry(place, *args)
    leave_group()
    return result
