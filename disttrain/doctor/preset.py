"""What `doctor` has measured of this machine as a `hardware` preset: conf/hardware/here.yaml of the current folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from disttrain.config.schema import HardwareConfig
from disttrain.plan.devices import CPU, HERE, preset_of
from disttrain.plan.devices import preset as shipped
from disttrain.texts import write_text

GIGA, TERA = 1e9, 1e12


def preset(found: Mapping[str, Any], ranks: int, gpu: str | None, source: str) -> HardwareConfig:
    """The preset of a machine with `ranks` devices, of the driver's name `gpu` (None: a CPU's cores).

    What one machine can't measure, its network and its price, is that of the shipped preset for such a device.
    """
    base = preset_of(gpu) if gpu is not None else HardwareConfig()
    collectives = {kind: line(rows) for kind, rows in found["talk"].items()}
    guess = base if base.link_bandwidth else shipped(CPU)  # one rank alone has no links to measure
    link = collectives.get("all_reduce", [guess.link_bandwidth, guess.link_half_message, guess.link_latency])
    rates = {name: round(found[name] / TERA, 4) for name in ("fp32", "bf16")}
    return HardwareConfig(
        name="here",
        source=source,
        device=re.escape(gpu) if gpu is not None else "",
        devices_per_node=ranks,
        peak_tflops=base.peak_tflops or {"fp32": rates["fp32"]},
        matmul_tflops=rates,
        attention_tflops={**base.attention_tflops, "flash": round(found["attention"] / TERA, 4)},
        memory_gib=base.memory_gib,
        memory_bandwidth=round(found["memory"] / GIGA, 3),
        link_bandwidth=link[0],
        link_half_message=link[1],
        link_latency=link[2],
        collectives=collectives,
        network_bandwidth=base.network_bandwidth or 1.0,
        network_latency=base.network_latency or 100.0,
        network_by_nodes=base.network_by_nodes,
        price_per_hour=base.price_per_hour,
    )


def line(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """[GB/s at the best, MB of the tensor at which half of it is reached, us of the quickest call] of a collective's sizes."""
    peak, latency = max(row["bytes_per_second"] for row in rows), min(row["seconds"] for row in rows)
    return [round(peak / GIGA, 6), round(half_message(rows, peak, latency) / 1e6, 4), round(latency * 1e6, 2)]


def half_message(rows: Sequence[Mapping[str, float]], peak: float, latency: float) -> float:
    """Bytes of the whole tensor at which half of the peak is reached, latency taken off, between the two sizes around it."""
    rates = [(row["bytes"], row["sent"] / max(row["seconds"] - latency, 1e-9)) for row in rows if row["seconds"] > latency]
    before = (0.0, 0.0)
    for size, rate in rates:
        if rate >= peak / 2:
            share = (peak / 2 - before[1]) / max(rate - before[1], 1e-9)
            return before[0] + share * (size - before[0])
        before = (size, rate)
    return 0.0


def store(hardware: HardwareConfig, folder: Path) -> Path:
    """Write the preset where `hardware=here` and, on this machine, `hardware=auto` find it."""
    file = folder / HERE
    file.parent.mkdir(parents=True, exist_ok=True)
    head = "# This machine as `python -m disttrain doctor` has measured it. Measure again, or delete the file.\n"
    write_text(file, head + yaml.safe_dump(asdict(hardware), sort_keys=False, width=140))
    return file
