"""Which rank writes what: replicas share a tensor out between them, so that each element is written once.

It follows from the layout, the mesh and the name alone: nobody has to ask anybody, and ranks may hold different names.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from disttrain.parallel.layout import Cut, Held, Layout, Slices
from disttrain.parallel.mesh import AXES, VIEWS

SMALLEST_PART = 1 << 20
"""Bytes; a tensor is not cut into smaller parts for the sake of an even share."""


def parts_to_write(
    name: str, layout: Layout, num_bytes: int, at: Mapping[str, int], degrees: Mapping[str, int]
) -> list[tuple[Slices, Slices]]:
    """(global, local) slices of the blocks of a tensor that the rank at coordinate `at` of a mesh of `degrees` writes.

    `num_bytes`: of what one rank holds of it. Replicas take turns by the tensor's name; a large tensor is cut by rows.
    """
    if not layout.is_held(at):
        return []
    index, count = _replica(layout, at, degrees)
    num_parts = max(1, min(count, num_bytes // SMALLEST_PART))
    mine = (index - zlib.crc32(name.encode())) % count
    if mine >= num_parts:
        return []
    blocks = [_rows(block, mine, num_parts) for block in layout.pieces(at)]
    return [block for block in blocks if 0 in layout.shape or all(cut.stop > cut.start for cut in block[0])]


def _replica(layout: Layout, at: Mapping[str, int], degrees: Mapping[str, int]) -> tuple[int, int]:
    """(which, of how many) among the ranks that hold the same blocks.

    Stages hold different tensors under different names: without a placement on `pp`, each writes its own.
    """
    cut = {part for axis, placement in layout.placements.items() if isinstance(placement, Cut) for part in VIEWS.get(axis, (axis,))}
    index, count = 0, 1
    for axis in AXES:
        placement = layout.placements.get(axis)
        if isinstance(placement, Held):
            index, count = index * len(placement.at) + placement.at.index(at[axis]), count * len(placement.at)
        elif axis not in cut and (axis != "pp" or placement is not None):
            index, count = index * degrees[axis] + at[axis], count * degrees[axis]
    return index, count


def _rows(block: tuple[Slices, Slices], part: int, num_parts: int) -> tuple[Slices, Slices]:
    """Part `part` of `num_parts` of a block, by its first dimension."""
    whole, local = block
    if num_parts == 1:
        return block
    size = whole[0].stop - whole[0].start
    low, high = size * part // num_parts, size * (part + 1) // num_parts
    return (
        (slice(whole[0].start + low, whole[0].start + high), *whole[1:]),
        (slice(local[0].start + low, local[0].start + high), *local[1:]),
    )
