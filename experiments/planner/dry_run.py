"""llama3_405b in four dimensions on 8 to 16,384 ranks, dry: how long it takes here, and where formula and count differ.

python experiments/planner/dry_run.py            # writes dry_run.md beside this file
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLDS = {
    8: {"cp": 2, "tp": 2, "pp": 2},
    64: {"dp_shard": 2, "cp": 2, "tp": 8, "pp": 2},
    1024: {"dp_shard": 4, "cp": 2, "tp": 8, "pp": 16},
    16384: {"dp_shard": 64, "cp": 2, "tp": 8, "pp": 16},
}
SHARED = ["model=llama3_405b", "hardware=b200", "strategy=single", "strategy.zero=1", "strategy.sequence_parallel=true"]
SHARED += ["callbacks.grad_accumulation.micro_batch_size=1", "plan.dry=true", "plan.json=true", "plan.force=true"]


def words(world: int) -> list[str]:
    """What is asked for: one micro-batch a pipeline rank and data rank."""
    degrees = WORLDS[world]
    batch = degrees["pp"] * degrees.get("dp_shard", 1)
    cut = [f"strategy.{name}={degree}" for name, degree in degrees.items()]
    return [*SHARED, *cut, f"launch.world_size={world}", f"train.global_batch_size={batch}"]


def plan(world: int) -> dict[str, Any]:
    """The plan with its dry run, as JSON. What does not fit its devices is planned all the same."""
    done = subprocess.run([sys.executable, "-m", "disttrain", "plan", *words(world)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def equal(found: dict[str, Any]) -> tuple[int, int]:
    """(entries of the ledger that the formula has to the byte, all that were counted) over the pipeline ranks that were run."""
    same = all_of = 0
    for stage, counts in found["dry_run"]["stages"].items():
        for axis, kinds in counts["traffic"].items():
            for kind, (calls, moved) in kinds.items():
                said = found["traffic"][stage][axis][kind]
                all_of += 1
                same += abs(said["calls"] - calls) < 1e-6 and abs(said["bytes"] - moved) < 1
    return same, all_of


def row(world: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    dry = found["dry_run"]
    off = []
    for stage, counts in dry["stages"].items():
        counted, said = sum(counts["peak"].values()), found["memory_bytes"][stage]["total"]
        off.append(f"{counted / 2**30:.1f} ({100 * (said / counted - 1):+.1f}%)")
    same, all_of = equal(found)
    degrees = " ".join(f"{name} {degree}" for name, degree in WORLDS[world].items())
    cost = f"{dry['seconds']:.0f} | {dry['processor_seconds']:.0f} | {dry['host_bytes'] / 2**30:.2f}"
    return f"| {world} | {degrees} | {cost} | {same} of {all_of} | {', '.join(off)} |"


def main() -> None:
    """Run all, write the page."""
    os.chdir(tempfile.mkdtemp())  # plan writes nothing, but reads a conf/ of the current folder
    lines = [
        "# The dry run of llama3_405b in four dimensions",
        "",
        "`python experiments/planner/dry_run.py` makes this page. Every rank that differs (the first pipeline rank, the last, one",
        "between) really builds its part of the model, on tensors without memory, and takes a step under torch's fake process group.",
        f"Measured on {os.cpu_count()} cores, load at the start {os.getloadavg()[0]:.1f}.",
        "",
        "| ranks | layout | seconds | of processors | GiB a process | ledger as by formula | GiB at the peak by pipeline rank (formula) |",
        "|---|---|---|---|---|---|---|",
    ]
    for world in WORLDS:
        lines.append(row(world, plan(world)))
        print(lines[-1], flush=True)
    (HERE / "dry_run.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
