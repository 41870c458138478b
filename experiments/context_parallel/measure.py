"""What attention costs a rank when a sequence of 4,096 tokens is cut: one device, then 2 and 4 ranks, gathered and as a ring.

    python experiments/context_parallel/measure.py [--tokens 4096] [--repeats 3]

Forward and backward of one causal layer of 8 query and 4 key-value heads of 64, float32, one thread a rank. For each
layout: tokens a rank, processor seconds a rank (the smallest of the repeats, for the slowest and the fastest rank: how
even the work is), peak memory above what stood before (resident pages, MiB), and bytes that went over the axis by the
ledger. Writes `measured.json` beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.transformer import attention as plain
from disttrain.parallel.context import ATTENTION, head_tail
from disttrain.parallel.mesh import Mesh

HERE = Path(__file__).resolve().parent
HEADS, GROUPS, SIZE = 8, 4, 64


def resident(what: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at the most since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def forget() -> None:
    """Begin the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def one_rank(place: Place, attention: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Forward and backward of this rank's part."""
    axis = Mesh({"cp": place.world_size}, place.rank).axis("cp")
    length = tokens // place.world_size
    positions = head_tail(axis, 2 * axis.size).positions(length, torch.device("cpu"))
    attend = plain if axis.size == 1 else ATTENTION[attention](axis)
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, SIZE, generator=made) for heads in (HEADS, GROUPS, GROUPS))
    parts = [x[:, :, positions].clone().requires_grad_() for x in (q, k, v)]
    del q, k, v
    seconds, peaks = [], []
    for _ in range(repeats):
        for part in parts:
            part.grad = None
        axis.traffic.clear()
        forget()
        before, start = resident("VmRSS"), time.process_time()
        attend(*parts, True, 0.0).sum().backward()
        seconds.append(time.process_time() - start)
        peaks.append(resident("VmHWM") - before)
    return {"tokens": length, "processor_seconds": min(seconds), "peak_mib": peaks[0], "traffic": axis.traffic}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"date": date.today().isoformat(), "tokens": arguments.tokens, "torch": torch.__version__, "layouts": {}}
    for size, attention in ((1, "plain"), (2, "gather"), (2, "ring"), (4, "gather"), (4, "ring")):
        ranks = run_world(one_rank, size, (attention, arguments.tokens, arguments.repeats))
        busy = [rank["processor_seconds"] for rank in ranks]
        peak = max(rank["peak_mib"] for rank in ranks)
        moved = {name: calls[1] / 2**20 for name, calls in ranks[0]["traffic"].items()}
        found["layouts"][f"{attention} {size}"] = {"ranks": ranks}
        print(
            f"{attention:7} on {size}: {ranks[0]['tokens']:5} tokens a rank, {min(busy):.2f} to {max(busy):.2f} s, "
            f"peak {peak:6.1f} MiB, moved {', '.join(f'{name} {size:.1f} MiB' for name, size in moved.items()) or 'nothing'}"
        )
    (HERE / "measured.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
