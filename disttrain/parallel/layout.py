"""How each parameter lies on the mesh: the only such table.

Norm clipping, start, save, load, verify, plan and the replica check all read it. A layout is data: which
axis cuts which dimension (in segments, so that a merged query-key-value weight is cut by heads), and whether
the gradient on the other axes is a copy or a sum of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

Slices = tuple[slice, ...]

ENDS = "ends"
"""Axis of the first and the last rank of a pipeline, over which gradients of weights that both hold are summed."""


@dataclass(frozen=True)
class Cut:
    """Split along `dim`; `segments` are sizes that are cut one by one (merged q|k|v by heads).

    Even, unless `ragged`: then each rank takes ceil(size / degree) rows while there are any, so the last ones hold
    fewer or none (as FSDP2 and torch.chunk cut).
    """

    dim: int
    segments: tuple[int, ...] = ()
    ragged: bool = False


@dataclass(frozen=True)
class Copy:
    """Same values on the axis, gradient the same on each rank: nothing to reduce."""


@dataclass(frozen=True)
class Sum:
    """Same values on the axis, gradient in parts. `done` where the strategy's reducer has already summed them."""

    done: bool = False


@dataclass(frozen=True)
class Held:
    """Lives at these coordinates of the axis only. At two (tied over a pipeline's ends) values are the same, the gradient in parts."""

    at: tuple[int, ...]


@dataclass(frozen=True)
class Own:
    """Values of each rank's own, the same only after they were averaged (local SGD): nothing to reduce, saved then, by the first."""


Placement = Cut | Copy | Sum | Held | Own


@dataclass(frozen=True)
class Layout:
    """One parameter: its whole `shape`, its placement on each axis that has more than one rank, and those axes' degrees."""

    shape: tuple[int, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)

    def is_held(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at coordinate `at` holds any of it."""
        return all(at[axis] in placement.at for axis, placement in self.placements.items() if isinstance(placement, Held))

    def local_shape(self, at: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of what the rank at coordinate `at` holds."""
        return tuple(sum(length for _, length, _ in held) for held in self._ranges(at))

    def pieces(self, at: Mapping[str, int]) -> list[tuple[Slices, Slices]]:
        """(global, local) slices of the blocks held at coordinate `at`, all cuts composed in the order of placements."""
        if not self.is_held(at):
            return []
        found = []
        for block in product(*self._ranges(at)):
            whole = tuple(slice(start, start + length) for start, length, _ in block)
            local = tuple(slice(offset, offset + length) for _, length, offset in block)
            found.append((whole, local))
        return found

    def _ranges(self, at: Mapping[str, int]) -> list[list[tuple[int, int, int]]]:
        """What is held of each dimension: blocks (global start, length, local start)."""
        ranges = [[(0, size, 0)] for size in self.shape]
        for axis, placement in self.placements.items():
            if isinstance(placement, Cut):
                ranges[placement.dim] = _cut(ranges[placement.dim], placement, self.degrees[axis], at[axis])
        return ranges

    def replicas(self) -> int:
        """Number of ranks that hold each element."""
        count = 1
        for axis, placement in self.placements.items():
            if isinstance(placement, Held):
                count *= len(placement.at)
            elif not isinstance(placement, (Cut, Own)):
                count *= self.degrees[axis]
        return count

    def weight(self) -> float:
        """1 / replicas, so that one sum over the world counts each element once."""
        return 1.0 / self.replicas()

    def is_first_replica(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at `at` is the one that writes its pieces: the first wherever values are the same."""
        firsts = {axis: one.at[0] if isinstance(one, Held) else 0 for axis, one in self.placements.items() if not isinstance(one, Cut)}
        return all(at[axis] == first for axis, first in firsts.items())

    def stacked(self) -> Layout:
        """All ranks' own values behind each other: a leading dimension for each axis of `Own`, cut over it."""
        own = [axis for axis, placement in self.placements.items() if isinstance(placement, Own)]
        moved = {axis: replace(one, dim=one.dim + len(own)) if isinstance(one, Cut) else one for axis, one in self.placements.items()}
        shape = (*(self.degrees[axis] for axis in own), *self.shape)
        return Layout(shape, moved | {axis: Cut(dim) for dim, axis in enumerate(own)}, self.degrees)

    def reductions(self) -> list[str]:
        """Axes over which the gradient is still to be summed after backward."""
        sums = [axis for axis, placement in self.placements.items() if isinstance(placement, Sum) and not placement.done]
        tied = any(isinstance(placement, Held) and len(placement.at) > 1 for placement in self.placements.values())
        return [*sums, ENDS] if tied else sums


def _cut(held: list[tuple[int, int, int]], cut: Cut, degree: int, index: int) -> list[tuple[int, int, int]]:
    """Part `index` of `degree` of each segment of what is held along one dimension."""
    length = sum(size for _, size, _ in held)
    segments = cut.segments or (length,)
    assert sum(segments) == length, f"segments {segments} do not add up to {length}"
    wanted, start = [], 0
    for size in segments:
        assert cut.ragged or size % degree == 0, f"{size} is not divisible by {degree}"
        most = -(-size // degree)
        first = min(most * index, size)
        wanted.append((start + first, min(most, size - first)))
        start += size
    parts: list[tuple[int, int, int]] = []
    offset = 0
    for first, size in wanted:
        for begin, extent, local in held:  # positions within what is held are `local`
            low, high = max(first, local), min(first + size, local + extent)
            if low < high:
                parts.append((begin + low - local, high - low, offset + low - first))
        offset += size
    return parts
