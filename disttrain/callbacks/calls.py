"""What a collective is, read from the operator that torch dispatches for it, whoever issues it: kind, group, tensors, call site."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain.callbacks.replicas import tensors_of
from disttrain.parallel import collectives, watch

KINDS: Mapping[str, str] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""By operator of torch's namespaces `c10d` and `_c10d_functional`."""

SITES = 3
"""Frames that tell where a call was made."""
_OWN = {collectives.__file__, watch.__file__, __file__}
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Call:
    """One collective, before it is made."""

    kind: str
    group: dist.ProcessGroup
    tensors: list[Tensor]
    """Those that the group must agree on, or that go over the border."""
    all_tensors: list[Tensor]
    reduction: str
    root: int
    """Rank in the group of a broadcast's or a reduction's root, or of the other end; -1 for none."""
    tag: int
    sent: list[int]
    """Rows to each rank, of an uneven all-to-all; else empty."""
    received: list[int]
    site: str


def call_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """The collective that this operator is; None if it is none."""
    if operator.namespace not in ("c10d", "_c10d_functional") or operator._opname not in KINDS:
        return None
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    kind = KINDS[operator._opname]
    inputs = [given[name] for name in ("tensors", "input_tensor", "input_tensors", "input", "inputs") if name in given]
    of_outputs = tensors_of([given[name] for name in ("output_tensors",) if name in given])
    tensors = [] if kind == "barrier" else of_outputs if kind == "scatter" else tensors_of(inputs)
    site, reduction = _frames(sys._getframe(1))
    return Call(
        kind,
        _group(given),
        tensors,
        [] if kind == "barrier" else tensors_of(list(given.values())),
        str(given["reduce_op"]) if isinstance(given.get("reduce_op"), str) else reduction,
        next((given[name] for name in ("root_rank", "dst", "src") if name in given), -1),
        given.get("tag", 0),
        list(given.get("input_split_sizes", ())),
        list(given.get("output_split_sizes", ())),
        site,
    )


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        found: dist.ProcessGroup = dist.ProcessGroup.unbox(given["process_group"])
        return found
    return dist.distributed_c10d._resolve_process_group(given["group_name"])  # type: ignore[attr-defined]


def _frames(frame: FrameType | None) -> tuple[str, str]:
    """(where the call was made, how it reduces): the operator hides the reduction, the function of torch that issued it does not."""
    places: list[str] = []
    reduction = ""
    while frame is not None and len(places) < SITES:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if path.startswith(_TORCH):
            op = frame.f_locals.get("op")
            if not reduction and isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                reduction = str(op).rpartition(".")[2].rstrip(">").lower()
        elif path not in _OWN and "callbacks/collective_check" not in path:
            places.append(f"{Path(path).name}:{frame.f_lineno} in {name}")
        frame = frame.f_back
    return ", from ".join(places), reduction
