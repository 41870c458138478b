"""What must be equal over ranks, by the layout, and how a difference is told: names, ranks, axes, size and cause.

Replicas hold the same bits: ranks whose coordinates agree on every axis that cuts a parameter. A batch is the same on
ranks of one data index (a tensor, context or pipeline group reads the same samples) and another one on others. The
default random stream is the same within a tensor group, where residual activations are replicated, and another one
over ranks that see other samples or tokens. Losses may differ over data ranks, and nobody compares them.
What moves: one hash a tensor, gathered over the world; where they differ, that one tensor, broadcast once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from disttrain.errors import DivergedError
from disttrain.parallel import collectives
from disttrain.parallel.layout import Cut, Layout, Own
from disttrain.parallel.step import Step

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

CHUNK = 1 << 22
"""Elements hashed at a time."""
_ODD = 0x9E3779B1
_NAN = 12345.678
"""Stands for NaN in a hash: its bits may be others on each rank."""
ROUNDING = 1e-5
"""Difference over the largest value, below which it is one of rounding."""

Part = tuple[str, Tensor | None]
"""Names the part of a whole that a rank holds, and the part itself; None where it should be and is not."""


def part_of(layout: Layout, at: Mapping[str, int]) -> str:
    """Names the part of the whole that the rank at `at` holds: ranks with the same hold the same values."""
    return ",".join(f"{axis}={at[axis]}" for axis, placement in layout.placements.items() if isinstance(placement, (Cut, Own)))


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """A 64-bit sum of all bits, each word times an odd number of its own: any one changed word changes it. One host read."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        tensor = tensor.nan_to_num(_NAN, torch.inf, -torch.inf)
    words = tensor.contiguous().view(torch.uint8).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=tensor.device, dtype=torch.int64)
        total += ((part + 1) * (2 * places * _ODD + 1)).sum()
    return int(total)


def check_weights(trainer: Trainer, key: str) -> None:
    """Every rank calls it. DivergedError, on all, for the first parameter whose replicas differ."""
    at = trainer.mesh.coordinate()
    held = {name: pair for name, pair in trainer.strategy.weights().items() if name in trainer.parameters and pair[1].is_held(at)}
    compare(trainer, key, "values", {name: (part_of(layout, at), tensor) for name, (tensor, layout) in held.items()})


def check_gradients(trainer: Trainer, key: str) -> None:
    """The same of gradients, once they are summed."""
    at = trainer.mesh.coordinate()
    held = {name: one for name, one in trainer.parameters.items() if one.requires_grad and trainer.layouts[name].is_held(at)}
    compare(trainer, key, "gradients", {name: (part_of(trainer.layouts[name], at), one.grad) for name, one in held.items()})


def check_batch(trainer: Trainer, key: str, step: Step) -> None:
    """Samples are the same inside a data index and no two data indices share one. DivergedError on all ranks."""
    numbers = [int(number) for batch in step.micro for number in batch.indices.tolist() if number >= 0]
    found = {
        "data": trainer.mesh.axis("data").index,
        "numbers": numbers,
        "content": [digest(x) for batch in step.micro for x in (*tensors_of(batch.inputs), *tensors_of(batch.targets))],
        "varied": any(bool((x != x[:1]).any()) for batch in step.micro for x in tensors_of(batch.inputs)),
    }
    by_rank = collectives.gather_json(found, trainer.mesh.axis("world"), trainer.device)
    first: dict[int, int] = {}
    for rank, its in enumerate(by_rank):
        other = first.setdefault(its["data"], rank)
        if its["numbers"] != by_rank[other]["numbers"]:
            raise _fault(trainer, key, f"ranks {other} and {rank} have one data index and read different samples", by_rank, other, rank)
        if its["content"] != by_rank[other]["content"]:
            why = "the data set gives another sample when asked for the same one: draw from the sample's own seed only"
            what = f"ranks {other} and {rank} read the same samples, and hold different ones; {why}"
            raise _fault(trainer, key, what, by_rank, other, rank)
    for low, rank in first.items():
        for high, other in first.items():
            if low >= high:
                continue
            shared = sorted(set(by_rank[rank]["numbers"]) & set(by_rank[other]["numbers"]))
            if shared:
                raise _fault(trainer, key, f"ranks {rank} and {other} both train on sample {shared[0]}", by_rank, rank, other)
            if by_rank[rank]["varied"] and by_rank[rank]["content"] == by_rank[other]["content"]:
                why = "the data set does not look at the index it is asked for, or each rank streams from the start"
                what = f"ranks {rank} and {other} hold the same samples under different numbers; {why}"
                raise _fault(trainer, key, what, by_rank, rank, other)


def check_random(trainer: Trainer, key: str) -> None:
    """The default stream, after a step, is the same in a tensor group and another one elsewhere. DivergedError on all ranks."""
    streams = trainer.strategy.streams
    found = [trainer.mesh.axis("pp").index, trainer.mesh.axis("grad").index, digest(streams.state())]
    by_rank = collectives.gather_json(found, trainer.mesh.axis("world"), trainer.device)
    groups: dict[tuple[int, int], int] = {}
    for rank, (stage, index, state) in enumerate(by_rank):
        other = groups.setdefault((stage, index), rank)
        if state != by_rank[other][2]:
            raise DivergedError(
                f"at step {_number(trainer)} the random streams of ranks {other} and {rank}, of one tensor group, have drifted apart: "
                "one has drawn more than the other, so dropout masks of replicated activations differ. "
                f"What a rank draws alone comes from a generator of its own ({key})"
            )
    for (stage, index), rank in groups.items():
        for (other_stage, other_index), other in groups.items():
            if stage == other_stage and index < other_index and by_rank[rank][2] == by_rank[other][2]:
                raise DivergedError(
                    f"at step {_number(trainer)} ranks {rank} and {other} draw the same random numbers for different samples: something "
                    f"seeds torch's default generator inside the step (torch.manual_seed in a model or a callback) ({key})"
                )


def compare(trainer: Trainer, key: str, kind: str, held: Mapping[str, Part]) -> None:
    """Every rank calls it with what it holds, by name. DivergedError, on all, for the first name whose replicas differ."""
    hashes = {name: [part, None if tensor is None else digest(tensor)] for name, (part, tensor) in held.items()}
    by_rank = collectives.gather_json(hashes, trainer.mesh.axis("world"), trainer.device)
    names = dict.fromkeys(name for part in by_rank for name in part)
    differing = [(name, values) for name in names for values in _by_part(name, by_rank) if len(values) > 1]
    if not differing:
        return
    name, values = differing[0]
    most = max(values.values(), key=len)
    off = sorted(rank for ranks in values.values() if ranks is not most for rank in ranks)
    more = len({other for other, _ in differing}) - 1
    size, largest = _difference(trainer, held.get(name), most[0], (*off, *most))
    places = [trainer.mesh.place(rank) for rank in (*off, *most)]
    axes = [axis for axis in places[0] if len({place[axis] for place in places}) > 1]
    raise DivergedError(
        f"at step {_number(trainer)} ranks {', '.join(map(str, off))} and {', '.join(map(str, most))} hold different "
        f"{kind} of '{name}', which should be equal over {' x '.join(axes)}: "
        f"the first name of those that differ{f' ({more} more do)' if more else ''}. "
        f"Largest difference {size:.2g} at values up to {largest:.2g}: {_cause(kind, axes, size, largest)} ({key})"
    )


def _by_part(name: str, by_rank: Sequence[Mapping[str, Any]]) -> list[dict[int | None, list[int]]]:
    """For each part of `name` that ranks hold: ranks by what their hash is."""
    groups: dict[str, dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, part in enumerate(by_rank):
        if name in part:
            where, found = part[name]
            groups[where][found].append(rank)
    return list(groups.values())


def _difference(trainer: Trainer, mine: Part | None, source: int, ranks: Sequence[int]) -> tuple[float, float]:
    """(largest difference, largest value) of a tensor that `ranks` hold, against rank `source`'s. Every rank calls it."""
    world = trainer.mesh.axis("world")
    tensor = mine[1] if mine is not None and world.index in ranks else None
    shapes = collectives.gather_json(None if tensor is None else list(tensor.shape), world, trainer.device)
    if shapes[source] is None:
        return float("inf"), float("inf")
    own = torch.zeros(shapes[source], dtype=torch.float64, device=trainer.device)
    if tensor is not None:
        own.copy_(tensor.detach())
    theirs = collectives.broadcast(own, world, source)
    size = float((own - theirs).abs().nan_to_num(torch.inf).max()) if tensor is not None and own.numel() else 0.0
    if mine is not None and mine[1] is None and world.index in ranks:
        size = float("inf")
    largest = float(own.abs().max()) if tensor is not None and own.numel() else 0.0
    found = collectives.gather_json([size, largest], world, trainer.device)
    return max(pair[0] for pair in found), max(pair[1] for pair in found)


def _cause(kind: str, axes: Sequence[str], size: float, largest: float) -> str:
    """What most often makes such a difference."""
    if size <= ROUNDING * largest:
        return "rounding. A kernel gives other bits on each rank; debug=deterministic refuses such kernels"
    if kind == "values":
        return "something writes weights beside the update (a callback, a hook of the model), or ranks started from different ones"
    if set(axes) <= {"tp", "pp"}:
        return (
            "each rank has seen a part of what it works on. Its module works on activations that the tensor plan cuts "
            "(strategy.plan), or draws random numbers of its own"
        )
    return (
        "it was not synchronised. It was written after backward (a hook, a callback), or belongs to a parameter that was put into the "
        "model after it was laid out; `verify` with the same overrides compares it with one device's"
    )


def _fault(trainer: Trainer, key: str, what: str, by_rank: Sequence[Mapping[str, Any]], *ranks: int) -> DivergedError:
    shown = "; ".join(f"rank {rank}: {str(by_rank[rank]['numbers'][:8])[1:-1]}, ..." for rank in ranks)
    return DivergedError(f"at step {_number(trainer)} {what} ({shown}) ({key})")


def _number(trainer: Trainer) -> int:
    """The step under way, or just ended, counted from one."""
    return trainer.step.number + 1 if trainer.step is not None else trainer.progress.step


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor of a tensor, tuple, list or dict."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors_of(value)]
