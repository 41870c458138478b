"""The ledger against two counts of other people's: what torch dispatches, and what its CommDebugMode sees, in eight layouts and more.

Whoever issues a collective (our functions, FSDP2, torch's pipelines, autograd) does so by an operator of torch's namespace
`c10d`. Its tensors and its group are looked at here, group by group, and compared with what the axes of that group have counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from tests import tiny
from tests.parallel.ranks import prepared, run_step
from tests.train.runs import WARM

KINDS = {
    "allreduce_": ("all_reduce", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "send": ("send", "tensors"),
    "recv_": ("receive", "tensors"),
}
"""Torch's operator: what we call it, and which of its tensors is the whole one."""


class Dispatched(TorchDispatchMode):
    """Calls and bytes by (ranks of the group, kind)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.bytes: Counter[tuple[tuple[int, ...], str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
            kind, whole = KINDS[func._opname]
            group = dist.ProcessGroup.unbox(given["process_group"])
            key = tuple(dist.get_process_group_ranks(group)), kind
            tensors = given[whole] if isinstance(given[whole], (list, tuple)) else [given[whole]]
            self.calls[key] += 1
            self.bytes[key] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def ledger(axes: Mapping[str, Any]) -> tuple[Counter[Any], Counter[Any]]:
    """The same from our own count; a shift is a send and a receipt."""
    calls: Counter[Any] = Counter()
    sizes: Counter[Any] = Counter()
    for axis in axes.values():
        for kind, (number, size) in axis.traffic.items():
            for name in ("send", "receive") if kind == "shift" else (kind,):
                calls[axis.ranks, name] += number
                sizes[axis.ranks, name] += size
    return calls, sizes


SPLIT = "hybrid, zero bubble"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "strategy": {"bucket_size": 0.01}},
    "fsdp": {"shard": 2},
    "hsdp, zero 2": {"dp": 2, "shard": 2, "strategy": {"zero": 2}},
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "pipeline": {"pp": 2},
    "context, gathered": {"cp": 2, "model": tiny.LLAMA},
    "context, ring": {"cp": 2, "model": tiny.LLAMA, "strategy": {"attention": "ring"}},
    "experts": {"shard": 2, "ep": 2, "model": tiny.MOE, "strategy": {"zero": 0}},
    SPLIT: {"dp": 1, "tp": 2, "pp": 2, "model": tiny.GPT | {"num_layers": 4}, "strategy": {"schedule": "zbv"}},
    "hybrid": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ledger_equals_what_torch_dispatches(layout: str) -> None:
    config = LAYOUTS[layout]

    def entry(place: Place) -> tuple[Any, ...]:
        trainer = prepared(place, micro_batch_size=1 if layout == SPLIT else 2, **config)
        trainer.update(run_step(trainer, 0))
        axes = {name: trainer.mesh.axis(name) for name in (*trainer.mesh.coordinate(), "ends")}
        for axis in axes.values():
            axis.traffic.clear()
        # torch's module tracker, which CommDebugMode is made of, can't follow a backward that is split
        torchs = None if layout == SPLIT else CommDebugMode()
        with warnings.catch_warnings(), torchs or nullcontext(), Dispatched() as dispatched:
            warnings.filterwarnings("ignore", "For backward hooks to be called", UserWarning)
            run_step(trainer, 1)
        if torchs is None:
            return *ledger(axes), dispatched.calls, dispatched.bytes, None
        by_kind = {KINDS[op._qualified_op_name.partition("::")[2]][0]: count for op, count in torchs.get_comm_counts().items() if count}
        return *ledger(axes), dispatched.calls, dispatched.bytes, by_kind

    warm = (*WARM, "torch.distributed.pipelining")
    for calls, sizes, dispatched_calls, dispatched_sizes, by_kind in run_world(
        entry, int(tiny.config(**config).launch.world_size), warm=warm
    ):
        assert calls == dispatched_calls
        assert sizes == dispatched_sizes
        collectives: Counter[str] = Counter()
        for (_, kind), number in calls.items():
            collectives[kind] += number
        assert by_kind in (None, {kind: number for kind, number in collectives.items() if kind not in ("send", "receive")})
        assert collectives, "something moves in every layout"
