"""What the processor, the device and the network do during a few steps, on all ranks beside each other."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from disttrain.callbacks import trace
from disttrain.callbacks.ranges import Ranges
from disttrain.callbacks.trace import Span
from disttrain.config.limits import check_limits
from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.mesh import AXES, Mesh
from disttrain.parallel.timing import offset
from disttrain.parallel.watch import unwatch, watch
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.parallel.step import Report
    from disttrain.train.trainer import Trainer

KEY = "callbacks.profile"
TOOLS = ("torch", "nvtx")
ALL_RANKS = 16
"""Ranks that are all recorded where nobody says which; of more, the first one of each pipeline stage."""
MOST_ALLOCATIONS = 1 << 20
"""Allocations that CUDA's memory history keeps."""

_log = logging.getLogger(__name__)


class Profile(Callback):
    """Records `steps` steps after `start`, and marks steps, micro-batches, a pipeline's actions and collectives by axis in them.

    `tool: torch` is torch's profiler. The run folder gets `profile/trace.json.gz`, all ranks' traces as one (`trace.py`), for
    https://ui.perfetto.dev; beside it each rank's own, `rank-<n>.trace.json.gz`, and its dearest operations, `rank-<n>.txt`.
    `tool: nvtx` records nothing itself: it opens NVTX ranges, and the window of
    `nsys profile --capture-range=cudaProfilerApi`, for which the whole run costs nothing but these steps.
    """

    def __init__(
        self,
        start: int = 10,
        steps: int = 3,
        ranks: Sequence[int] | None = None,
        memory: bool = False,
        tool: Literal["torch", "nvtx"] = "torch",
    ) -> None:
        """`start`: steps taken before the first one recorded, in this start of the run, fewer where it ends before.

        `ranks`: who records, null: see `ALL_RANKS`. `memory`: allocations too, as a curve in the trace, and on CUDA with the
        lines of code that made them, in `rank-<n>.memory.json.gz` (torch's memory snapshot).
        """
        check_limits("profile", {"start": start, "steps": steps})
        if tool not in TOOLS:
            raise ConfigError(f"{KEY}.tool is '{tool}'; it may be {', '.join(TOOLS)}", f"{KEY}.tool=torch")
        self.start, self.steps, self.memory, self.tool = start, steps, memory, tool
        self.ranks = None if ranks is None else tuple(sorted(set(ranks)))
        self._profiler: Any = None
        self._ranges = Ranges(tool)
        self._first = self._last = 0
        self._is_open = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count from where this start of the run begins. ConfigError for ranks that don't exist, and for NVTX without CUDA."""
        world = trainer.mesh.size
        self._first = max(trainer.progress.step, min(trainer.progress.step + self.start, trainer.num_steps - self.steps))
        self._last = self._first + self.steps
        if self.ranks is None:
            self.ranks = tuple(range(world)) if world <= ALL_RANKS else _first_of_stages(trainer.mesh)
        if wrong := [rank for rank in self.ranks if not 0 <= rank < world]:
            raise ConfigError(f"{KEY}.ranks names {wrong}, and the ranks are 0 to {world - 1}", f"{KEY}.ranks=[0]")
        if self.tool == "nvtx" and trainer.device.type != "cuda":
            raise ConfigError(f"{KEY}.tool=nvtx marks ranges for nsys, and the run is on {trainer.device.type}", f"{KEY}.tool=torch")

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Begin with the first step to record, all ranks at once; mark each."""
        if trainer.progress.step == self._first:
            self._is_open = True
            if self._records(trainer):
                self._begin(trainer)
            collectives.barrier(trainer.mesh.axis("world"))
        if self._is_open and self._records(trainer):
            self._ranges.begin(Span("step", f"step {trainer.progress.step + 1}"))

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """End after the last one, with what the device still has to do."""
        if self._is_open and self._records(trainer):
            self._ranges.end()
        if self._is_open and trainer.progress.step >= self._last:
            self._finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """End early where the run does."""
        if self._is_open:
            self._finish(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Listen no longer, and record nothing."""
        unwatch(self._ranges)
        if self._profiler is not None:
            with contextlib.suppress(RuntimeError):
                self._profiler.stop()
            self._profiler = None

    def _records(self, trainer: Trainer) -> bool:
        return self.ranks is not None and trainer.mesh.rank in self.ranks and (self.tool == "nvtx" or trainer.folder is not None)

    def _begin(self, trainer: Trainer) -> None:
        on_cuda = trainer.device.type == "cuda"
        if self.tool == "nvtx":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if not on_cuda:  # Kineto would complain of that on every rank
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            if on_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self.memory and on_cuda:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            self._profiler = torch.profiler.profile(activities=activities, profile_memory=self.memory, record_shapes=True)
            self._profiler.start()
            with torch.profiler.record_function(trace.clock_mark(time.perf_counter_ns())):
                pass
        watch(self._ranges)

    def _finish(self, trainer: Trainer) -> None:
        """Every rank calls it. Those that record write their own traces, and rank 0 all of them as one."""
        began = time.perf_counter()
        self._is_open = False
        unwatch(self._ranges)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        if self.tool == "nvtx":
            if self._records(trainer):
                torch.cuda.profiler.stop()
            return
        if trainer.folder is None or self.ranks is None:
            return
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._write(trainer, profiler, trainer.folder.subfolder("profile"))
        world = trainer.mesh.axis("world")
        behind = collectives.gather_json(offset(world, trainer.device), world, trainer.device)  # and now all files are there
        if trainer.is_lead:
            self._merge(trainer, trainer.folder.subfolder("profile"), behind)
        trainer.window.leave_out(time.perf_counter() - began)

    def _write(self, trainer: Trainer, profiler: Any, folder: Path) -> None:
        rank = trainer.mesh.rank
        profiler.export_chrome_trace(str(folder / f"rank-{rank}.trace.json.gz"))
        on_cuda = trainer.device.type == "cuda"
        order = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
        (folder / f"rank-{rank}.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=40), encoding="utf-8")
        if self.memory and on_cuda:
            with gzip.open(folder / f"rank-{rank}.memory.json.gz", "wt", encoding="utf-8") as file:
                json.dump(torch.cuda.memory._snapshot(), file, default=str)
            torch.cuda.memory._record_memory_history(enabled=None)

    def _merge(self, trainer: Trainer, folder: Path, behind: Sequence[float]) -> None:
        """One trace of those that this machine sees; who is missing is said."""
        assert self.ranks is not None
        paths = {rank: folder / f"rank-{rank}.trace.json.gz" for rank in self.ranks}
        here = [
            trace.Rank(
                rank,
                ", ".join(f"{axis} {index}" for axis, index in trainer.mesh.place(rank).items()) or "alone",
                path,
                _groups(trainer.mesh),
                behind[rank],
            )
            for rank, path in paths.items()
            if path.is_file()
        ]
        if missing := sorted(set(paths) - {one.number for one in here}):
            _log.warning("the traces of ranks %s lie on other machines, and are not in profile/trace.json.gz", missing)
        steps = [self._first + 1, trainer.progress.step]
        trace.merge(here, folder / "trace.json.gz", {"seconds_behind": {one.number: one.behind for one in here}, "steps": steps})
        _log.info("profile/trace.json.gz: steps %d to %d of %d ranks; open it in https://ui.perfetto.dev", *steps, len(here))


def _first_of_stages(mesh: Mesh) -> tuple[int, ...]:
    """The first rank of each pipeline stage; they lie outermost."""
    return tuple(range(0, mesh.size, mesh.size // mesh.axis("pp").size))


def _groups(mesh: Mesh) -> dict[str, str]:
    """Axis by name of its process group, as this rank knows them; an atomic axis before a view of the same ranks."""
    named: dict[str, str] = {}
    for name in (*AXES, "dp_shard", "replicate", "data", "grad", "world"):
        group = mesh.axis(name).group
        if group is not None:
            named.setdefault(group.group_name, name)
    return named
