"""What the ranks of `doctor` alone run: how fast this machine computes and how fast its ranks talk, while all do the same at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from disttrain.launch.place import Place
from disttrain.parallel import collectives
from disttrain.parallel.ledger import sent
from disttrain.parallel.mesh import Axis, Mesh

SIZES = {"cpu": (1 << 10, 1 << 15, 1 << 20, 1 << 23, 1 << 25), "cuda": (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)}
"""Bytes of the whole tensor of a collective."""
SECONDS_EACH = 0.25
"""Spent on one size of one collective, at least three calls."""
PRODUCT = {"cpu": 1024, "cuda": 8192}
STREAM = {"cpu": 1 << 25, "cuda": 1 << 31}
"""Bytes that are copied to see how fast memory is."""
HEADS, HEAD_DIM = 8, 64
LENGTH = {"cpu": 512, "cuda": 8192}
"""Tokens of the sequence that attends to itself."""


def measure(place: Place, kind: str) -> dict[str, Any]:
    """Rates of this rank, the mean over all; and of every collective by size: seconds, the slowest rank's."""
    device = torch.device("cuda", place.local_rank) if kind == "cuda" else torch.device("cpu")
    mesh = Mesh({"dp_replicate": place.world_size}, place.rank)
    world = mesh.axis("world")
    rates = compute_rates(device, world)
    by_rank = collectives.gather_json(rates, world, device)
    found: dict[str, Any] = {name: sum(one[name] for one in by_rank) / len(by_rank) for name in rates}
    found["talk"] = {name: _sweep(name, world, device) for name in COLLECTIVES} if world.size > 1 else {}
    return found


def compute_rates(device: torch.device, world: Axis) -> dict[str, float]:
    """flops a second of products (fp32, bf16) and of causal attention, forward; bytes a second through memory."""
    size, found = PRODUCT[device.type], {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        side = size if device.type == "cuda" or dtype == torch.float32 else size // 4  # a CPU may have no instructions for bf16
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        found[name] = 2.0 * side**3 / _best(lambda a=a, b=b: torch.mm(a, b), device, world)  # type: ignore[misc]
    length = LENGTH[device.type]
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.ones(1, HEADS, length, HEAD_DIM, dtype=half, device=device)
    attend = _best(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True), device, world)
    found["attention"] = 2.0 * length * length * HEADS * HEAD_DIM / attend  # two products over half of the square
    x = torch.zeros(STREAM[device.type] // 4, device=device)
    y = torch.empty_like(x)
    found["memory"] = 2.0 * x.nbytes / _best(lambda: y.copy_(x), device, world)
    return found


def _best(run: Callable[[], Any], device: torch.device, world: Axis) -> float:
    """The quickest of some calls, all ranks beginning together."""
    times = []
    for _ in range(5):
        collectives.barrier(world)
        times.append(seconds_of(run, device))
    return min(times)


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """What one call takes, with all that it asks of the device."""
    wait_for(device)
    before = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - before


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- collectives -------------------------------------------------------------------------------------------------------


def _pair(x: Tensor, world: Axis) -> None:
    """Between the first rank and the last; the others wait at the next barrier."""
    if world.index == 0:
        collectives.send(x, world, world.size - 1)
    elif world.index == world.size - 1:
        collectives.receive(tuple(x.shape), x.dtype, x.device, world, 0)


COLLECTIVES: dict[str, Callable[[Tensor, Axis], Any]] = {
    "all_reduce": collectives.all_reduce_,
    "all_gather": lambda x, world: collectives.all_gather(x[: x.numel() // world.size], world),
    "reduce_scatter": collectives.reduce_scatter,
    "broadcast": collectives.broadcast,
    "all_to_all": collectives.all_to_all,
    "send": _pair,
}
"""Each on the whole tensor x of a given size."""


def _sweep(name: str, world: Axis, device: torch.device) -> list[dict[str, float]]:
    """By size: seconds of a call (median of the slowest rank's), bytes sent by the formula, bytes a second by it."""
    rows = []
    for num_bytes in SIZES[device.type]:
        length = max(world.size, num_bytes // 4 // world.size * world.size)
        x = torch.zeros(length, device=device)
        once = _together(name, x, world, device)
        calls = max(3, min(50, int(SECONDS_EACH / max(once, 1e-6))))
        calls = int(collectives.all_reduce_(torch.tensor([float(calls)], device=device), world, "max")[0])
        seconds = median(_together(name, x, world, device) for _ in range(calls))
        moved = sent(name, x.nbytes, world.size)
        rows.append({"bytes": float(x.nbytes), "seconds": seconds, "sent": moved, "bytes_per_second": moved / seconds})
    return rows


def _together(name: str, x: Tensor, world: Axis, device: torch.device) -> float:
    """Seconds of one call on the slowest rank, all beginning together."""
    collectives.barrier(world)
    own = seconds_of(lambda: COLLECTIVES[name](x, world), device)
    return float(collectives.all_reduce_(torch.tensor([own], dtype=torch.float64, device=device), world, "max")[0])
