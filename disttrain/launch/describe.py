"""What a run ran on: versions, machine, source. For environment.json; no environment variables, so no secrets."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from disttrain.launch.environment import num_cores

PACKAGES = ("disttrain", "torch", "torchvision", "hydra-core", "omegaconf", "numpy", "safetensors", "wandb", "torchmetrics")

LARGEST_DIFF = 1 << 20
"""Bytes; a longer diff is cut off, and says so."""


def describe(**launched: Any) -> dict[str, Any]:
    """The environment of this run as JSON values; `launched` is what only the launcher knows."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "gpus": _gpus(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "git": _git(),
        **launched,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[str]:
    """Name, memory and driver of each, asked without CUDA: this process may have to fork."""
    if not os.path.exists("/dev/nvidiactl"):
        return []
    text = _ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [] if text is None else text.splitlines()


def _git() -> dict[str, str] | None:
    """Commit of the checkout that the command was typed in, and what differs from it; None outside one."""
    git = ("git", "-c", "core.fsmonitor=false")  # a checkout's own settings must start no program
    commit = _ask(*git, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _ask(*git, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or ""
    if len(diff) > LARGEST_DIFF:
        diff = diff[:LARGEST_DIFF] + f"\n(cut off: {len(diff)} characters in all)"
    return {"commit": commit.strip(), "diff": diff}


def _ask(*command: str) -> str | None:
    """What the command prints; None if it fails or there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
