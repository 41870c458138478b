"""Which hardware a plan reckons with: the preset that was asked for, or what this machine has."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from disttrain.config import typed
from disttrain.config.devices import num_gpus
from disttrain.config.schema import HardwareConfig
from disttrain.config.sources import package_folder

AUTO, CPU = "auto", "cpu"
HERE = Path("conf/hardware/here.yaml")
"""Where `doctor` puts what it has measured, in the folder that one works in."""
GIB = 2.0**30


def resolve(hardware: HardwareConfig, ranks: int = 1) -> HardwareConfig:
    """The hardware itself: `auto` is what `doctor` measured here, else the preset of the first GPU, with its own memory, else `cpu`.

    `ranks`, those of one machine, share out a CPU machine's memory, and its cores if they are more than were measured at once.
    """
    if hardware.name == AUTO:
        found = gpu() if num_gpus() else None
        measured = _measured(found[0] if found is not None else "")
        if found is not None:
            name, num_bytes = found
            return replace(measured or preset_of(name), memory_gib=num_bytes / GIB)
        hardware = measured or preset(CPU)
    if not hardware.device and not hardware.memory_gib:
        return replace(_crowded(hardware, ranks), memory_gib=machine_bytes() / max(1, ranks) / GIB)
    return hardware


def _crowded(hardware: HardwareConfig, ranks: int) -> HardwareConfig:
    """A CPU machine with so many ranks: each has its share of what those had that were measured together."""
    share = hardware.devices_per_node / ranks
    if share >= 1:
        return hardware
    return replace(
        hardware,
        source=f"{hardware.source}; {ranks} ranks share out what those {hardware.devices_per_node} had",
        devices_per_node=ranks,
        peak_tflops=_scaled(hardware.peak_tflops, share),
        matmul_tflops=_scaled(hardware.matmul_tflops, share),
        attention_tflops=_scaled(hardware.attention_tflops, share),
        memory_bandwidth=hardware.memory_bandwidth * share,
        link_bandwidth=hardware.link_bandwidth * share,
        link_latency=hardware.link_latency / share,
        collectives={kind: [peak * share, half, wait / share] for kind, (peak, half, wait) in hardware.collectives.items()},
    )


def _scaled(rates: dict[str, float], share: float) -> dict[str, float]:
    return {name: rate * share for name, rate in rates.items()}


@functools.cache
def preset(name: str) -> HardwareConfig:
    """A preset of the package by name."""
    values: Any = OmegaConf.to_container(OmegaConf.load(package_folder("conf") / "hardware" / f"{name}.yaml"))
    return typed.build(HardwareConfig, values, "hardware")


def _measured(device: str) -> HardwareConfig | None:
    """What `doctor` measured in the current folder, if it was a machine with such a device ('': without a GPU)."""
    if not HERE.is_file():
        return None
    values: Any = OmegaConf.to_container(OmegaConf.load(HERE))
    found = typed.build(HardwareConfig, values, "hardware")
    return found if bool(found.device) == bool(device) and re.search(found.device, device) else None


def preset_of(device: str) -> HardwareConfig:
    """The preset whose pattern is found in the driver's name of a device; one without rates where none is."""
    for file in sorted((package_folder("conf") / "hardware").glob("*.yaml")):
        hardware = preset(file.stem)
        if hardware.device and re.search(hardware.device, device):
            return hardware
    return HardwareConfig(name=device, source="the driver; no preset fits, so no rates are known")


def device_bytes() -> int | None:
    """Memory of the first GPU that a process started here would see; None without one."""
    found = gpu() if num_gpus() else None
    return None if found is None else found[1]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def gpu() -> tuple[str, int] | None:
    """Name and memory of the first GPU, from the driver's own library: no CUDA context, no torch."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
        answered = (
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetName(handle, name, 96) == 0
            and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        )
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return (name.value.decode(), int(memory.total)) if answered else None


def machine_bytes() -> int:
    """Memory of this machine that processes may use: its own, or the limit of the container."""
    limits = [_read_int(Path(path)) for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    import psutil

    return int(min([limit for limit in limits if limit is not None] + [psutil.virtual_memory().total]))


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
