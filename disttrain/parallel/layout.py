"""How each parameter lies on the mesh: the only such table.

Norm clipping, start, save, load, verify, plan and the replica check all read it. A layout is data: which
axis cuts which dimension (in segments, so that a merged query-key-value weight is cut by heads), and whether
the gradient on the other axes is a copy or a sum of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """Split evenly along `dim`; `segments` are sizes that are cut one by one (merged q|k|v by heads)."""

    dim: int
    segments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Same values on the axis, gradient the same on each rank: nothing to reduce."""


@dataclass(frozen=True)
class Sum:
    """Same values on the axis, gradient in parts. `done` where the strategy's reducer has already summed them."""

    done: bool = False


Placement = Cut | Copy | Sum


@dataclass(frozen=True)
class Layout:
    """One parameter: its whole `shape`, its placement on each axis that has more than one rank, and those axes' degrees."""

    shape: tuple[int, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of what one rank holds (even cuts: the same on each)."""
        shape = list(self.shape)
        for axis, placement in self.placements.items():
            if isinstance(placement, Cut):
                shape[placement.dim] //= self.degrees[axis]
        return tuple(shape)

    def pieces(self, at: Mapping[str, int]) -> list[tuple[Slices, Slices]]:
        """(global, local) slices of the blocks held at coordinate `at`, all cuts composed."""
        ranges: list[list[tuple[int, int, int]]] = [[(0, size, 0)] for size in self.shape]  # global start, length, local start
        for axis, placement in self.placements.items():
            if isinstance(placement, Cut):
                ranges[placement.dim] = _cut(ranges[placement.dim], placement, self.degrees[axis], at[axis])
        found = []
        for block in product(*ranges):
            whole = tuple(slice(start, start + length) for start, length, _ in block)
            local = tuple(slice(offset, offset + length) for _, length, offset in block)
            found.append((whole, local))
        return found

    def replicas(self) -> int:
        """Number of ranks that hold each element."""
        count = 1
        for axis, placement in self.placements.items():
            if not isinstance(placement, Cut):
                count *= self.degrees[axis]
        return count

    def weight(self) -> float:
        """1 / replicas, so that one sum over the world counts each element once."""
        return 1.0 / self.replicas()

    def is_first_replica(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at `at` is the one that writes its pieces: index zero wherever values are the same."""
        return all(isinstance(placement, Cut) or at[axis] == 0 for axis, placement in self.placements.items())

    def reductions(self) -> list[str]:
        """Axes over which the gradient is still to be summed after backward."""
        return [axis for axis, placement in self.placements.items() if isinstance(placement, Sum) and not placement.done]


def _cut(held: list[tuple[int, int, int]], cut: Cut, degree: int, index: int) -> list[tuple[int, int, int]]:
    """Part `index` of `degree` of each segment of what is held along one dimension."""
    length = sum(size for _, size, _ in held)
    segments = cut.segments or (length,)
    assert sum(segments) == length, f"segments {segments} do not add up to {length}"
    wanted, start = [], 0
    for size in segments:
        assert size % degree == 0, f"{size} is not divisible by {degree}"
        wanted.append((start + size // degree * index, size // degree))
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
