"""What a rank holds when its memory runs out, by kind, and the three overrides that help most there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disttrain.errors import is_out_of_memory
from disttrain.parallel.data import Reducer
from disttrain.train.summary import size_in_words

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

REST = "activations and what a step makes on the way"
NUM_REMEDIES = 3


@contextmanager
def told_where_memory_went(trainer: Trainer) -> Iterator[None]:
    """An error in here that says that memory ran out gets a note of who held it, and what to try."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(Exception):  # what was raised matters more than what is said of it
                error.add_note(words(trainer))
        raise


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes on this rank by kind: weights, gradients, optimizer state, and the rest of what was used at the most."""
    parameters = [*trainer.model.parameters(), *trainer.parameters.values()]
    buckets = [flat for sync in trainer.strategy.syncs if isinstance(sync, Reducer) for flat in sync.buffers()]
    states = trainer.update.optimizer.state.values()
    kinds = {
        "weights": _bytes([*(parameter.data for parameter in parameters), *trainer.model.buffers()], trainer.device),
        "gradients": _bytes([*buckets, *(parameter.grad for parameter in parameters if parameter.grad is not None)], trainer.device),
        "optimizer state": _bytes([x for state in states for x in state.values() if isinstance(x, Tensor)], trainer.device),
    }
    return kinds | {REST: max(0, _used(trainer.device) - sum(kinds.values()))}


def words(trainer: Trainer) -> str:
    """Both, as shown."""
    kinds = held(trainer)
    shown = ", ".join(f"{kind} {size_in_words(size)}" for kind, size in kinds.items())
    return f"of this rank, in step {trainer.progress.step + 1}: {shown}\n  try: {', or '.join(remedies(trainer, kinds))}"


def remedies(trainer: Trainer, kinds: dict[str, int]) -> list[str]:
    """Overrides that this run does not have yet, those first that make smaller what is largest."""
    options, mesh, micro = trainer.strategy.options, trainer.mesh, trainer.feed.part.micro_batch_size
    shares = trainer.strategy.shares_rows
    of_activations = [
        *([f"callbacks.grad_accumulation.micro_batch_size={micro // 2}"] if micro > 1 else []),
        *(["strategy.recompute=full"] if options.recompute == "none" and not options.compile else []),
        *(["strategy.offload_activations=true"] if not options.offload_activations else []),
    ]
    of_state = [
        *(["strategy=fsdp"] if not shares else []),
        *(["strategy.zero=3"] if shares and options.zero < 3 and mesh.axis("pp").size == 1 else []),
        *(["strategy.offload=true"] if shares and not options.offload else []),
        *(["strategy.tp=<ranks>"] if mesh.axis("tp").size == 1 else []),
    ]
    both = [of_activations, of_state] if kinds[REST] > sum(kinds.values()) / 2 else [of_state, of_activations]
    return [both[0][0], both[1][0], *both[0][1:], *both[1][1:]][:NUM_REMEDIES] if all(both) else [*both[0], *both[1]][:NUM_REMEDIES]


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Memory of `tensors` on `device`, each piece of it once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in map(_local, tensors) if x.device.type == device.type}
    return sum(storages.values())


def _local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def _used(device: torch.device) -> int:
    """Bytes at the peak: of the device's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
