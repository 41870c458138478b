"""What a start costs: the whole process of a one-step run on two ranks, ours against a bare torchrun script.

    python experiments/start_cost/measure.py [--repeats 7]

Both train one step of tiny_gpt on two CPU ranks. The runs alternate; the first of each only warms the disk
cache. Ours does what a run does by default (data, evaluation, checkpoint, W&B offline, tables); the bare
script builds the model, wraps it in DDP and takes a step on random tokens. Prints medians and their ratio, and
writes `measured.json` beside this file (or to --json).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BARE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "bare.py")]
OURS = [sys.executable, "-m", "disttrain", "strategy=ddp", "launch.world_size=2", "launch.device=cpu", "train.steps=1"]


def seconds(command: list[str], folder: str) -> float:
    """Wall-clock time of one whole process, from command to exit."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return taken


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=HERE / "measured.json")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {"bare torchrun": [], "disttrain": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats + 1):
            for name, command in (("bare torchrun", BARE), ("disttrain", OURS)):
                measured = seconds(command, folder)
                if repeat > 0:
                    taken[name].append(measured)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, values in taken.items():
        print(f"{name:15} median {medians[name]:.2f} s   (from {min(values):.2f} to {max(values):.2f})")
    ratio = medians["disttrain"] / medians["bare torchrun"]
    print(f"ratio {ratio:.2f}   (wanted: at most 0.80)")
    result = {"date": date.today().isoformat(), "cores": os.cpu_count(), "seconds": taken, "median_seconds": medians, "ratio": ratio}
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
