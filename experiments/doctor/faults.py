"""Seven planted faults: does `doctor` name each, and does the override that it offers make the step faster?

    python experiments/doctor/faults.py [--only NAME ...] [--steps 20]

runs `doctor ... doctor.fix=true doctor.json=true` for each on two ranks of this machine's CPU and writes table.md and
measured.json beside this file, which keep what was run before. Exit code 0 if all are named and all gain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SMALL = (
    *("launch.device=cpu", "launch.threads=1", "callbacks=minimal", "dataset=synthetic", "dataset.kind=tokens", "dataset.vocab_size=256"),
    *("dataset.context=32", "model.max_seq_len=32", "model.hidden_size=64", "train.steps=100"),
)
PLANTED = "experiments.doctor.planted"


@dataclass(frozen=True)
class Fault:
    """One fault: what it is, how it is planted, and what `doctor` should call it."""

    what: str
    words: tuple[str, ...]
    named: str
    rank: int | None = None


FAULTS = {
    "loader": Fault(
        "a loader that sleeps 2 ms a sample",
        ("strategy=ddp", "dataset=custom", f"dataset._target_={PLANTED}.Sleepy", "dataset.seconds=0.002"),
        "input",
    ),
    "busy": Fault(
        "rank 1 slowed by a busy loop of 20 ms a step",
        ("strategy=ddp", f"callbacks.busy._target_={PLANTED}.Busy", "callbacks.busy.seconds=0.02"),
        "imbalance between ranks",
        rank=1,
    ),
    "no_sync": Fault(
        "accumulation that reduces gradients in every micro-batch",
        ("strategy=fsdp", "strategy.zero=2", "callbacks.grad_accumulation.micro_batch_size=1"),
        "exposed data-axis communication",
    ),
    "split": Fault(
        "a pipeline of which one stage holds one of eight blocks",
        (
            *("strategy=pipeline_parallel", "strategy.stage_split=[blocks.1]", "model.num_layers=8", "model.hidden_size=128"),
            "callbacks.grad_accumulation.micro_batch_size=2",
        ),
        "imbalance between stages",
    ),
    "item": Fault(
        "a callback that calls .item() on every tensor in every step",
        ("strategy=ddp", f"callbacks.statistics._target_={PLANTED}.Statistics"),
        "host overhead",
    ),
    "micro_batches": Fault(
        "a pipeline of two ranks with two micro-batches",
        ("strategy=pipeline_parallel", "model.num_layers=8", "model.hidden_size=128", "callbacks.grad_accumulation.micro_batch_size=16"),
        "bubble",
    ),
    "bucket": Fault(
        "gradients sent in buckets of 1 KiB",
        ("strategy=ddp", "strategy.bucket_size=0.001", "model.num_layers=12", "model.hidden_size=32"),
        "exposed data-axis communication",
    ),
}


def examine(fault: Fault, steps: int) -> dict[str, Any]:
    """What `doctor` says, as JSON."""
    base = [word for word in SMALL if not (word.startswith("dataset") and any(w.startswith("dataset=") for w in fault.words))]
    keys = {word.split("=")[0] for word in fault.words}
    words = [*(word for word in base if word.split("=")[0] not in keys), *fault.words]
    asked = ["doctor.fix=true", "doctor.json=true", f"doctor.steps={steps}"]
    command = [sys.executable, "-m", "disttrain", "doctor", *words, *asked]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def judged(fault: Fault, found: dict[str, Any]) -> tuple[bool, float]:
    """(whether it was named, how many times as fast a step is with the override)."""
    verdict = found["verdict"]
    is_named = verdict["bottleneck"] == fault.named and (fault.rank is None or verdict["rank"] == fault.rank)
    return is_named, best(found)["gain"]


def best(found: dict[str, Any]) -> dict[str, Any]:
    """The override that helped most of those that `doctor` tried."""
    return next(iter(found["tried"]), {"overrides": [], "before": [0.0], "after": [0.0], "gain": 0.0})


def main() -> int:
    """Examine, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    file = HERE / "measured.json"
    kept: dict[str, Any] = json.loads(file.read_text())["faults"] if file.is_file() else {}
    for name in asked.only:
        found = examine(FAULTS[name], asked.steps)
        is_named, gain = judged(FAULTS[name], found)
        verdict, tried = found["verdict"], best(found)
        load = found["ranks"][0]["memory"]["load"]
        kept[name] = {"named": is_named, "gain": gain, "load": load, "verdict": verdict, "best": tried, "seconds": found["seconds"]}
        said = "named" if is_named else f"NOT NAMED: {verdict}"
        print(f"{name}: {said}, {gain:.2f} times as fast with {' '.join(tried['overrides'])}", flush=True)
        whole = {"date": str(date.today()), "cores": os.cpu_count(), "faults": kept}
        file.write_text(json.dumps(whole, indent=1) + "\n")
        (HERE / "table.md").write_text(_page(kept))
    return 0 if all(one["named"] and one["gain"] > 1.0 for one in kept.values()) else 1


def _page(kept: dict[str, Any]) -> str:
    head = (
        "# Planted faults, and what doctor says of them\n\nMade by `python experiments/doctor/faults.py` on "
        f"{date.today()}, two ranks on {os.cpu_count()} cores. Step times in ms are the best of three windows a side; of up to three\n"
        "overrides that it tried, the one that helped most. The load is that of the machine, all its other work included: above\n"
        "the number of cores, times are mostly waits.\n\n"
    )
    names = (
        "planted",
        "verdict, its share of a step",
        "named",
        "best override",
        "before",
        "after",
        "times as fast",
        "load",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name, fault in FAULTS.items():
        if name in kept:
            one = kept[name]
            verdict, tried = one["verdict"], one["best"]
            rank = "" if verdict["rank"] is None else f" (rank {verdict['rank']})"
            before, after = (f"{min(tried[side]) * 1e3:.1f}" for side in ("before", "after"))
            cells = [fault.what, f"{verdict['bottleneck']}{rank}, {verdict['share']:.0%}", "yes" if one["named"] else "no"]
            cells += [f"`{' '.join(tried['overrides'])}`", before, after, f"{one['gain']:.2f}", f"{one['load']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
