"""Where ranks stand, and which pieces of a tensor each holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from disttrain.launch.place import Place
from disttrain.parallel.layout import Copy, Cut, Held, Layout, Sum
from disttrain.parallel.mesh import AXES, Mesh


def test_tensor_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    mesh = Mesh.__new__(Mesh)
    mesh.degrees, mesh.size, mesh.rank = dict(zip(AXES, (2, 3, 1, 1, 1, 2), strict=True)), 12, 0
    at = [mesh.coordinate(rank) for rank in range(12)]
    assert [(one["pp"], one["dp_replicate"], one["tp"]) for one in at] == list(product(range(2), range(3), range(2)))
    assert [mesh._rank_at(one) for one in at] == list(range(12))


@pytest.mark.world(8)
def test_axes_and_views_name_the_ranks_that_differ_along_them(run_world: Callable[..., list[Any]]) -> None:
    def axes(place: Place) -> Any:
        mesh = Mesh({"dp_replicate": 2, "dp_outer": 2, "tp": 2}, place.rank)
        found = {name: (axis.ranks, axis.index, axis.size) for name in ("tp", "data", "dp_shard", "world") if (axis := mesh.axis(name))}
        at = mesh.coordinate()
        assert all(at[name] == mesh.axis(name).index for name in at)
        assert mesh.axis("pp").group is None
        return found

    found = run_world(axes)
    assert found[0] == {"tp": ((0, 1), 0, 2), "data": ((0, 2, 4, 6), 0, 4), "dp_shard": ((0, 2), 0, 2), "world": (tuple(range(8)), 0, 8)}
    assert found[7] == {"tp": ((6, 7), 1, 2), "data": ((1, 3, 5, 7), 3, 4), "dp_shard": ((5, 7), 1, 2), "world": (tuple(range(8)), 7, 8)}


def everywhere(layout: Layout) -> list[dict[str, int]]:
    """Every coordinate of the axes that a layout names."""
    return [dict(zip(layout.degrees, at, strict=True)) for at in product(*(range(n) for n in layout.degrees.values()))]


LAYOUTS = {
    "rows": Layout((8, 3), {"tp": Cut(0)}, {"tp": 4}),
    "columns": Layout((3, 8), {"tp": Cut(1)}, {"tp": 2}),
    "segments": Layout((16, 2), {"tp": Cut(0, (8, 4, 4))}, {"tp": 4}),
    "two axes, two dims": Layout((8, 6), {"tp": Cut(0), "dp_shard": Cut(1)}, {"tp": 2, "dp_shard": 3}),
    "two axes, one dim": Layout((24, 2), {"tp": Cut(0), "dp_shard": Cut(0)}, {"tp": 2, "dp_shard": 3}),
    "segments, then rows": Layout((32, 2), {"tp": Cut(0, (16, 8, 8)), "dp_shard": Cut(0)}, {"tp": 2, "dp_shard": 4}),
    "cut and copies": Layout((8, 2), {"tp": Cut(0), "data": Sum(done=True)}, {"tp": 2, "data": 3}),
    "copies": Layout((5,), {"tp": Copy(), "data": Sum(done=True)}, {"tp": 2, "data": 2}),
    "one device": Layout((5, 2)),
    "ragged rows, then none": Layout((5, 3), {"dp_shard": Cut(0, ragged=True)}, {"dp_shard": 4}),
    "rows of a shard of heads": Layout(
        (16, 2), {"tp": Cut(0, (8, 4, 4)), "dp_shard": Cut(0, ragged=True), "cp": Sum(done=True)}, {"tp": 2, "dp_shard": 3, "cp": 2}
    ),
    "on two of three stages": Layout((4,), {"pp": Held((0, 2)), "tp": Cut(0)}, {"pp": 3, "tp": 2}),
    "scalar": Layout((), {"data": Sum(done=True)}, {"data": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_of_all_coordinates_tile_the_tensor_exactly(name: str) -> None:
    layout = LAYOUTS[name]
    held = torch.zeros(layout.shape)
    whole = torch.arange(held.numel(), dtype=torch.float64).view(layout.shape)
    for at in everywhere(layout):
        if not layout.is_held(at):
            assert layout.pieces(at) == []
            continue
        local = torch.full(layout.local_shape(at), -1.0, dtype=torch.float64)
        for source, target in layout.pieces(at):
            assert (local[target] == -1.0).all(), "two pieces lie on each other"
            local[target] = whole[source]
            held[source] += 1
        assert (local >= 0).all(), "a part of the local tensor is no piece"
    assert (held == layout.replicas()).all()
    assert layout.weight() * layout.replicas() == 1.0
    holders = [at for at in everywhere(layout) if layout.is_held(at)]
    assert sum(layout.is_first_replica(at) for at in holders) * layout.replicas() == len(holders)


def test_random_layouts_tile_too() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(200):
        tp, shard = draw(1, 4), draw(1, 3)
        segments = tuple(tp * shard * draw(1, 3) for _ in range(draw(1, 3)))
        layout = Layout((sum(segments), shard * 2), {"tp": Cut(0, segments), "dp_shard": Cut(draw(0, 1))}, {"tp": tp, "dp_shard": shard})
        held = torch.zeros(layout.shape)
        for at in everywhere(layout):
            local = torch.zeros(layout.local_shape(at))
            for source, target in layout.pieces(at):
                held[source] += 1
                local[target] += 1
            assert (local == 1).all()
        assert (held == 1).all(), layout


def test_a_merged_projection_is_cut_by_heads_and_not_in_chunks() -> None:
    """q has rows 0..7, k 8..11, v 12..15: rank 1 of 2 holds the second half of each."""
    layout = Layout((16,), {"tp": Cut(0, (8, 4, 4))}, {"tp": 2})
    rows = [row for source, _ in layout.pieces({"tp": 1}) for row in range(source[0].start, source[0].stop)]
    assert rows == [4, 5, 6, 7, 10, 11, 14, 15]


def test_only_sums_that_nobody_has_done_are_left_to_reduce() -> None:
    placements = {"tp": Sum(), "data": Sum(done=True), "cp": Copy()}
    assert Layout((4,), placements, {"tp": 2, "data": 2, "cp": 2}).reductions() == ["tp"]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="not divisible"):
        Layout((9,), {"tp": Cut(0, (4, 5))}, {"tp": 2}).pieces({"tp": 0})
