"""What ledger, monitor and an unopened window cost a step: the same run with their hooks and without, in turn.

    python experiments/doctor/cost.py [--blocks 60]

Within one run, blocks of twenty steps (a log point in each) alternate between all hooks of `ledger`, `monitor` and `breakdown` (whose
window lies behind the end) and none of them. Of each pair of neighbours the difference is taken, and of all the median: other load on
the machine falls on both. Two clocks: the main thread's time on a processor, and the wall's. Of long steps such a difference is mostly
noise; so the time inside of the hooks themselves is added up too, in every fourth block. Writes cost.json beside this file.
Wanted: below 1 % of a step of the default run, below 20 microseconds of a tiny one.
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
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLOCK = 20
SWITCHED = ("ledger", "monitor", "breakdown")
COMMON = (
    *("launch.device=cpu", "launch.threads=1", "callbacks=[grad_accumulation,amp,monitor,ledger,breakdown]", "train.eval_every=null"),
    *("callbacks.breakdown.start=1000000", "+callbacks.switch._target_=experiments.doctor.cost.Switch"),
)
MLP = (
    *("model=custom", "model._target_=experiments.loop_cost.mlp.MLP", "model.width=64", "model.hidden=128", "model.outputs=10"),
    *("model.classes=true", "dataset=custom", "dataset._target_=experiments.loop_cost.mlp.RandomRows", "dataset.width=64"),
    *("dataset.outputs=10", "dataset.classes=true", "train.global_batch_size=16", "callbacks.grad_accumulation.micro_batch_size=16"),
)
RUNS = {
    "default run (tiny_gpt, two ranks)": ("strategy=ddp",),
    "tiny step (MLP, one process)": ("strategy=single", *MLP),
    "tiny step (MLP, two ranks)": ("strategy=ddp", *MLP),
}


class Switch(Callback):
    """Takes the hooks away and puts them back, block by block, and keeps the time of each."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.blocks: list[tuple[float, float]] = []
        self.inside, self.num_timed = 0.0, 0
        self._began = 0.0, 0.0
        self._switched_at = -1
        self._whole: dict[str, list[Callable[..., Any]]] = {}

    def on_train_step_start(self, trainer: Trainer) -> None:
        """At the first step of a block: note the last one's time, and switch."""
        self.num_timed += len(self.blocks) % 4 == 0
        if trainer.progress.step % BLOCK != 1 or trainer.progress.step == self._switched_at:
            return  # putting hooks back moves this one behind them, where it is asked again
        self._switched_at = trainer.progress.step
        now = time.thread_time(), time.perf_counter()
        if self._whole:
            self.blocks.append((now[0] - self._began[0], now[1] - self._began[1]))
        else:
            self._whole = {name: list(hooks) for name, hooks in trainer.listeners.items()}
        switched = {id(trainer.callbacks[key]) for key in SWITCHED}
        for name, hooks in trainer.listeners.items():
            is_ours = [id(getattr(hook, "__self__", None)) in switched for hook in self._whole[name]]
            all_of = zip(self._whole[name], is_ours, strict=True)
            if len(self.blocks) % 2:
                hooks[:] = [hook for hook, ours in all_of if not ours]
            elif len(self.blocks) % 4:
                hooks[:] = self._whole[name]
            else:
                hooks[:] = [self._timed(hook) if ours else hook for hook, ours in all_of]
        self._began = time.thread_time(), time.perf_counter()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            before = time.perf_counter()
            found = hook(*arguments)
            self.inside += time.perf_counter() - before
            return found

        return run

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write it down."""
        if trainer.is_lead:
            Path(self.file).write_text(json.dumps({"blocks": self.blocks, "inside": self.inside / self.num_timed}))


def measure(words: tuple[str, ...], blocks: int) -> dict[str, float]:
    """Microseconds: of a step without the hooks, and what they add, by both clocks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks.json"
        further = [f"+callbacks.switch.file={file}", f"train.steps={BLOCK * (blocks + 1) + 2}", f"paths.outputs={folder}"]
        command = [sys.executable, "-m", "disttrain", *COMMON, *words, *further]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        written = json.loads(file.read_text())
    taken = written["blocks"][2:]  # with, without, with and timed, without, ...
    found: dict[str, float] = {"blocks": len(taken), "inside": written["inside"] * 1e6}
    for number, clock in enumerate(("processor", "wall")):
        with_hooks, without = ([one[number] / BLOCK * 1e6 for one in taken[side::4]] for side in (0, 1))
        pairs = [a - b for a, b in zip(with_hooks, without, strict=False)]
        found |= {f"{clock}_step": statistics.median(without), f"{clock}_added": statistics.median(pairs)}
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--json", type=Path, default=HERE / "cost.json")
    asked = parser.parse_args()
    found = {}
    for name, words in RUNS.items():
        one = found[name] = measure(words, asked.blocks)
        for clock in ("processor", "wall"):
            step, added = one[f"{clock}_step"], one[f"{clock}_added"]
            print(f"{name}, {clock} time: {added:.1f} us of a step of {step:,.0f} us ({added / step:.2%})", flush=True)
        print(f"{name}, inside of the hooks: {one['inside']:.1f} us ({one['inside'] / one['wall_step']:.2%})", flush=True)
    asked.json.write_text(json.dumps({"date": str(date.today()), "cores": os.cpu_count(), "runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
