"""`doctor` alone: what this machine has, what it allows, how fast it is; and all that as a hardware preset for `plan`."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from datetime import date
from pathlib import Path
from typing import Any

from disttrain.config.devices import num_gpus
from disttrain.config.schema import PathsConfig
from disttrain.doctor import bench, loader, preset
from disttrain.errors import ConfigError
from disttrain.launch.environment import detect, threads_per_rank
from disttrain.launch.local import choose_start_method, import_warm
from disttrain.launch.world import run_world
from disttrain.places import expanded
from disttrain.plan.devices import machine_bytes
from disttrain.plan.network import WIRE_FORMULA
from disttrain.plan.table import columns, facts, show_seconds, title
from disttrain.plan.walls import show_bytes

MEBIBYTE = 1 << 20
ON_DISK = 64 * MEBIBYTE
LEAST_FILES, LEAST_SHARED = 4096, 64 * MEBIBYTE
MOST_RANKS = 8
USUAL_PORT = 29500
"""torchrun's."""


def main(as_json: bool) -> int:
    """Look, measure, print, write the preset."""
    if not (environment := detect()).is_alone:
        raise ConfigError(f"doctor starts its own ranks, so {environment.launcher} can't", "python -m disttrain doctor")
    import_warm()
    gpus = num_gpus()
    kind = "cuda" if gpus else "cpu"
    ranks = min(MOST_RANKS, gpus or max(2, os.cpu_count() or 1))
    found: dict[str, Any] = {"machine": machine(gpus), "limits": limits(gpus), "disk": disks(), "ranks": ranks}
    threads = threads_per_rank("auto", ranks, {})
    method = choose_start_method("auto")
    rates = run_world(bench.measure, ranks, (kind,), device=kind, threads=threads, start_method=method, timeout_seconds=120.0)[0]
    source = f"measured by doctor on {platform.node()}, {date.today()}: {ranks} ranks at once, threads a rank: {threads}"
    hardware = preset.preset(rates, ranks, _gpu_name() if gpus else None, source)
    file = preset.store(hardware, Path())
    found |= {"rates": rates, "loader": loader.measure(), "preset": str(file)}
    print(json.dumps(found, indent=2) if as_json else "\n".join(page(found)))
    return 0


def machine(gpus: int) -> dict[str, str]:
    """What it is, and the versions of what talks."""
    import torch
    import torch.distributed as dist

    from disttrain.launch.describe import describe

    said = describe()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else "not here"
    backends = [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    return {
        "host": f"{platform.node()}, {platform.system()} {platform.release()}",
        "processor": f"{said.get('cpu') or platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "memory": show_bytes(machine_bytes()),
        "devices": f"{gpus} x {_gpu_name()}, driver {_driver()}" if gpus else "no GPU",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, NCCL {nccl}, backends {', '.join(backends)}",
    }


def limits(gpus: int) -> list[dict[str, str]]:
    """What runs on this machine with `gpus` come up against: each with its value and, where it is too little, what happens then."""
    rows: list[dict[str, str]] = []

    def say(what: str, value: str, trouble: str = "") -> None:
        rows.append({"what": what, "value": value, "trouble": trouble})

    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = "loader workers and NCCL pass tensors through it: --shm-size or --ipc=host for a container" if free < LEAST_SHARED else ""
        say("/dev/shm", f"{show_bytes(free)} free", small)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    many = files == resource.RLIM_INFINITY or files >= LEAST_FILES
    say("open files", "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}", "" if many else f"ulimit -n {LEAST_FILES}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    word = "unlimited" if locked == resource.RLIM_INFINITY else show_bytes(locked)
    say("locked memory", word, "InfiniBand wants ulimit -l unlimited" if gpus and locked != resource.RLIM_INFINITY else "")
    say("threads a process", os.environ.get("OMP_NUM_THREADS", "not set: ranks share out the cores"))
    say("ports", f"{_free_port()} is free, {USUAL_PORT} {'is free' if _is_free(USUAL_PORT) else 'is taken'}", _port_trouble())
    from disttrain.callbacks.wandb import logged_in

    say("W&B", "logged in" if logged_in() else "not logged in: runs are written offline (wandb login)")
    return rows


def disks() -> dict[str, dict[str, Any]]:
    """By path of the config: bytes a second written and read, past the page cache where the system lets us."""
    paths = PathsConfig()
    return {name: disk(expanded(getattr(paths, name), "HOME=<a folder> python -m disttrain doctor")) for name in ("data", "outputs")}


def disk(folder: Path) -> dict[str, Any]:
    """Speed of the disk under `folder`, or under the nearest folder above it that exists."""
    while not folder.is_dir():
        folder = folder.parent
    found: dict[str, Any] = {"folder": str(folder.resolve()), "free": shutil.disk_usage(folder).free}
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".disttrain-doctor-") as file:
            block = os.urandom(MEBIBYTE)
            before = time.perf_counter()
            for _ in range(ON_DISK // MEBIBYTE):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            found["written"] = ON_DISK / (time.perf_counter() - before)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            before = time.perf_counter()
            while file.read(MEBIBYTE):
                pass
            found["read"] = ON_DISK / (time.perf_counter() - before)
    except OSError as error:
        found["trouble"] = str(error)
    return found


def page(found: Mapping[str, Any]) -> list[str]:
    """Everything, for a terminal."""
    lines = facts(list(found["machine"].items()))
    rows = [(one["what"], one["value"] + (f"  <- {one['trouble']}" if one["trouble"] else "")) for one in found["limits"]]
    for name, one in found["disk"].items():
        speed = f"reads {show_bytes(one['read'])}/s, writes {show_bytes(one['written'])}/s" if "read" in one else one["trouble"]
        rows.append((f"paths.{name}", f"{one['folder']}: {speed}, {show_bytes(one['free'])} free"))
    hands = found["loader"]
    handed = f"hands over {hands['batches']:,.0f} batches of 64 images a second, {show_bytes(hands['bytes'])}/s"
    rows.append(("loader worker", f"{handed}; uses {hands['worker']:.0%} of a core, the rank {hands['rank']:.0%}"))
    rates, ranks = found["rates"], found["ranks"]
    lines += [*title("Limits"), *facts(rows), *title(f"A rank, while {ranks} do the same")]
    products = f"fp32 {rates['fp32'] / 1e9:,.4g} GFLOP/s, bf16 {rates['bf16'] / 1e9:,.4g} GFLOP/s"
    attention, memory = f"{rates['attention'] / 1e9:,.4g} GFLOP/s, causal, forward", f"{rates['memory'] / 1e9:,.4g} GB/s"
    lines += facts([("products", products), ("attention", attention), ("memory", memory)])
    if rates["talk"]:
        lines += [
            *title(f"Collectives over n = {ranks} ranks: seconds of a call, MB/s of the bytes that a rank sends"),
            *talk(rates["talk"]),
        ]
    how = f"{found['preset']}: `plan` takes it here from now on (hardware=auto), or anywhere by hardware=here"
    return [*lines, *title("Preset"), *facts([("", how)])]


def talk(sweeps: Mapping[str, Any]) -> list[str]:
    """A row a collective, with what a rank sends of a tensor by its formula, and a column a size of the whole tensor."""
    sizes = [row["bytes"] for row in next(iter(sweeps.values()))]
    rows = [
        [name, WIRE_FORMULA[name], *(f"{show_seconds(r['seconds'])} {r['bytes_per_second'] / 1e6:,.0f}" for r in sweep)]
        for name, sweep in sweeps.items()
    ]
    return columns(rows, ("", "sends", *(show_bytes(size) for size in sizes)))


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as one, suppress(OSError):
        one.bind(("127.0.0.1", port))
        return True
    return False


def _free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _port_trouble() -> str:
    return "" if _is_free(USUAL_PORT) else "torchrun --standalone, or --rdzv-endpoint=<host>:<another port>"


def _gpu_name() -> str:
    from disttrain.plan.devices import gpu

    found = gpu()
    return found[0] if found is not None else ""


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.is_file() else []
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "unknown")
