"""Every collective of the program. No other file calls `torch.distributed` for one.

The axis is always an argument, and an axis of one rank returns its input. Inputs are made contiguous here:
gloo computes on the memory under a strided view and may overwrite its neighbours. Bytes are counted per call
as those of the whole tensor; a rank moves, of these, 2(n-1)/n in an all-reduce, (n-1)/n in an all-gather,
reduce-scatter or all-to-all, 1 in a broadcast, a send or a shift (Rabenseifner 2004, ring algorithms).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain.parallel.mesh import Axis
from disttrain.parallel.watch import UNWATCHED, AnyCall, moving

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "and": dist.ReduceOp.MIN}

# 2.14 renamed these two; both names take (output, input, group=...).
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Combine `x` over the axis; every rank gets the result, in a tensor of its own. `op`: sum, mean, max, and (bool)."""
    if axis.group is None:
        return x
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis, op)


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum", uncounted: int = 0) -> Tensor:
    """`all_reduce` into `x` itself, for tensors that nothing else has saved. A strided `x` is filled as well.

    `uncounted`: bytes of `x` that only ride along, of which the ledger is not told.
    """
    if axis.group is None:
        return x
    buffer = x.contiguous()
    if buffer.dtype == torch.bool:
        buffer = buffer.to(torch.uint8)
    with moving(axis, "all_reduce", buffer, uncounted=uncounted):
        dist.all_reduce(buffer, _OPS[op], group=axis.group)
    if op == "mean":
        buffer /= axis.size
    if buffer is not x:
        x.copy_(buffer)
    return x


class Pending:
    """A tensor that is under way, in what `collective` over which `axis`. `wait` once, before it is used."""

    def __init__(
        self, x: Tensor, *works: dist.Work | None, collective: str = "", axis: Axis | None = None, call: AnyCall = UNWATCHED
    ) -> None:
        self._x = x
        self._works = works
        self._call = call
        self.collective, self.axis = collective, axis

    def wait(self) -> Tensor:
        """What was asked for: the sum, or what was sent."""
        with self._call.waiting():
            for work in self._works:
                if work is not None:
                    work.wait()
        return self._x


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Begin summing contiguous `x` in place over the axis while other work goes on."""
    if axis.group is None:
        return Pending(x, None)
    assert x.is_contiguous(), "an all-reduce under way needs a tensor that is its own memory"
    with moving(axis, "all_reduce", x, overlaps=True) as call:
        work = call.under_way(dist.all_reduce(x, group=axis.group, async_op=True))
    return Pending(x, work, collective="all_reduce", axis=axis, call=call)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate equal-shaped `x` of every rank along `dim`, in axis order."""
    if axis.group is None:
        return x
    moved = x.movedim(dim, 0).contiguous()
    out = torch.empty((axis.size * moved.shape[0], *moved.shape[1:]), dtype=x.dtype, device=x.device)
    with moving(axis, "all_gather", out):
        _all_gather_single(out, moved, group=axis.group)
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum `x` over the axis and keep this rank's even part along `dim`."""
    if axis.group is None:
        return x
    moved = x.movedim(dim, 0).contiguous()
    assert moved.shape[0] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} is not divisible by {axis.size}"
    out = torch.empty((moved.shape[0] // axis.size, *moved.shape[1:]), dtype=x.dtype, device=x.device)
    with moving(axis, "reduce_scatter", moved):
        _reduce_scatter_single(out, moved, group=axis.group)
    return out.movedim(0, dim)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, overlap: bool = False) -> dist.Work | None:
    """Concatenate flat `x` of every rank into flat `out`, which may hold `x` at its place; `overlap`: `wait` on what is returned."""
    with moving(axis, "all_gather", out, overlaps=overlap) as call:
        work: dist.Work | None = call.under_way(_all_gather_single(out, x, group=axis.group, async_op=overlap))
    return work


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> None:
    """Sum flat `x` over the axis into flat `out`, this rank's even part of it."""
    with moving(axis, "reduce_scatter", x):
        _reduce_scatter_single(out, x, group=axis.group)


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """`x` of the rank with index `source` on the axis, in a tensor of its own."""
    if axis.group is None:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    with moving(axis, "broadcast", out):
        dist.broadcast(out, src=axis.ranks[source], group=axis.group)
    return out


def all_to_all(x: Tensor, axis: Axis, dim: int = 0, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Cut `x` along `dim`, send part i to rank i, and concatenate what came, in axis order.

    Parts are even, or of sizes `sent`, which may be zero; `received` then are the sizes of what comes from each rank.
    """
    if axis.group is None:
        return x
    moved = x.movedim(dim, 0).contiguous()
    if sent is None or received is None:
        assert moved.shape[0] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} is not divisible by {axis.size}"
        out = torch.empty_like(moved)
    else:
        out = moved.new_empty((sum(received), *moved.shape[1:]))
    with moving(axis, "all_to_all", moved):
        dist.all_to_all_single(out, moved, received, sent, group=axis.group)
    return out.movedim(0, dim)


def send(x: Tensor, axis: Axis, to: int) -> None:
    """Give `x` to the rank with index `to`; it must `receive` it."""
    buffer = x.contiguous()
    with moving(axis, "send", buffer):
        dist.send(buffer, dst=axis.ranks[to], group=axis.group)


def receive(shape: Sequence[int], dtype: torch.dtype, device: torch.device, axis: Axis, source: int) -> Tensor:
    """The tensor that the rank with index `source` sends."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    with moving(axis, "receive", out):
        dist.recv(out, src=axis.ranks[source], group=axis.group)
    return out


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Begin sending `x` to the next rank of the axis and receiving what the one before sends, of the same shape and type."""
    buffer = x.contiguous()
    out = torch.empty_like(buffer)
    to, source = (axis.ranks[(axis.index + way) % axis.size] for way in (1, -1))
    both = [dist.P2POp(dist.isend, buffer, to, axis.group), dist.P2POp(dist.irecv, out, source, axis.group)]
    with moving(axis, "shift", buffer, overlaps=True) as call:
        works = dist.batch_isend_irecv(both)
        call.under_way(works[-1])
    return Pending(out, *works, collective="shift", axis=axis, call=call)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.group is not None:
        dist.barrier(group=axis.group)


def trial_sum(store: Store, index: int, size: int, num_bytes: int, timeout: timedelta) -> str:
    """Sum `num_bytes` once over a gloo group that is made on `store` for it, before there is any axis. Why that failed, or ''."""
    try:
        group: Any = dist.ProcessGroupGloo(store, index, size, timeout)
        x = torch.ones(num_bytes // 4)
        group.allreduce([x]).wait()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if bool((x == size).all()) else f"the sum of {size} ones came out as {float(x[0])}"


def gather_json(value: Any, axis: Axis, device: torch.device | None = None) -> list[Any]:
    """Every rank's JSON `value`, in axis order, on every rank. For small things outside the hot loop."""
    if axis.group is None:
        return [value]
    where = device or torch.device("cpu")
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(where)
    lengths = all_gather(torch.tensor([text.numel()], device=where), axis)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=where)
    padded[: text.numel()] = text
    rows = all_gather(padded[None], axis).cpu()
    return [json.loads(bytes(row[: int(length)].tolist())) for row, length in zip(rows, lengths.tolist(), strict=True)]


def gather_tensors(x: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's `x`, in axis order; first dimensions may differ, also be zero. All ranks agree on the rest of the shape."""
    if axis.group is None:
        return [x]
    shapes = cast(list[list[int]], gather_json(list(x.shape), axis, x.device))
    longest = max(shape[0] for shape in shapes)
    rest = next((shape[1:] for shape in shapes if shape[0]), list(x.shape[1:]))
    padded = torch.zeros((longest, *rest), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        padded[: x.shape[0]] = x
    rows = all_gather(padded[None], axis)
    return [row[: shape[0]] for row, shape in zip(rows, shapes, strict=True)]
