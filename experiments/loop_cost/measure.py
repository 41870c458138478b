"""What the loop costs: a step of ours over the same step written by hand.

    python experiments/loop_cost/measure.py [--repeats 7] [--steps 1000]

(a) One process, a two-layer MLP with cross-entropy: ours with the default callbacks at their default log
    interval; by hand a DataLoader over a TensorDataset, clip_grad_norm_ and fused AdamW, and a loss read as often.
(b) Two ranks, an MLP block cut by tensor parallelism: ours the same; by hand torch's parallelize_module.

Both sides have the same start, the same batches in the same order and the same hyperparameters, two groups of weight
decay among them; a loss of theirs is compared.

Every measurement is a process of its own with one thread a rank (work this small gains nothing from a second, which
only turns other load on the machine into noise). The two sides alternate. A step's time is the mean over `--steps`
steps after a warm-up of seconds: W&B is opened beside the first steps, which is a cost of the start. Prints the
medians and their ratios; writes `measured.json` beside this file (or to --json).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLOCKS = ("wall", "processor")
"""Processor time is that of one rank; other load on the machine hardly moves it. What is wanted is said of the wall's."""


@dataclass(frozen=True)
class Case:
    """One comparison: sizes of the MLP, steps before the clock starts, and the highest ratio wanted."""

    name: str
    width: int
    hidden: int
    outputs: int
    batch_size: int
    classes: bool
    ranks: int
    warmup: int
    wanted: float

    def handwritten(self, file: Path, steps: int) -> list[str]:
        """The command that times the loop written by hand."""
        kind = "one_process" if self.ranks == 1 else "tensor_parallel"
        sizes = (self.width, self.hidden, self.outputs, self.batch_size, self.warmup, steps)
        return [sys.executable, "-m", "experiments.loop_cost.handwritten", kind, str(file), *map(str, sizes)]

    def ours(self, file: Path, steps: int) -> list[str]:
        """The command that times disttrain. It takes one step more than is timed, so that the end of the run is left out."""
        return [
            *(sys.executable, "-m", "disttrain", "launch.device=cpu", f"launch.world_size={self.ranks}", "launch.threads=1"),
            f"strategy={'single' if self.ranks == 1 else 'tensor_parallel'}",
            *("model=custom", "model._target_=experiments.loop_cost.mlp.MLP"),
            *(f"model.width={self.width}", f"model.hidden={self.hidden}", f"model.outputs={self.outputs}", f"model.classes={self.classes}"),
            *("dataset=custom", "dataset._target_=experiments.loop_cost.mlp.RandomRows"),
            *(f"dataset.width={self.width}", f"dataset.outputs={self.outputs}", f"dataset.classes={self.classes}"),
            f"dataset.shuffle={self.ranks == 1}",
            *(f"train.steps={self.warmup + steps + 1}", "train.eval_every=null", f"train.global_batch_size={self.batch_size}"),
            *(f"callbacks.grad_accumulation.micro_batch_size={self.batch_size}", "scheduler=constant", "scheduler.warmup_steps=0"),
            "+callbacks.stopwatch._target_=experiments.loop_cost.stopwatch.Stopwatch",
            *(f"+callbacks.stopwatch.file={file}", f"+callbacks.stopwatch.warmup={self.warmup}", f"+callbacks.stopwatch.steps={steps}"),
        ]


CASES = (
    Case("one process", width=64, hidden=128, outputs=10, batch_size=16, classes=True, ranks=1, warmup=8000, wanted=1.15),
    Case("tensor parallel", width=256, hidden=1024, outputs=256, batch_size=128, classes=False, ranks=2, warmup=500, wanted=0.8),
    Case("tensor parallel, small", width=64, hidden=256, outputs=64, batch_size=32, classes=False, ranks=2, warmup=500, wanted=0.8),
)


def seconds(command: list[str], file: Path) -> dict[str, float]:
    """Run one side in a process of its own; what a step took, by clock."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return dict(zip((*CLOCKS, "loss"), map(float, file.read_text().split()), strict=True))


def measure(case: Case, repeats: int, steps: int, folder: Path) -> dict[str, Any]:
    """Alternate both sides; medians in microseconds a step, and their ratio, by clock."""
    file = folder / "seconds.txt"
    taken: dict[str, list[dict[str, float]]] = {"by hand": [], "disttrain": []}
    for _ in range(repeats):
        taken["by hand"].append(seconds(case.handwritten(file, steps), file))
        taken["disttrain"].append(seconds(case.ours(file, steps), file))
    losses = [run["loss"] for runs in taken.values() for run in runs]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise SystemExit(f"the two sides do not train the same: losses of an early step are {losses}")
    sizes = f"{case.width}-{case.hidden}-{case.outputs}, batch {case.batch_size}"
    found: dict[str, Any] = {"case": case.name, "sizes": sizes, "wanted": case.wanted, "seconds": taken}
    for clock in CLOCKS:
        hand, ours = (1e6 * statistics.median(run[clock] for run in runs) for runs in taken.values())
        found[clock] = {"by hand": hand, "disttrain": ours, "ratio": ours / hand}
        print(f"| {case.name} ({sizes}) | {clock} | {hand:.0f} | {ours:.0f} | {ours / hand:.2f} | {case.wanted} |", flush=True)
    return found


def main() -> None:
    """Measure, print a table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, help="steps before the clock starts; by default as many as W&B takes to open")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="these only")
    parser.add_argument("--json", type=Path, default=HERE / "measured.json")
    arguments = parser.parse_args()
    print("| case | clock | by hand, us a step | disttrain, us a step | ratio | wanted, at most |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in CASES if case.name in (arguments.case or (case.name,))]
        cases = [replace(case, warmup=arguments.warmup or case.warmup) for case in cases]
        results = [measure(case, arguments.repeats, arguments.steps, Path(folder)) for case in cases]
    found = {"date": date.today().isoformat(), "cores": os.cpu_count(), "cases": results}
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
