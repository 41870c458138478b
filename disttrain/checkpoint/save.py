"""Saving a run beside its training: the loop pays for a copy to host memory, a thread on each rank writes it.

Two copies are kept and used in turn. While one save is being written the next may wait in the other; a third waits
in the loop until the first is on this rank's disk. A save that fails anywhere leaves the checkpoints before it as they are.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint import files
from disttrain.checkpoint.memory import HostCopy, Plan
from disttrain.checkpoint.retain import remove
from disttrain.checkpoint.state import State
from disttrain.checkpoint.writer import Job, Writer
from disttrain.parallel.collectives import gather_json
from disttrain.parallel.mesh import Mesh

VISIBLE_SECONDS = 60.0
"""How late a shared file system may show rank 0 what another rank has written."""
NUM_COPIES = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """How a save ended. `error` says why there is no such checkpoint; None if there is."""

    step: int
    error: str | None


class Saver:
    """One rank's side of all saves of a run. What every rank must call is marked; nothing else here talks to another rank."""

    def __init__(self, checkpoints: Path, mesh: Mesh, device: torch.device | None = None) -> None:
        """Every rank. Checkpoints go to `checkpoints/step-<n>`; `device` is the state's."""
        self._checkpoints, self._mesh, self._device = checkpoints, mesh, device or torch.device("cpu")
        self._token = str(self._gather(secrets.token_hex(4))[0])
        self._writer = Writer()
        self._copies: list[HostCopy] = []
        self._plan: Plan | None = None
        self._jobs: list[Job] = []
        self._failures: list[tuple[int, str]] = []
        if mesh.rank == 0:
            files.clear_partial(checkpoints)

    def save(self, state: State, step: int) -> None:
        """Every rank. Copy `state` and have it written; returns when it is copied, so that training may go on.

        Values under 'by_rank' differ from rank to rank and are saved as a list; {kind: {name: values}} under 'by_name'
        are merged over ranks, which need not hold the same names.
        """
        if self._plan is None or not self._plan.fits(state):
            self._plan = Plan(state, self._mesh)
        copy = self._free_copy(self._plan.num_bytes)
        total = self._agree(self._plan.num_bytes)
        copy.take(state, self._plan)
        values: dict[str, Any] = json.loads(json.dumps(state.values))  # a copy, and what is no JSON is found here
        own = {key: values.pop(key, None) for key in ("by_rank", "by_name")}
        folder = self._checkpoints / files.step_name(step)
        needed = total if self._mesh.rank == 0 else self._plan.num_bytes
        job = Job(step, folder, self._token, self._mesh.rank, self._mesh.size, copy, self._plan.files, own, values, needed)
        self._jobs.append(job)
        self._writer.submit(job)

    def poll(self) -> list[Saved]:
        """What has ended since this was asked last, as far as this rank knows; rank 0 knows of all. No waiting."""
        told = []
        for job in [job for job in self._jobs if job.ended.is_set()]:
            self._jobs.remove(job)
            if job.error is not None:
                self._failures.append((job.step, job.error))
                told.append(Saved(job.step, job.error))
            else:
                told.append(Saved(job.step, None))
                if job.rank == 0:
                    self._look_ahead(job.num_bytes)
        return told

    def drain(self) -> list[Saved]:
        """Every rank. Wait for what is under way, without pauses, and agree on how it ended."""
        self._writer.hurry.set()
        for job in self._jobs:
            (job.written if job.rank == 0 else job.ended).wait()
        self._agree(0)
        deadline = time.monotonic() + VISIBLE_SECONDS
        for job in self._jobs:
            if not job.ended.wait(max(0.0, deadline - time.monotonic())):
                job.given_up = "rank 0 does not see the files of all ranks: do all machines share the run folder?"
                job.ended.wait()
        self._writer.hurry.clear()
        ended = {saved.step: saved.error for saved in self.poll()}
        ended |= dict(self._gather(list(ended.items()))[0])
        return [Saved(step, error) for step, error in ended.items()]

    def remove(self, steps: Sequence[int]) -> None:
        """Rank 0. Delete these checkpoints, beside the training too."""
        if steps:
            self._writer.submit(partial(remove, self._checkpoints, list(steps)))

    def leave(self, seconds: float) -> None:
        """This rank alone, after an error: let what is under way be finished, if it can be in `seconds`."""
        self._writer.hurry.set()
        deadline = time.monotonic() + seconds
        for job in self._jobs:
            job.ended.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let the thread and the memory go, after `drain`."""
        self._writer.close()
        self._copies = []

    def _free_copy(self, num_bytes: int) -> HostCopy:
        """Host memory that no save under way needs, once there is some: the one that was used longest ago."""
        in_use = [job.copy for job in self._jobs if not job.written.is_set()]
        if len(in_use) == NUM_COPIES:
            self._writer.hurry.set()
            oldest = next(job for job in self._jobs if not job.written.is_set())
            oldest.written.wait()
            self._writer.hurry.clear()
            in_use = [job.copy for job in self._jobs if not job.written.is_set()]
        free = [copy for copy in self._copies if not any(copy is used for used in in_use)]
        fitting = next((copy for copy in free if copy.num_bytes == num_bytes), None)
        if fitting is None:
            self._copies = [copy for copy in self._copies if any(copy is used for used in in_use)]
            fitting = HostCopy(num_bytes, self._device.type == "cuda")
            self._copies.append(fitting)
        return fitting

    def _agree(self, num_bytes: int) -> int:
        """Tell all what failed here, so that rank 0 gives it up instead of waiting for it. Returns the sum of `num_bytes`."""
        failed = [*self._failures, *((job.step, job.error) for job in self._jobs if job.error is not None)]
        told = self._gather({"failed": failed, "num_bytes": num_bytes})
        for rank, word in enumerate(told):
            for step, error in word["failed"]:
                for job in self._jobs:
                    if job.step == step and job.given_up is None:
                        job.given_up = f"rank {rank}: {error}"
        return sum(int(word["num_bytes"]) for word in told)

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._mesh.axis("world"), self._device)

    def _look_ahead(self, num_bytes: int) -> None:
        """Warn while there is still time, before the save that will not fit."""
        free = files.free_bytes(self._checkpoints)
        if free is not None and free < num_bytes:
            _log.warning(
                "%s has %.2f GB free and the next checkpoint needs %.2f GB: make room, or keep fewer (callbacks.checkpoint.keep_last)",
                self._checkpoints,
                free / 1e9,
                num_bytes / 1e9,
            )


def save(state: State, folder: Path, mesh: Mesh) -> None:
    """Write `state` as the checkpoint `folder` (`.../step-<n>`) and wait for it. Every rank calls it; OSError on all if it failed."""
    saver = Saver(folder.parent, mesh)
    step = files.step_of(folder.name)
    assert step is not None, f"{folder.name} is no name of a checkpoint"
    saver.save(state, step)
    ended = saver.drain()
    saver.close()
    for saved in ended:
        if saved.error is not None:
            raise OSError(f"{folder.name} was not saved: {saved.error}")
