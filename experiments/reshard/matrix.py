"""Is a run that goes on in another layout the same run? Every pair of layouts: saved by one, taken up by the other.

    python experiments/reshard/matrix.py [--only "ddp 2" "fsdp 4"] [--table experiments/reshard/table.md]

Each layout trains a small GPT in float64 for nine steps, six of which are an epoch, and saves at the fourth. Each
layout then takes up each of these checkpoints and goes on to the ninth. Asked of every pair:

    weights, moments, averages   after loading and saving again, every number is the one of before, bit for bit
    data order                   the samples of every step are those of the unbroken run on one device, none twice, none missing
    losses                       of steps 5 to 9, beside the unbroken run on one device: largest relative difference
    the same layout              all losses and the last checkpoint equal the unbroken run's bit for bit

Prints and writes the table; exits 1 if a pair fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

from disttrain import build  # noqa: E402
from disttrain.checkpoint.files import read_values  # noqa: E402
from disttrain.checkpoint.load import index_of, load  # noqa: E402
from disttrain.checkpoint.save import save  # noqa: E402
from disttrain.checkpoint.state import State  # noqa: E402
from disttrain.config.schema import Config, LaunchConfig, StrategyConfig, TrainConfig  # noqa: E402
from disttrain.launch.place import Place  # noqa: E402
from disttrain.launch.world import run_world  # noqa: E402
from disttrain.parallel.layout import Layout  # noqa: E402
from disttrain.parallel.mesh import Mesh  # noqa: E402
from disttrain.record import RunFolder  # noqa: E402
from disttrain.train.state import restore, state_of  # noqa: E402
from disttrain.train.trainer import Trainer  # noqa: E402

HERE = Path(__file__).resolve().parent
SAVED, LAST = 4, 9
ROUNDING = 1e-11
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp 2": {"dp_replicate": 2},
    "ddp 3": {"dp_replicate": 3},
    "ddp 4": {"dp_replicate": 4},
    "tp 2": {"tp": 2},
    "tp 4, sequence": {"tp": 4, "sequence_parallel": True},
    "ddp 2 x tp 2": {"dp_replicate": 2, "tp": 2},
    "fsdp 2, zero 1": {"dp_shard": 2, "zero": 1},
    "fsdp 3": {"dp_shard": 3},
    "fsdp 4, zero 2": {"dp_shard": 4, "zero": 2},
    "hsdp 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "pp 2": {"pp": 2},
    "pp 4, gpipe": {"pp": 4, "schedule": "gpipe"},
    "ddp 2 x pp 2": {"dp_replicate": 2, "pp": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "cp 2": {"cp": 2},
}
MODEL = {
    "_target_": "disttrain.models.gpt.GPT",
    "num_layers": 4,
    "num_heads": 4,
    "hidden_size": 32,
    "vocab_size": 32,
    "max_seq_len": 16,
}
DATA = {
    "_target_": "disttrain.data.synthetic.Synthetic",
    "kind": "tokens",
    "context": 16,
    "vocab_size": 32,
    "num_samples": 64,
    "num_validation": 5,
    "uneven": True,
}


def config_of(layout: Mapping[str, Any], every: int = SAVED) -> Config:
    """The experiment in one layout. Twelve samples a step can be cut over 1, 2, 3 and 4 ranks; the last batch of an epoch is short."""
    world_size = 1
    for axis in AXES:
        world_size *= layout.get(axis, 1)
    return Config(
        strategy=StrategyConfig(**layout),
        model=dict(MODEL),
        dataset=dict(DATA),
        optimizer={"_target_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.1},
        scheduler={"_target_": "disttrain.train.optimizer.Cosine", "warmup_steps": 5},
        callbacks={
            "grad_accumulation": {"_target_": "disttrain.callbacks.grad_accumulation.GradAccumulation", "micro_batch_size": 1},
            "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", "every": every, "keep_last": None},
            "ema": {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.9},
            "jsonl": {"_target_": "disttrain.callbacks.jsonl.JSONL"},
        },
        launch=LaunchConfig(world_size=world_size, device="cpu", threads=1),
        train=TrainConfig(steps=LAST, global_batch_size=12, clip_norm=0.5, log_every=1, eval_every=None, dtype="float64"),
    )


Order = dict[int, list[int]]
"""Sample numbers of every step (counted from 0), as one rank saw them."""


def watched(trainer: Trainer) -> Order:
    """Notes, as the trainer runs, which samples each of its steps is made of."""
    seen: Order = {}
    plain = trainer.strategy.forward_backward

    def forward_backward(step: Any) -> Any:
        seen[step.number] = [int(index) for batch in step.micro for index in batch.indices]
        return plain(step)

    trainer.strategy.forward_backward = forward_backward  # type: ignore[method-assign]
    return seen


def unbroken(place: Place, layout: Mapping[str, Any], run: Path, every: int) -> tuple[int, Order]:
    """The whole run; (this rank's data index, its samples)."""
    trainer = build.build_trainer(config_of(layout, every), RunFolder(run), place)
    seen = watched(trainer)
    trainer.fit()
    return trainer.mesh.coordinate()["data"], seen


def continued(place: Place, layout: Mapping[str, Any], starts: Sequence[tuple[Path, Path]]) -> list[tuple[int, Order]]:
    """From each of the checkpoints `starts` (checkpoint, folder to go on in) to the end of the run."""
    ended = []
    for checkpoint, run in starts:
        trainer = build.build_trainer(config_of(layout), RunFolder(run), place)
        notes = restore(trainer, checkpoint)
        assert notes == [], notes
        save(state_of(trainer), run / "again" / checkpoint.name, trainer.mesh)
        seen = watched(trainer)
        trainer.fit()
        ended.append((trainer.mesh.coordinate()["data"], seen))
    return ended


def whole(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint whole, and its plain values but those of the clock."""
    index = index_of(checkpoint)
    tensors = {name: torch.full(saved.shape, -1, dtype=saved.dtype) for name, saved in index.items()}
    load(State({name: (tensor, Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}), checkpoint, Mesh())
    values = read_values(checkpoint)
    return tensors, {key: values[key] for key in ("progress", "update", "data", "sums")}


def differing(one: Path, other: Path) -> list[str]:
    """Names that two checkpoints do not hold bit for bit alike."""
    (left, left_values), (right, right_values) = whole(one), whole(other)
    names = [
        name for name in left.keys() | right.keys() if name not in left or name not in right or not torch.equal(left[name], right[name])
    ]
    return sorted(names) + [key for key in left_values if left_values[key] != right_values[key]]


def order_of(parts: Sequence[tuple[int, Order]]) -> Order:
    """Samples of every step over all ranks, which must agree where they have the same data index. Void rows are left out."""
    by_index: dict[int, Order] = {}
    for index, seen in parts:
        assert by_index.setdefault(index, seen) == seen, "ranks of one data index saw other samples"
    return {step: sorted(sample for seen in by_index.values() for sample in seen[step] if sample >= 0) for step in by_index[0]}


def losses(run: Path) -> dict[int, float]:
    """By step, as the run's record has them."""
    return {int(row["step"]): row["train/loss"] for row in RunFolder(run).read() if "train/loss" in row}


class Runs:
    """The unbroken runs of layouts, each made when it is first asked for, and what went on from them."""

    def __init__(self, folder: Path, layouts: Mapping[str, Mapping[str, Any]], every: int = SAVED) -> None:
        self.folder, self.layouts, self.every = folder, layouts, every
        self.orders: dict[str, Order] = {}

    def unbroken(self, name: str) -> Path:
        """Folder of a layout's unbroken run."""
        if name not in self.orders:
            layout = self.layouts[name]
            self.run(name).mkdir(parents=True)
            self.orders[name] = order_of(run_world(unbroken, _size(layout), (layout, self.run(name), self.every)))
        return self.run(name)

    def run(self, name: str, start: str = "") -> Path:
        """Folder of a layout's unbroken run, or of the one that it continued from `start`."""
        return self.folder / "_".join(filter(None, [name, start])).replace(" ", "-")

    def go_on(self, name: str, starts: Mapping[str, Path]) -> dict[str, Order]:
        """Continue in layout `name` from each of the checkpoints; the samples seen."""
        pairs = [(checkpoint, self.run(name, start)) for start, checkpoint in starts.items()]
        for _, run in pairs:
            run.mkdir()
        parts = run_world(continued, _size(self.layouts[name]), (self.layouts[name], pairs), timeout_seconds=120)
        return {start: order_of([part[number] for part in parts]) for number, start in enumerate(starts)}

    def judge(self, name: str, start: str, checkpoint: Path, order: Order, reference: str) -> tuple[float, list[str]]:
        """(largest relative difference of losses, what is wrong) of one continued run."""
        run, step, whole_run = self.run(name, start), int(checkpoint.name.removeprefix("step-")), self.unbroken(reference)
        wrong = [f"not taken up: {found}" for found in differing(checkpoint, run / "again" / checkpoint.name)[:3]]
        if order != {number: samples for number, samples in self.orders[reference].items() if number >= step}:
            wrong.append("other samples in a step")
        curve, wanted = losses(run), losses(whole_run)
        if list(curve) != list(range(step + 1, LAST + 1)):
            wrong.append(f"rows of steps {list(curve)}")
        apart = max(abs(curve[number] - wanted[number]) / abs(wanted[number]) for number in curve)
        if apart > ROUNDING:
            wrong.append(f"losses {apart:.1e} apart")
        return apart, wrong

    def exact(self, name: str, start: str) -> list[str]:
        """What is not bit for bit the unbroken run of the same layout."""
        run, whole_run, last = self.run(name, start), self.unbroken(name), f"checkpoints/step-{LAST}"
        wanted = losses(whole_run)
        wrong = [f"step {step}" for step, loss in losses(run).items() if loss != wanted[step]]
        return wrong + differing(whole_run / last, run / last)


def _size(layout: Mapping[str, Any]) -> int:
    return int(config_of(layout).launch.world_size)


def main() -> int:
    """All pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--table", type=Path, default=HERE / "table.md")
    arguments = parser.parse_args()
    began, failed = time.monotonic(), 0
    names = ["single", *(name for name in arguments.only if name != "single")]
    lines = ["| saved by, continued in | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    cells: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), {name: LAYOUTS[name] for name in names})
        starts = {name: runs.unbroken(name) / f"checkpoints/step-{SAVED}" for name in names}
        for name in names:
            for start, order in runs.go_on(name, starts).items():
                apart, wrong = runs.judge(name, start, starts[start], order, "single")
                if name == start:
                    wrong += runs.exact(name, start)
                cells[start, name] = "; ".join(wrong) or ("bit for bit" if name == start else f"{apart:.0e}")
                failed += bool(wrong)
                print(f"{start} -> {name}: {cells[start, name]}", flush=True)
    lines += [f"| {start} | " + " | ".join(cells[start, name] for name in names) + " |" for start in names]
    about = (
        f"Written by `matrix.py` on {date.today().isoformat()}: {len(cells)} pairs, {failed} failed, torch {torch.__version__}, "
        f"{time.monotonic() - began:.0f} s. A number is the largest relative difference of a loss from the unbroken run on one device, "
        "in float64; weights, moments, averages and the order of samples are exact in every pair that has one.\n"
    )
    arguments.table.write_text(about + "\n" + "\n".join(lines) + "\n")
    print(about)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
