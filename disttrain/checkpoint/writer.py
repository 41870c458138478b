"""A rank's thread that writes checkpoints beside the training.

It writes one save at a time, at the lowest priority, in blocks with pauses between them, and asks no other rank: when a
rank's files are on the disk it leaves a receipt beside them (checksums, values of its own), and rank 0's thread gives
the folder its final name when it has seen every receipt. No collective is called here, so none of the training's can
be disturbed or waited for.

    main thread     copy, submit -------------------- copy, submit ------------------- drain
    this thread             | files, fsync, receipt |         | files, fsync, receipt |
    rank 0 also                                       | all receipts: manifest, fsync, rename |
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disttrain.checkpoint import files
from disttrain.checkpoint.files import Entry
from disttrain.checkpoint.memory import FilePlan, HostCopy
from disttrain.places import is_remote

BLOCK = 1 << 21
"""Bytes written between two pauses."""
PAUSE = 1.0
"""Pause after a block, as a share of the time it took: half of one core's time at most."""
POLL_SECONDS, HURRIED_POLL_SECONDS = 0.1, 0.01
RECEIPTS = "receipts"
LOWEST = 19
"""Nice value."""


@dataclass
class Job:
    """One save of one rank."""

    step: int
    folder: Path
    """Its final name; the name until then is `files.partial_path(folder, token)`."""
    token: str
    rank: int
    num_ranks: int
    copy: HostCopy
    plan: list[FilePlan]
    own: Mapping[str, Any]
    """Values of this rank for the others' receipts."""
    values: Mapping[str, Any]
    """Values that all ranks share; rank 0 writes them."""
    num_bytes: int
    """What is written here; on rank 0, what all ranks write together."""
    written: threading.Event = field(default_factory=threading.Event)
    """This rank's files are on the disk, or failed: the copy may be overwritten."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Rank 0: the checkpoint has its final name, or never will. Others: as `written`."""
    error: str | None = None
    given_up: str | None = None
    """Set from outside: why rank 0 is not to wait for the others any longer."""

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return files.partial_path(self.folder, self.token)


class Writer:
    """The thread. `hurry` set: without pauses."""

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job | Callable[[], None]) -> None:
        """Write this save, or do this, as soon as what came before is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread, once it has written what was submitted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # of this thread alone, on Linux
        unsealed: list[Job] = []
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=self._patience() if unsealed else None)
                if job is None:
                    return
                if not isinstance(job, Job):
                    job()
                elif self._write(job) and job.rank == 0:
                    unsealed.append(job)
                else:
                    job.ended.set()
            unsealed = [job for job in unsealed if not _seal_if_complete(job)]

    def _patience(self) -> float:
        """Until rank 0 looks for receipts again."""
        return HURRIED_POLL_SECONDS if self.hurry.is_set() else POLL_SECONDS

    def _write(self, job: Job) -> bool:
        """This rank's files and its receipt; what goes wrong is in `job.error`, and in the receipt if that can be written."""
        try:
            receipt: dict[str, Any] = {"entries": [vars(entry) for entry in self._write_files(job)], **job.own}
        except Exception as error:
            job.error = describe(error)
            receipt = {"error": job.error}
        finally:
            job.written.set()
        try:
            _leave_receipt(job, receipt)
        except OSError as error:
            job.error = job.error or describe(error)
        return job.error is None

    def _write_files(self, job: Job) -> list[Entry]:
        if not is_remote(job.partial):
            _receipt_path(job, 0).parent.mkdir(parents=True, exist_ok=True)
        files.check_space(job.partial, job.num_bytes)
        entries = []
        for file in job.plan:
            path = job.partial / file.path
            if not is_remote(path):
                path.parent.mkdir(exist_ok=True)
            entries.append(files.write_blocks(path, job.partial, self._paced(file.header, job.copy.bytes_of(file))))
        return entries

    def _paced(self, *parts: bytes | memoryview) -> files.Blocks:
        """The parts in blocks, with a pause after each that a hurry cuts short."""
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), BLOCK):
                before = time.perf_counter()
                yield view[start : start + BLOCK]
                if not self.hurry.is_set():
                    self.hurry.wait(PAUSE * (time.perf_counter() - before))


def describe(error: Exception) -> str:
    """An error in words."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _receipt_path(job: Job, rank: int) -> Path:
    return job.partial / f"{RECEIPTS}-{job.token}" / f"rank-{rank}.json"


def _leave_receipt(job: Job, receipt: dict[str, Any]) -> None:
    """Written under another name first: rank 0 never reads half of one."""
    path = _receipt_path(job, job.rank)
    if is_remote(path):
        files.write_json(path, receipt)
        return
    unfinished = path.with_name(f".{path.name}")
    files.write_json(unfinished, receipt)
    os.rename(unfinished, path)


def _seal_if_complete(job: Job) -> bool:
    """Rank 0: make the written folder a checkpoint once every rank has left its receipt. Whether it is over, well or not."""
    try:
        if job.given_up is None and not all(_receipt_path(job, rank).is_file() for rank in range(job.num_ranks)):
            return False
        if job.given_up is not None:
            raise OSError(job.given_up)
        _seal(job)
    except Exception as error:
        job.error = describe(error)
        with contextlib.suppress(OSError):
            files.remove_tree(job.partial)
    job.ended.set()
    return True


def _seal(job: Job) -> None:
    receipts = [files.read_json(_receipt_path(job, rank)) for rank in range(job.num_ranks)]
    for rank, receipt in enumerate(receipts):
        if "error" in receipt:
            raise OSError(f"rank {rank}: {receipt['error']}")
    entries = [Entry(**line) for receipt in receipts for line in receipt["entries"]]
    values = dict(job.values)
    if receipts[0].get("by_rank") is not None:
        values["by_rank"] = [receipt["by_rank"] for receipt in receipts]
    if receipts[0].get("by_name") is not None:
        values["by_name"] = _merged([receipt["by_name"] for receipt in receipts])
    files.remove_tree(_receipt_path(job, 0).parent)
    files.commit(job.partial, job.folder, values, entries)


def _merged(parts: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What each rank says of the names that it holds, together; of several the first rank's word."""
    merged: dict[str, dict[str, Any]] = {}
    for part in reversed(parts):
        for kind, by_name in part.items():
            merged.setdefault(kind, {}).update(by_name)
    return merged
