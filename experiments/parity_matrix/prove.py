"""Does every layout compute what one device computes? `verify` over strategies, models and precisions, as a table.

    python experiments/parity_matrix/prove.py [--only tensor_parallel] [--table experiments/parity_matrix/table.md]

Each row composes a config as the command line would and proves it: start, batches, gradients, their norm, loss and
updates of three steps against one device. The numbers are the largest relative errors. Exits 1 if any layout is not equal.

Half precisions compare the first step only. Two updates later the gradient of a key projection is a small difference of
large numbers: there one device in bf16 was 6 % from one in float64, and four tensor ranks 14 % (llama_tiny), which says
nothing about layouts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

import torch

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

from disttrain import build  # noqa: E402
from disttrain.cli import ready  # noqa: E402
from disttrain.config.compose import compose, composer, parse  # noqa: E402
from disttrain.config.schema import Config  # noqa: E402
from disttrain.launch.environment import detect  # noqa: E402
from disttrain.verify.verb import Proof, prove  # noqa: E402

HERE = Path(__file__).resolve().parent

STRATEGIES: dict[str, list[str]] = {
    "single": ["strategy=single"],
    "ddp 2": ["strategy=ddp", "launch.world_size=2"],
    "ddp 4": ["strategy=ddp", "launch.world_size=4"],
    "tensor_parallel 2": ["strategy=tensor_parallel", "launch.world_size=2"],
    "tensor_parallel 4": ["strategy=tensor_parallel", "launch.world_size=4"],
    "tensor_parallel 2, sequence": ["strategy=tensor_parallel", "launch.world_size=2", "strategy.sequence_parallel=true"],
    "tensor_parallel 4, sequence": ["strategy=tensor_parallel", "launch.world_size=4", "strategy.sequence_parallel=true"],
    "ddp 2 x tensor_parallel 2": ["strategy=ddp_tensor_parallel", "launch.world_size=4"],
    "ddp 2 x tensor_parallel 2, sequence": ["strategy=ddp_tensor_parallel", "launch.world_size=4", "strategy.sequence_parallel=true"],
}

MODELS: dict[str, list[str]] = {
    "tiny_gpt": ["model=tiny_gpt"],
    "tiny_gpt, separate q k v": ["model=tiny_gpt", "model.merged_qkv=false"],
    "tiny_gpt, untied head": ["model=tiny_gpt", "model.tie_embeddings=false"],
    "llama_tiny": ["model=llama_tiny"],
    "llama_tiny, merged": ["model=llama_tiny", "model.merged_qkv=true"],
    "transformer_block": ["model=transformer_block", "dataset=synthetic"],
    "simple_cnn": ["model=simple_cnn", "dataset=digits"],
}

PRECISIONS = ("float32", "bf16", "fp16")


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    strategy: str
    dtype: str = "float64"

    def overrides(self) -> list[str]:
        """What would be typed behind `verify`."""
        words = [*STRATEGIES[self.strategy], *MODELS[self.model], f"verify.dtype={self.dtype}", "launch.device=cpu"]
        if self.dtype in ("bf16", "fp16"):
            words.append("verify.steps=1")
        if self.model.startswith("llama") and "tensor_parallel 4" in self.strategy:
            words.append("model.num_kv_heads=4")  # as many as ranks share them
        return words


def cases() -> Iterator[Case]:
    """Every model under every strategy in float64; two models in the other precisions."""
    for model, strategy in product(MODELS, STRATEGIES):
        if not (model == "simple_cnn" and "sequence" in strategy):  # images are no sequences
            yield Case(model, strategy)
    for dtype, model, strategy in product(PRECISIONS, ("tiny_gpt", "llama_tiny"), STRATEGIES):
        yield Case(model, strategy, dtype)


def config_of(case: Case) -> Config:
    """The checked config, as the command line makes it."""
    request = parse(case.overrides())
    with composer(request) as app:
        _, config = compose(app, request)
        return ready(config, detect(), os.getcwd())


def row(case: Case, proof: Proof, seconds: float) -> str:
    """A line of the table."""
    errors = [f"{proof.worst(quantity):.1e}" for quantity in ("gradient", "norm", "loss", "update")]
    verdict = "equal" if proof.equal else f"**off**: {proof.failed[0].quantity} of {proof.failed[0].name}; {proof.cause}"
    return f"| {case.model} | {case.strategy} | {case.dtype} | {' | '.join(errors)} | {proof.tolerance:g} | {verdict} | {seconds:.1f} |"


HEAD = """| model | strategy | precision | gradient | norm | loss | update | tolerance | verdict | seconds |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """Prove every case, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model, strategy or precision contains this")
    parser.add_argument("--table", type=Path, default=HERE / "table.md", help="where the table is written")
    options = parser.parse_args()
    wanted = {case: config_of(case) for case in cases() if options.only in f"{case.model} {case.strategy} {case.dtype}"}
    lines, num_off, began = [], 0, time.monotonic()
    print(HEAD, flush=True)
    for case, config in wanted.items():
        build.prepare_data(config)
        start = time.monotonic()
        proof = prove(config)
        num_off += not proof.equal
        lines.append(row(case, proof, time.monotonic() - start))
        print(lines[-1], flush=True)
    title = f"{len(wanted)} layouts against one device: {len(wanted) - num_off} equal, {num_off} off."
    print(f"\n{title} {time.monotonic() - began:.0f} s.")
    notes = f"{date.today()}, torch {torch.__version__}, CPU, gloo. Written by `python experiments/parity_matrix/prove.py`."
    options.table.write_text("\n".join(["# Parity", "", title, notes, "", HEAD, *lines, ""]))
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
