"""Does every layout compute what one device computes? `verify` over layouts and models, as a table.

    python experiments/parity/prove.py [--only pp] [--model llama] [--missing] [--table experiments/parity/table.md]

Each row is proved in float64: start, batches, gradients, their norm, loss and updates of two steps against one device,
with two micro-batches a data rank (as many as a schedule asks for under a pipeline), clipping, and targets that are
ignored unevenly. The numbers are the largest relative errors. Exits 1 if any layout is not equal. All ranks are forked
from this process, and what one device computes is recorded once for all layouts that share it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

from disttrain import build  # noqa: E402
from disttrain.cli import ready  # noqa: E402
from disttrain.config.compose import compose, composer, parse  # noqa: E402
from disttrain.config.schema import Config  # noqa: E402
from disttrain.errors import ConfigError  # noqa: E402
from disttrain.launch.environment import detect  # noqa: E402
from disttrain.verify.shrink import one_device, shrunk  # noqa: E402
from disttrain.verify.verb import Proof, compare, record  # noqa: E402
from experiments.parity.layouts import MODELS, Layout, applies, layouts  # noqa: E402

HERE = Path(__file__).resolve().parent

TOLERANCE = 1e-10
HEAD = """| model | layout | ranks | gradient | norm | loss | update | verdict | seconds |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    layout: Layout

    @property
    def key(self) -> str:
        """How the table names it."""
        return f"{self.model}|{self.layout.name}"

    def config(self) -> Config:
        """The checked config: the model's overrides as typed, the strategy as the layout says. ConfigError where that does not fit."""
        layout = self.layout
        data = layout.degrees.get("dp_replicate", 1) * layout.degrees.get("dp_shard", 1)
        num_micro = 2 * layout.degrees.get("pp", 1) if layout.degrees.get("pp", 1) > 1 else 2
        words = ["strategy=single", *MODELS[self.model], f"train.global_batch_size={2 * data * num_micro}", "launch.device=cpu"]
        words += [
            "callbacks.grad_accumulation.micro_batch_size=2",
            "verify.steps=2",
            f"launch.world_size={layout.world_size}",
            "verify.shrink=false",
        ]
        if layout.degrees.get("tp") == 4 and self.model.startswith("llama"):
            words.append("model.num_kv_heads=4")  # as many as ranks share them
        request = parse(words)
        with composer(request) as app:
            _, config = compose(app, request)
            return ready(replace(config, strategy=layout.strategy()), detect(), os.getcwd())


class References:
    """What one device computed, recorded once for each experiment that layouts share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, str] = {}

    def of(self, config: Config) -> str:
        """The folder of one device's record."""
        key = repr(one_device(shrunk(config)[0]))
        if key not in self.known:
            self.known[key] = str(self.folder / str(len(self.known)))
            Path(self.known[key]).mkdir()
            record(config, self.known[key])
        return self.known[key]


def row(case: Case, proof: Proof, seconds: float) -> str:
    """A line of the table."""
    errors = [f"{proof.worst(quantity):.1e}" for quantity in ("gradient", "norm", "loss", "update")]
    verdict = "equal" if proof.equal else f"**off**: {proof.failed[0].quantity} of {proof.failed[0].name}; {proof.cause}"
    return f"| {case.model} | {case.layout.name} | {case.layout.world_size} | {' | '.join(errors)} | {verdict} | {seconds:.1f} |"


def main() -> int:
    """Prove every case, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--model", default="", help="models whose name contains this")
    parser.add_argument("--missing", action="store_true", help="prove only what the table does not show to be equal yet")
    parser.add_argument("--table", type=Path, default=HERE / "table.md", help="where the table is written")
    options = parser.parse_args()
    pairs = [Case(model, layout) for model in MODELS for layout in layouts() if applies(model, layout)]
    known = rows_of(options.table) if options.missing and options.table.exists() else {}
    lines = {key: line for key, line in known.items() if "| equal |" in line}
    wanted = [case for case in pairs if case.key not in lines and options.only in case.layout.name and options.model in case.model]
    began = time.monotonic()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="disttrain-parity-") as folder:
        references = References(Path(folder))
        for case in wanted:
            lines[case.key] = prove(case, references)
            print(lines[case.key], flush=True)
            options.table.write_text(page([lines[case.key] for case in pairs if case.key in lines]))
    num_off = sum("| equal |" not in line for line in lines.values())
    print(f"\n{len(wanted)} proved, {num_off} off, in {time.monotonic() - began:.0f} s")
    return 1 if num_off else 0


def prove(case: Case, references: References) -> str:
    """Prove one case; its line of the table. What the product refuses says so in it."""
    try:
        config = case.config()
    except ConfigError as error:
        return f"| {case.model} | {case.layout.name} | {case.layout.world_size} | | | | | **refused**: {error.message} | |"
    build.prepare(config)
    start = time.monotonic()
    proof = compare(config, references.of(config))
    assert proof.tolerance == TOLERANCE
    return row(case, proof, time.monotonic() - start)


def rows_of(table: Path) -> dict[str, str]:
    """The lines of a table by model and layout."""
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ") and not line.startswith("| model ")]
    return {"|".join(line.split(" | ")[:2]).removeprefix("| "): line for line in lines}


def page(lines: list[str]) -> str:
    """The whole table."""
    num_layouts = len({line.split(" | ")[1] for line in lines})
    num_off = sum("| equal |" not in line for line in lines)
    title = f"{num_layouts} layouts, {len(lines)} with their models, against one device at {TOLERANCE:g} in float64: {num_off} off."
    notes = f"{date.today()}, torch {torch.__version__}, CPU, gloo. Written by `python experiments/parity/prove.py`."
    return "\n".join(["# Parity", "", title, notes, "", HEAD, *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
