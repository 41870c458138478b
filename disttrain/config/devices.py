"""How many GPUs there are, without torch: its import takes seconds, and asking CUDA makes a fork unsafe."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path


def num_gpus() -> int:
    """GPUs that a process started here would see, CUDA_VISIBLE_DEVICES taken into account."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_installed()
    return num_visible(visible, num_installed())


def num_visible(visible: str, installed: int) -> int:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: entries up to the first that names no device (an index out of range, -1)."""
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        names_one = entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < installed)
        if not names_one:
            break
        count += 1
    return count if installed else 0


@functools.cache
def num_installed() -> int:
    """GPUs of this machine that this process may open: as NVML counts them, else as the driver lists them."""
    counted = _from_nvml()
    if counted is not None:
        return counted
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


def _from_nvml() -> int | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0:
            return None
        answered = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return int(count.value) if answered else None
