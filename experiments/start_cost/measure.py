"""What a start costs: the whole process of a one-step run on two ranks, ours against a bare torchrun script.

    python experiments/start_cost/measure.py [--repeats 7]

Both train one step of tiny_gpt on two CPU ranks. The runs alternate; the first of each only warms the disk
cache. Ours does what a run does by default (real text, checkpoint, W&B offline, tables, a sample of text) but for
the evaluation; the bare script builds the model, wraps it in DDP and takes a step on random tokens. Prints medians
of wall-clock and of processor time (which other load on the machine hardly moves) with their ratios, then what
the commands take that start no rank, and writes `measured.json` beside this file (or to --json).
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
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BARE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "bare.py")]
OURS = [sys.executable, "-m", "disttrain", "strategy=ddp", "launch.world_size=2", "launch.device=cpu", "train.steps=1"]
OURS.append("dataset.validation_fraction=0")
LIGHT = {"--help": 1.0, "--cfg job": 1.0, "optimizer.lrr=3": 2.0}  # words and the seconds they may take


def measure(command: list[str], folder: str, exit_code: int = 0) -> dict[str, float]:
    """Seconds of one whole process with all its children, from command to exit: on the wall and on processors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after, end = os.times(), time.perf_counter()
    if done.returncode != exit_code:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": end - start, "processor": busy}


def measure_light(words: str, folder: str) -> float:
    """Wall-clock seconds of a command that starts no rank."""
    return measure([sys.executable, "-m", "disttrain", *words.split()], folder, 2 if "=" in words else 0)["wall"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm", type=int, default=1, help="runs of each beforehand, which are not counted")
    parser.add_argument("--json", type=Path, default=HERE / "measured.json")
    arguments = parser.parse_args()
    taken: dict[str, list[dict[str, float]]] = {"bare torchrun": [], "disttrain": []}
    with tempfile.TemporaryDirectory() as folder:
        runs = range(arguments.warm + arguments.repeats)
        for repeat in runs:
            for name, command in (("bare torchrun", BARE), ("disttrain", OURS)):
                measured = measure(command, folder)
                if repeat >= arguments.warm:
                    taken[name].append(measured)
        light = {words: [measure_light(words, folder) for _ in runs][arguments.warm :] for words in LIGHT}
    found: dict[str, Any] = {"date": date.today().isoformat(), "cores": os.cpu_count(), "seconds": taken}
    for clock in ("wall", "processor"):
        medians = {name: statistics.median(run[clock] for run in runs) for name, runs in taken.items()}
        ratio = medians["disttrain"] / medians["bare torchrun"]
        print(f"{clock:10} bare torchrun {medians['bare torchrun']:.2f} s, disttrain {medians['disttrain']:.2f} s, ratio {ratio:.2f}")
        found[clock] = {"median_seconds": medians, "ratio": ratio}
    print("wanted: a wall-clock ratio of at most 0.80")
    for words, limit in LIGHT.items():
        found.setdefault("light", {})[words] = median = statistics.median(light[words])
        print(f"disttrain {words:16} {median:.2f} s on the wall, wanted at most {limit:.0f}")
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
