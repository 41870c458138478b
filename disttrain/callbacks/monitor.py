"""What a run costs: time, memory, and how much of the machine it uses."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from disttrain.callbacks.peaks import peak_flops
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

SYSTEM_SECONDS = 1.0
"""Between two looks at the machine's counters, which take a tenth of a millisecond."""


class Monitor(Callback):
    """Measures at log points, on every rank; mean, smallest and largest travel with the step's own reduction.

    `perf/step_seconds` and `perf/data_wait_seconds` are a step's, evaluations and saves left out.
    `memory/peak_bytes` is the device's allocator's peak, or the process's largest resident size on the CPU.
    `system/cpu_utilisation` and `system/device_utilisation` are shares of the machine's cores and of the device's
    time, asked for once a second at most; a device that waits in a collective counts as busy, which is why `perf/mfu`
    stands beside them.
    """

    def __init__(self) -> None:
        """Nothing is measured before the first log point."""
        self._measured_at: float | None = None
        self._tail = 0.0
        self._row_step = 0
        self._flops = 0.0
        self._peak: float | None = None
        self._has_device_utilisation = False
        self._system: dict[str, float] = {}
        self._asked_at = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count from here; ask the model what a sample costs."""
        import psutil

        psutil.cpu_percent()  # the next call tells of the time since this one
        self._row_step = trainer.progress.step
        flops = getattr(trainer.model, "flops", None)
        self._flops = float(flops()) if callable(flops) else 0.0
        self._peak = peak_flops(trainer.device, _compute_dtype(trainer))
        self._has_device_utilisation = trainer.device.type == "cuda" and _device_utilisation() is not None

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        """This rank's values. The step under way is not over: its update is counted with the next log point's, the last one's here."""
        window = trainer.window
        steps = window.steps + 1
        values = {
            "perf/step_seconds": (window.seconds + self._tail) / steps,
            "perf/data_wait_seconds": window.data_wait_seconds / steps,
            "memory/peak_bytes": float(_peak_bytes(trainer.device)),
        }
        self._measured_at = time.perf_counter()
        if not self._system or self._measured_at - self._asked_at >= SYSTEM_SECONDS:
            self._system, self._asked_at = self._ask_system(), self._measured_at
        return values | self._system

    def _ask_system(self) -> dict[str, float]:
        """Since the last time; the system's own counters tick in hundredths of a second."""
        import psutil

        used = {"system/cpu_utilisation": psutil.cpu_percent() / 100.0}
        return used | ({"system/device_utilisation": _device_utilisation() or 0.0} if self._has_device_utilisation else {})

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        """Rates, from agreed numbers alone."""
        steps, self._row_step = trainer.progress.step - self._row_step, trainer.progress.step
        self._tail = time.perf_counter() - self._measured_at if self._measured_at is not None else 0.0
        seconds = row.get("perf/step_seconds", 0.0)
        if seconds <= 0.0 or steps <= 0:
            return {}
        samples_per_second = trainer.feed.order.global_batch_size / seconds
        rates = {"perf/samples_per_second": samples_per_second}
        if getattr(trainer.task, "unit", "") == "tokens":
            rates["perf/tokens_per_second"] = row["train/targets"] / steps / seconds
        if self._flops and self._peak:
            rates["perf/mfu"] = self._flops * samples_per_second / (self._peak * trainer.mesh.size)
        return rates


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    """The type that matrix products run in: a policy's, else the weights' own."""
    for callback in trainer.callbacks.values():
        declare = getattr(callback, "declare", None)
        if declare is not None and (precision := declare().precision) is not None:
            dtype: torch.dtype = precision.dtype
            return dtype
    return next((parameter.dtype for parameter in trainer.parameters.values()), torch.float32)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _device_utilisation() -> float | None:
    """Share of the last moments in which this GPU ran something; None where the driver cannot tell (needs nvidia-ml-py)."""
    try:
        share = torch.cuda.utilization() / 100.0
    except (ModuleNotFoundError, RuntimeError):
        return None
    return share if math.isfinite(share) else None
