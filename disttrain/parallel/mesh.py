"""The world as named axes.

Ranks are laid out with `tp` innermost, then `cp`, then the data axes, `pp` outermost, so that the axis that
talks most stays inside a node. `dp_shard` is the product of the atomic axes `dp_outer` and `ep`: an expert
axis is thus one of the mesh's own and never carved out of another at a call site.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
import torch.distributed as dist

from disttrain.parallel.layout import ENDS

AXES = ("pp", "dp_replicate", "dp_outer", "ep", "cp", "tp")
"""Atomic, orthogonal axes, outermost first."""

VIEWS: Mapping[str, tuple[str, ...]] = {
    "dp_shard": ("dp_outer", "ep"),
    "data": ("dp_replicate", "dp_outer", "ep"),
    "grad": ("dp_replicate", "dp_outer", "ep", "cp"),
    "replicate": ("dp_replicate", "cp"),
    "grad_beside_ep": ("dp_replicate", "dp_outer", "cp"),
    "seen": ("pp", "dp_replicate", "dp_outer", "ep"),
    "world": AXES,
}
"""Products of atomic axes that are spoken of by one name: `data` sees different samples, `grad` sums gradients,
`replicate` is what of `grad` holds the same shards, `grad_beside_ep` what of it holds the same experts, `seen` has each
sample's outputs on one rank (a pipeline's last stage)."""

NAMED = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Those whose degrees the config states and that multiply to the world, outermost first."""


@dataclass
class Axis:
    """One axis or view as seen by this rank: its process group, size, this rank's index along it.

    `group` is None where the size is one: a collective over such an axis returns its input.
    `traffic` counts what went over it: {collective: [calls, bytes of the whole tensor]}.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    traffic: dict[str, list[int]] = field(default_factory=dict)

    def count(self, collective: str, num_bytes: int) -> None:
        """Note one call of `collective` with `num_bytes` of the whole tensor."""
        entry = self.traffic.get(collective)
        if entry is None:
            self.traffic[collective] = [1, num_bytes]
        else:
            entry[0] += 1
            entry[1] += num_bytes


class Mesh:
    """Degrees of every axis and the process groups along them. All ranks make it alike, with the same degrees."""

    def __init__(self, degrees: Mapping[str, int] | None = None, rank: int = 0) -> None:
        """Make the groups. `degrees`: size by atomic axis, one where absent; `rank`: this one's in the world."""
        degrees = degrees or {}
        unknown = set(degrees) - set(AXES)
        assert not unknown, f"unknown axes {sorted(unknown)}"
        self.degrees = {name: degrees.get(name, 1) for name in AXES}
        self.size = math.prod(self.degrees.values())
        self.rank = rank
        assert 0 <= rank < self.size
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._axes = {name: self._make(name) for name in (*AXES, *VIEWS)} | {ENDS: self._make_ends()}

    def axis(self, name: str) -> Axis:
        """The axis or view `name`."""
        return self._axes[name]

    def axes(self) -> tuple[Axis, ...]:
        """Every axis and view, in one order on all ranks."""
        return tuple(self._axes.values())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is said in here is no part of a step: every axis' `traffic` stays as it was."""
        before = [axis.traffic for axis in self._axes.values()]
        for axis in self._axes.values():
            axis.traffic = {}
        try:
            yield
        finally:
            for axis, traffic in zip(self._axes.values(), before, strict=True):
                axis.traffic = traffic

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Where `rank` (this one by default) stands on each atomic axis and view."""
        rest = self.rank if rank is None else rank
        at = {}
        for name in reversed(AXES):
            rest, at[name] = divmod(rest, self.degrees[name])
        for view, parts in VIEWS.items():
            at[view] = 0
            for name in parts:
                at[view] = at[view] * self.degrees[name] + at[name]
        return at

    def place(self, rank: int) -> dict[str, int]:
        """Where `rank` stands, on the axes that the config names and that have more than one rank, outermost first."""
        at = self.coordinate(rank)
        return {name: at[name] for name in NAMED if self._axes[name].size > 1}

    def _make(self, name: str) -> Axis:
        parts = VIEWS.get(name, (name,))
        groups = {ranks: self._group(ranks) for ranks in self._slices(parts)}
        mine = next(ranks for ranks in groups if self.rank in ranks)
        return Axis(name, len(mine), mine.index(self.rank), mine, groups[mine])

    def _make_ends(self) -> Axis:
        """First and last rank of this rank's pipeline; an axis of one rank for those between."""
        lines = list(self._slices(("pp",)))
        pairs: list[tuple[int, ...]] = [(line[0], line[-1]) for line in lines if len(line) > 1]
        groups = {ranks: self._group(ranks) for ranks in pairs}
        mine = next((ranks for ranks in pairs if self.rank in ranks), (self.rank,))
        return Axis(ENDS, len(mine), mine.index(self.rank), mine, groups.get(mine))

    def _slices(self, parts: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """Every set of ranks that differ along `parts` only."""
        others = [name for name in AXES if name not in parts]
        for fixed in product(*(range(self.degrees[name]) for name in others)):
            at = dict(zip(others, fixed, strict=True))
            moving = product(*(range(self.degrees[name]) for name in parts))
            yield tuple(self._rank_at(at | dict(zip(parts, index, strict=True))) for index in moving)

    def _rank_at(self, at: Mapping[str, int]) -> int:
        rank = 0
        for name in AXES:
            rank = rank * self.degrees[name] + at[name]
        return rank

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, made once (a collective call: every rank makes every group, in one order)."""
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            everyone = len(ranks) == self.size
            self._groups[ranks] = dist.group.WORLD if everyone else cast(dist.ProcessGroup, dist.new_group(list(ranks)))
        return self._groups[ranks]


def found_mesh() -> Mesh:
    """The world that this process stands in, all of it one data axis; torchrun's is joined if nobody has yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and world_size > 1:
        device = found_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
        atexit.register(_leave)
    if not dist.is_initialized():
        return Mesh()
    return Mesh({"dp_replicate": dist.get_world_size()}, dist.get_rank())


def _leave() -> None:
    """Let the group go before the interpreter takes its threads away; not after an error, when others may be anywhere."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def found_device() -> torch.device:
    """The GPU with this process's number on its machine, where there is one; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
