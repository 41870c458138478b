"""What a save costs the training, for a state of 500 MB on two data-parallel ranks.

    python experiments/async_save/measure.py [--saves 8] [--every 12] [--width 2048] [--layers 10]

One run trains a stack of square layers with AdamW (weights and two moments in float32) and saves every few steps with
`callbacks.checkpoint`. Measured in it, on rank 0:

    stall        from the question for the run's state to the return of the save, median of the saves after the first
    torch.save   of the same state, whole, to the same disk, with fsync, at the end of the run: median of five
    throughput   a step's mean time while no save is under way over that while one is, both without the stall
    bytes        on the disk, of a checkpoint, over those of the state's tensors

Wanted: stall at most 20 % of torch.save, throughput at least 75 %, bytes at most 1.01. Writes `measured.json` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.callbacks.checkpoint import Checkpoint
from disttrain.data.synthetic import Synthetic
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.task import Regression
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.step import Report
from disttrain.record import RunFolder
from disttrain.train import trainer as loop
from disttrain.train.hooks import Callback
from disttrain.train.state import state_of

HERE = Path(__file__).resolve().parent
WANTED = {"stall over torch.save": ("at most", 0.20), "throughput while writing": ("at least", 0.75), "bytes over state": ("at most", 1.01)}


class Stack(nn.Module):
    """Square layers, one behind the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.task = Regression()

    def forward(self, x: Tensor) -> Tensor:
        """[b, width] to [b, width]."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Clock(Callback):
    """Stands behind the checkpoint callback and takes the times."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.stalls: list[float] = []
        self.steps: dict[bool, list[float]] = {False: [], True: []}
        """Seconds of steps, by whether a save was under way at their start and at their end."""
        self.reference: list[float] = []
        self.bytes_of_state = 0
        self._asked = self._began = 0.0
        self._was_busy = False

    def ask(self, make: Callable[[loop.Trainer], Any], trainer: loop.Trainer) -> Any:
        """The loop's question for the run's state: the stall begins."""
        self._asked = time.perf_counter()
        return make(trainer)

    def _busy(self) -> bool:
        return self._checkpoint._saver is not None and any(not job.ended.is_set() for job in self._checkpoint._saver._jobs)

    def on_train_step_start(self, trainer: loop.Trainer) -> None:
        """A step begins."""
        self._was_busy, self._began = self._busy(), time.perf_counter()

    def on_train_step_end(self, trainer: loop.Trainer, report: Report) -> None:
        """A step ends; one that a save ended in belongs to neither side."""
        seconds = time.perf_counter() - self._began
        if trainer.progress.step > 3 and self._busy() == self._was_busy:
            self.steps[self._was_busy].append(seconds)

    def on_save_checkpoint(self, trainer: loop.Trainer, state: Any) -> None:
        """The save has returned."""
        self.stalls.append(time.perf_counter() - self._asked)

    def on_fit_end(self, trainer: loop.Trainer) -> None:
        """The same state by torch.save, while the other rank waits."""
        tensors = {name: tensor for name, (tensor, _) in state_of(trainer).tensors.items()}
        self.bytes_of_state = sum(tensor.nbytes for tensor in tensors.values())
        for number in range(5 if trainer.is_lead else 0):
            assert trainer.folder is not None
            before = time.perf_counter()
            with (trainer.folder.path / f"reference-{number}.pt").open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            self.reference.append(time.perf_counter() - before)
        collectives.barrier(trainer.mesh.axis("world"))


def train(place: Place, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's run; its measurements."""
    checkpoint = Checkpoint(every=arguments.every, keep_last=2)
    clock = Clock(checkpoint)
    loop.state_of = partial(clock.ask, state_of)
    torch.manual_seed(0)
    trainer = loop.Trainer(
        Stack(arguments.width, arguments.layers),
        Synthetic(kind="vectors", shape=[arguments.width], num_samples=4096),
        callbacks={"checkpoint": checkpoint, "clock": clock},
        steps=arguments.every * (arguments.saves + 1) + arguments.every - 1,
        global_batch_size=arguments.batch,
        log_every=10**6,
        mesh=Mesh({"dp_replicate": place.world_size}, place.rank),
        folder=RunFolder(folder),
    )
    trainer.fit()
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    on_disk = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    return {
        "bytes_of_state": clock.bytes_of_state,
        "bytes_on_disk": on_disk,
        "stall_seconds": clock.stalls,
        "torch_save_seconds": clock.reference,
        "step_seconds_alone": clock.steps[False],
        "step_seconds_while_writing": clock.steps[True],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--every", type=int, default=12, help="steps between saves")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, default=HERE / "measured.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that ranks can be forked
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        taken = run_world(train, 2, (Path(folder), arguments), timeout_seconds=300)[0]
    alone, writing = (statistics.mean(taken[f"step_seconds_{when}"]) for when in ("alone", "while_writing"))
    stall, reference = statistics.median(taken["stall_seconds"][1:]), statistics.median(taken["torch_save_seconds"])
    ratios = {
        "stall over torch.save": stall / reference,
        "throughput while writing": alone / writing,
        "bytes over state": taken["bytes_on_disk"] / taken["bytes_of_state"],
    }
    print(f"state {taken['bytes_of_state'] / 1e6:.0f} MB; stall {stall:.3f} s, torch.save with fsync {reference:.3f} s")
    print(f"a step {alone:.3f} s alone ({len(taken['step_seconds_alone'])}), {writing:.3f} s ({len(taken['step_seconds_while_writing'])})")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}, wanted {WANTED[name][0]} {WANTED[name][1]}")
    found = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load": os.getloadavg(), "ratios": ratios, **taken}
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
