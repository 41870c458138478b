"""Fewer bytes over the data ranks, and what they cost: compressed gradients, and weights averaged every n-th step.

    python experiments/fewer_bytes.py compression     writes experiments/compression/table.md
    python experiments/fewer_bytes.py local_sgd       writes experiments/local_sgd/table.md

Each row trains one small GPT on python_stdlib (bytes), on two ranks from one start and one order of samples. Bytes are what
the ledger of the data axes counted, a step; the error of the gradient is that of the sum that was used against the sum in
full precision, ||found - true|| / ||true||, on the way; powersgd's has in it what earlier steps lost and this one sends.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

from torch import Tensor  # noqa: E402

from disttrain import build  # noqa: E402
from disttrain.cli import ready  # noqa: E402
from disttrain.config.compose import compose, composer, parse  # noqa: E402
from disttrain.config.schema import Config  # noqa: E402
from disttrain.launch.environment import detect  # noqa: E402
from disttrain.launch.place import Place  # noqa: E402
from disttrain.launch.world import run_world  # noqa: E402
from disttrain.parallel import collectives  # noqa: E402
from disttrain.parallel.compress import Compressor, Sending  # noqa: E402
from disttrain.parallel.mesh import Axis  # noqa: E402

HERE = Path(__file__).resolve().parent
MODEL = ["model.num_layers=2", "model.hidden_size=64", "model.max_seq_len=64"]
TRAIN = ["strategy=ddp", "launch.world_size=2", "launch.device=cpu", "callbacks=none", "train.global_batch_size=16", "optimizer.lr=2e-3"]
LOGS = ["train.log_every=100", "train.eval_every=null"]
WATCH_EVERY = 20

ROWS: Mapping[str, Mapping[str, list[str]]] = {
    "compression": {
        "none": [],
        "bf16": ["strategy.compression=bf16"],
        "powersgd, rank 4": ["strategy.compression=powersgd", "strategy.compression_rank=4"],
        "powersgd, rank 2": ["strategy.compression=powersgd", "strategy.compression_rank=2"],
    },
    "local_sgd": {
        "sync_every 1 (ddp)": [],
        "sync_every 4": ["strategy.sync_every=4"],
        "sync_every 16": ["strategy.sync_every=16"],
        "sync_every 16, outer_lr 0.7, momentum 0.9": ["strategy.sync_every=16", "strategy.outer_lr=0.7", "strategy.outer_momentum=0.9"],
    },
}


@dataclass
class Measured:
    """One run."""

    train_loss: float
    val_loss: float
    bytes_a_step: float
    errors: list[float]


class Watched:
    """A compressor beside which the sum is made in full precision now and then, uncounted."""

    def __init__(self, inner: Compressor, axis: Axis) -> None:
        self.inner, self.axis = inner, replace(axis, traffic={})
        self.calls: dict[int, int] = {}
        self.errors: list[float] = []

    def start(self, flat: Tensor, views: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`."""
        call = self.calls[flat.data_ptr()] = self.calls.get(flat.data_ptr(), 0) + 1
        true = collectives.all_reduce(flat, self.axis) if call % WATCH_EVERY == 1 else None
        return _WatchedSending(self, self.inner.start(flat, views), flat, true)

    def state(self) -> dict[str, Tensor]:
        """See `Compressor`."""
        return self.inner.state()


@dataclass
class _WatchedSending:
    owner: Watched
    sending: Sending
    flat: Tensor
    true: Tensor | None

    def wait(self) -> None:
        self.sending.wait()
        if self.true is not None:
            self.owner.errors.append(float((self.flat - self.true).norm() / self.true.norm()))


def config_of(words: list[str], steps: int) -> Config:
    """As the command line would have it."""
    request = parse([*MODEL, *TRAIN, *LOGS, f"train.steps={steps}", *words])
    with composer(request) as app:
        _, config = compose(app, request)
        return ready(config, detect(), os.getcwd())


def train(place: Place, config: Config) -> Measured:
    """What a rank runs."""
    trainer = build.build_trainer(config, None, place)
    reducers: list[Any] = trainer.strategy.syncs
    watched = [Watched(one.compressor, one.axis) for one in reducers if one.compressor is not None]
    for one, watch in zip(reducers, watched, strict=False):
        one.compressor = watch
    result = trainer.fit()
    moved = sum(entry[1] for name in ("grad", "dp_replicate") for entry in trainer.mesh.axis(name).traffic.values())
    errors = [error for watch in watched for error in watch.errors]
    return Measured(result.metrics["train/loss"], result.metrics["val/loss"], moved / trainer.num_steps, errors)


def main() -> None:
    """Train every row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    head = f"| {options.what} | bytes a step | of full | error of the gradient | train loss | val loss | against full |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    first: Measured | None = None
    for name, words in ROWS[options.what].items():
        config = config_of(words, options.steps)
        build.prepare(config)
        found: Measured = run_world(train, 2, (config,))[0]
        first = first or found
        error = f"{statistics.mean(found.errors):.1e} ({min(found.errors):.1e} to {max(found.errors):.1e})" if found.errors else "-"
        share, apart = found.bytes_a_step / first.bytes_a_step, found.val_loss / first.val_loss - 1
        losses = f"{found.train_loss:.4f} | {found.val_loss:.4f} | {apart:+.2%}"
        lines.append(f"| {name} | {found.bytes_a_step:,.0f} | {share:.1%} | {error} | {losses} |")
        print("\n".join(lines[-1:]), flush=True)
    about = f"{date.today()}, {options.steps} steps, two ranks (gloo, float32), `{' '.join(MODEL + TRAIN)}`."
    command = f"    python experiments/fewer_bytes.py {options.what} --steps {options.steps}"
    (HERE / options.what / "table.md").write_text("\n".join([about, "", command, "", *lines, ""]))


if __name__ == "__main__":
    main()
