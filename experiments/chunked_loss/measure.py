"""Memory and time of the head and its loss: whole logits against chunks, one device.

    python experiments/chunked_loss/measure.py [--rows 2048] [--vocabulary 50257] [--hidden 256]

Forward and backward of a linear head with cross-entropy in float32, one thread, each case in a process of its own.
Peak memory is what resident pages grow by (MiB); processor seconds. Whole logits and their gradient are rows x
vocabulary x 4 bytes each; a chunk's are chunk x vocabulary x 4. Writes `measured.json` beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.task import token_cross_entropy
from disttrain.parallel.chunked import ChunkedHead
from disttrain.parallel.mesh import Mesh

HERE = Path(__file__).resolve().parent


def resident(what: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at the most since the peak was begun anew."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def one_case(place: Place, rows: int, vocabulary: int, hidden: int, chunk: int | None) -> dict[str, float]:
    """Forward and backward once."""
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=False)
    x, targets = torch.randn(rows, hidden, requires_grad=True), torch.randint(vocabulary, (rows,))
    head.weight.grad = torch.zeros_like(head.weight)  # is there in either case
    row_loss = ChunkedHead(head, Mesh().axis("tp")).row_loss(chunk) if chunk else None
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.process_time()
    losses = row_loss(x, targets) if row_loss else token_cross_entropy(head(x), targets)
    losses.sum().backward()
    seconds = time.process_time() - start
    return {"processor_seconds": seconds, "peak_mib": resident("VmHWM") - before, "loss": float(losses.detach().sum())}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = arguments.rows, arguments.vocabulary, arguments.hidden
    found: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__, "sizes": sizes, "chunks": {}}
    for chunk in (None, 1024, 256, 64):
        (case,) = run_world(one_case, 1, (*sizes, chunk))
        found["chunks"][str(chunk)] = case
        print(f"chunk {chunk or 'none':>5}: peak {case['peak_mib']:7.1f} MiB, {case['processor_seconds']:.2f} s, loss {case['loss']:.3f}")
    (HERE / "measured.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
