"""Ends a run that hangs, and tells who did not come to where the others wait."""

from __future__ import annotations

import faulthandler
import json
import logging
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from disttrain.config.limits import check_limits
from disttrain.launch.rank import give_up
from disttrain.parallel import collectives
from disttrain.texts import write_json
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.parallel.step import Report
    from disttrain.train.trainer import Trainer

POLL_SECONDS = 0.2
GATHER_SECONDS = 2.0
"""For the watchdogs of all ranks to say where theirs stands; a rank that is stopped, or gone, never does."""
NUM_STEPS = 50
"""Steps whose median counts, and of which a tenth must be known before it does."""
FOLDER = "hang"

_log = logging.getLogger(__name__)


class HangError(RuntimeError):
    """A step takes far longer than any before."""


class Watchdog(Callback):
    """Looks on from a thread of each rank, and ends the run at a hang.

    That is a step of `factor` times the median of those before, and of `min_seconds` at least, or of `seconds` whatever
    came before. Each rank then writes the stacks of all its threads into its log and what its main thread is at into the
    run folder, NCCL's flight record too. All compare, and leave with one message that names the ranks which did not come.

    Evaluations, saves and the pauses between steps are held against `seconds` only.
    """

    def __init__(self, factor: float = 20.0, min_seconds: float = 60.0, seconds: float | None = None) -> None:
        """`seconds` null: no limit by itself."""
        check_limits("watchdog", {"factor": factor, "min_seconds": min_seconds, "seconds": seconds})
        self.factor, self.min_seconds, self.seconds = factor, min_seconds, seconds
        self._took: deque[float] = deque(maxlen=NUM_STEPS)
        self._since = time.monotonic()
        self._in_step = False
        self._over = threading.Event()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to watch."""
        self._since = time.monotonic()
        folder = trainer.folder.path / FOLDER if trainer.folder is not None else None
        if folder is not None:
            (folder / f"rank-{trainer.mesh.rank}.json").unlink(missing_ok=True)
        watch = (trainer, folder, threading.get_ident())
        threading.Thread(target=self._watch, args=watch, name="watchdog", daemon=True).start()

    def on_train_step_start(self, trainer: Trainer) -> None:
        """A step begins."""
        self._since, self._in_step = time.monotonic(), True

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """It is over."""
        now = time.monotonic()
        self._took.append(now - self._since)
        self._since, self._in_step = now, False

    def on_fit_end(self, trainer: Trainer) -> None:
        """Nothing to watch any longer."""
        self._over.set()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Nor here."""
        self._over.set()

    def limit(self) -> float:
        """Seconds that what this rank is at may take."""
        limit = torch.inf if self.seconds is None else self.seconds
        if self._in_step and len(self._took) >= NUM_STEPS // 10:
            limit = min(limit, max(self.min_seconds, self.factor * statistics.median(self._took)))
        return limit

    def _watch(self, trainer: Trainer, folder: Path | None, thread: int) -> None:
        while not self._over.wait(POLL_SECONDS):
            waited, limit = time.monotonic() - self._since, self.limit()
            if waited > limit:
                self._end(trainer, folder, where_is(sys._current_frames()[thread]), waited)

    def _end(self, trainer: Trainer, folder: Path | None, here: dict[str, Any], waited: float) -> None:
        faulthandler.dump_traceback(_log_stream(trainer), all_threads=True)
        rank, notes = trainer.mesh.rank, {trainer.mesh.rank: here}
        if folder is not None:
            folder.mkdir(exist_ok=True)
            write_json(folder / f"rank-{rank}.json", here)
            _keep_flight_record(folder / f"nccl-{rank}.json", trainer)
            deadline = time.monotonic() + GATHER_SECONDS
            while len(notes := _notes(folder)) < trainer.mesh.size and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 4)
        words = f"step {trainer.progress.step + 1} has not come to an end for {waited:.1f} s: {compare(notes, trainer.mesh.size)}"
        if not self._over.is_set():
            give_up(HangError(words))


def where_is(frame: FrameType | None) -> dict[str, Any]:
    """What a thread is at, from its innermost `frame`: the collective and its axis, if it is in one; else function and line."""
    place = "" if frame is None else f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    found: dict[str, Any] = {"at": place}
    while frame is not None:
        if frame.f_code.co_filename == collectives.__file__:
            pending = frame.f_locals.get("self")
            axis = frame.f_locals.get("axis", getattr(pending, "axis", None))
            name = getattr(pending, "collective", "") or frame.f_code.co_name
            found |= {"collective": name, "axis": None if axis is None else axis.name}
        frame = frame.f_back
    return found


def compare(notes: Mapping[int, Mapping[str, Any]], num_ranks: int) -> str:
    """Who waits where, and who did not come there; `notes` by rank, of those that said something."""
    waiting = {rank: _collective(note) for rank, note in notes.items() if "collective" in note}
    silent = [rank for rank in range(num_ranks) if rank not in notes]
    elsewhere = {rank: note["at"] for rank, note in notes.items() if rank not in waiting}
    parts = [f"{_ranks(silent)} did not come, without a word (stopped, or its machine is gone)"] if silent else []
    parts += [f"rank {rank} did not come, it is in {at}" for rank, at in elsewhere.items()]
    for what in dict.fromkeys(waiting.values()):
        parts.append(f"{_ranks([rank for rank, where in waiting.items() if where == what])} in {what}")
    return "; ".join(parts)


def _collective(note: Mapping[str, Any]) -> str:
    return str(note["collective"]).strip("_") + (f" over {note['axis']}" if note.get("axis") else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _notes(folder: Path) -> dict[int, dict[str, Any]]:
    """What ranks have said so far."""
    return {int(path.stem.removeprefix("rank-")): json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")}


def _log_stream(trainer: Trainer) -> Any:
    """Where this rank's stacks go: its log, else its stderr."""
    if trainer.folder is not None and trainer.folder.log_file(trainer.mesh.rank).parent.is_dir():
        return trainer.folder.log_file(trainer.mesh.rank).open("a", encoding="utf-8")
    return sys.__stderr__


def _keep_flight_record(path: Path, trainer: Trainer) -> None:
    """The last collectives as NCCL's flight recorder has them, in its JSON form."""
    if trainer.device.type == "cuda":
        dump = torch._C._distributed_c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
        path.write_bytes(dump(includeCollectives=True, onlyActive=False))
