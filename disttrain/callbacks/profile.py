"""What the processor and the device do during a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from disttrain.errors import ConfigError
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.parallel.step import Report
    from disttrain.train.trainer import Trainer


class Profile(Callback):
    """Records `steps` steps after `start` with torch's profiler; the run folder gets `profile/rank-<n>.trace.json.gz`.

    The trace opens in https://ui.perfetto.dev or chrome://tracing; `rank-<n>.txt` beside it lists the dearest operations.
    """

    def __init__(self, start: int = 10, steps: int = 3, ranks: Sequence[int] = (0,), memory: bool = False) -> None:
        """`start`: steps taken before the first one recorded in this start of the run; `ranks`: who records."""
        if start < 0 or steps < 1:
            raise ConfigError(
                f"callbacks.profile.start is {start} and steps is {steps}; they are at least 0 and 1",
                "callbacks.profile.start=10 callbacks.profile.steps=3",
            )
        self.start, self.steps, self.ranks, self.memory = start, steps, tuple(ranks), memory
        self._profiler: Any = None
        self._first = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count from where this start of the run begins."""
        self._first = trainer.progress.step + self.start

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Begin with the first step to record."""
        if trainer.progress.step != self._first or trainer.mesh.rank not in self.ranks or trainer.folder is None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=self.memory, record_shapes=True)
        self._profiler.start()

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """End after the last one, with what the device still has to do."""
        if self._profiler is not None and trainer.progress.step >= self._first + self.steps:
            self._finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """End early where the run does."""
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if self._profiler is None or trainer.folder is None:
            return
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = trainer.folder.subfolder("profile")
        profiler.export_chrome_trace(str(folder / f"rank-{trainer.mesh.rank}.trace.json.gz"))
        order = "self_cuda_time_total" if trainer.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40)
        (folder / f"rank-{trainer.mesh.rank}.txt").write_text(table, encoding="utf-8")
