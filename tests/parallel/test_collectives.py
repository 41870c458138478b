"""Every collective on every kind of tensor: right on strided memory, nothing beside it touched, counted by axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain.launch.place import Place
from disttrain.parallel import collectives, pairs
from disttrain.parallel.mesh import Axis, Mesh

RunWorld = Callable[..., list[Any]]
N = 2

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda whole: whole[:, :4].clone(),
    "column slice": lambda whole: whole[:, 2:6],
    "transposed": lambda whole: whole[:, :4].t(),
    "every other row": lambda whole: whole[::2],
}
"""Views of an [8, 8] tensor; the first dimension of each is even, and so is the last."""


def tp_axis(place: Place) -> Axis:
    return Mesh({"tp": place.world_size}, place.rank).axis("tp")


def whole_of(rank: int) -> Tensor:
    """[8, 8], different on each rank."""
    return torch.arange(64, dtype=torch.float64).view(8, 8).sin() * (1 + rank)


def views(shape: str) -> list[Tensor]:
    return [SHAPES[shape](whole_of(rank)) for rank in range(N)]


def expected(name: str, xs: list[Tensor], rank: int) -> Tensor:
    """The collective's meaning, without any."""
    total = sum(xs[1:], xs[0])
    return {
        "all_reduce": lambda: total,
        "all_reduce_": lambda: total,
        "start_all_reduce": lambda: total,
        "all_gather": lambda: torch.cat(xs, 0),
        "all_gather_last": lambda: torch.cat(xs, -1),
        "reduce_scatter": lambda: total.chunk(N, 0)[rank],
        "reduce_scatter_last": lambda: total.chunk(N, -1)[rank],
        "broadcast": lambda: xs[1],
        "all_to_all": lambda: torch.cat([x.chunk(N, 0)[rank] for x in xs], 0),
    }[name]()


COLLECTIVES: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": lambda x, axis: collectives.all_reduce(x, axis),
    "all_reduce_": lambda x, axis: collectives.all_reduce_(x, axis),
    "start_all_reduce": lambda x, axis: collectives.start_all_reduce(x.contiguous(), axis).wait(),
    "all_gather": lambda x, axis: collectives.all_gather(x, axis),
    "all_gather_last": lambda x, axis: collectives.all_gather(x, axis, -1),
    "reduce_scatter": lambda x, axis: collectives.reduce_scatter(x, axis),
    "reduce_scatter_last": lambda x, axis: collectives.reduce_scatter(x, axis, -1),
    "broadcast": lambda x, axis: collectives.broadcast(x, axis, source=1),
    "all_to_all": lambda x, axis: collectives.all_to_all(x, axis),
}
IN_PLACE = {"all_reduce_", "start_all_reduce"}


@pytest.mark.world(N)
def test_strided_inputs_give_the_right_result_and_keep_their_neighbours(run_world: RunWorld) -> None:
    def check(place: Place) -> None:
        axis = tp_axis(place)
        for name, shape in product(COLLECTIVES, SHAPES):
            view = SHAPES[shape]
            whole = whole_of(place.rank)
            before = whole.clone()
            found = COLLECTIVES[name](view(whole), axis)
            torch.testing.assert_close(found, expected(name, views(shape), place.rank), rtol=0, atol=1e-15, msg=f"{name}, {shape}")
            beside = torch.ones(8, 8, dtype=torch.bool)
            if name in IN_PLACE:
                view(beside).fill_(False)
            assert torch.equal(whole[beside], before[beside]), f"{name}, {shape}: memory beside the view has changed"

    run_world(check)


@pytest.mark.world(N)
def test_an_in_place_sum_fills_a_strided_view(run_world: RunWorld) -> None:
    def check(place: Place) -> None:
        whole = whole_of(place.rank)
        collectives.all_reduce_(whole[:, 2:6], tp_axis(place))
        torch.testing.assert_close(whole[:, 2:6], sum(views("column slice")))

    run_world(check)


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[[list[Tensor], int], Tensor]]] = {
    # what the gradient of rank r's input is, when rank s weighs its output with w[s]
    "copy_reduce": (lambda x, axis: pairs.copy_reduce(x, axis), lambda w, rank: sum(w[1:], w[0])),
    "reduce_copy": (lambda x, axis: pairs.reduce_copy(x, axis), lambda w, rank: w[rank]),
    "gather_reduce_scatter": (
        lambda x, axis: pairs.gather_reduce_scatter(x, axis, 1),
        lambda w, rank: sum(w[1:], w[0]).chunk(N, 1)[rank],
    ),
    "reduce_scatter_gather": (lambda x, axis: pairs.reduce_scatter_gather(x, axis, 1), lambda w, rank: torch.cat(w, 1)),
    "gather_slice": (lambda x, axis: pairs.gather_slice(x, axis, 1), lambda w, rank: w[rank].chunk(N, 1)[rank]),
}


@pytest.mark.world(N)
def test_conjugate_pairs_backward_on_strided_tensors(run_world: RunWorld) -> None:
    """Forward and backward see strided memory: the input is a slice, the weights are transposed."""

    def check(place: Place) -> None:
        axis = tp_axis(place)
        for name, (pair, gradient) in PAIRS.items():
            leaf = whole_of(place.rank).requires_grad_()
            y = pair(leaf[:, 2:6], axis)
            weights = [torch.randn(y.shape[::-1], dtype=torch.float64, generator=torch.Generator().manual_seed(r)).t() for r in range(N)]
            (y * weights[place.rank]).sum().backward()
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad[:, 2:6], gradient(weights, place.rank), rtol=0, atol=1e-15, msg=name)
            assert not leaf.grad[:, :2].any()
            assert not leaf.grad[:, 6:].any()

    run_world(check)


@pytest.mark.world(N)
def test_the_two_gathers_differ_as_documented(run_world: RunWorld) -> None:
    """I04: a loss that is the same on all ranks wants the slice; one that weighs by rank wants the reduce-scatter."""

    def check(place: Place) -> None:
        axis = tp_axis(place)
        shared = torch.arange(8.0, dtype=torch.float64)
        for gather, weights in ((pairs.gather_slice, [shared, shared]), (pairs.gather_reduce_scatter, [shared, 3 * shared])):
            x = torch.ones(4, dtype=torch.float64, requires_grad=True)
            (gather(x, axis, 0) * weights[place.rank]).sum().backward()
            by_hand = shared if gather is pairs.gather_slice else 4 * shared  # d(loss) / d(whole): once, or the sum over ranks
            torch.testing.assert_close(x.grad, by_hand.chunk(N)[place.rank])

    run_world(check)


@pytest.mark.world(N)
def test_a_sum_inside_autograd_does_not_change_what_was_saved(run_world: RunWorld) -> None:
    """M4: exp keeps its result, so a sum written over it would double the gradient."""

    def check(place: Place) -> float:
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        y = pairs.reduce_copy(x.exp(), tp_axis(place))
        y.backward()
        assert float(y.detach()) == pytest.approx(2 * torch.e)
        assert x.grad is not None
        return float(x.grad)

    assert run_world(check) == pytest.approx([torch.e, torch.e])


REDUCTIONS = [
    ("sum", (1.0, 4.0), 5.0),
    ("mean", (1.0, 4.0), 2.5),
    ("max", (1.0, 4.0), 4.0),
    ("and", (True, False), False),
    ("and", (True, True), True),
]


@pytest.mark.world(N)
def test_reductions(run_world: RunWorld) -> None:
    def reduce(place: Place) -> list[Any]:
        axis = tp_axis(place)
        return [collectives.all_reduce(torch.tensor(values[place.rank]), axis, op).item() for op, values, _ in REDUCTIONS]

    assert run_world(reduce) == [[wanted for *_, wanted in REDUCTIONS]] * N


@pytest.mark.world(N)
def test_send_and_receive(run_world: RunWorld) -> None:
    def pass_on(place: Place) -> Any:
        axis = tp_axis(place)
        if place.rank == 0:
            collectives.send(whole_of(0)[:, 2:4], axis, to=1)
            return None
        return collectives.receive((8, 2), torch.float64, torch.device("cpu"), axis, source=0).tolist()

    assert run_world(pass_on)[1] == whole_of(0)[:, 2:4].tolist()


@pytest.mark.world(4)
def test_calls_and_bytes_are_counted_on_their_own_axis(run_world: RunWorld) -> None:
    def count(place: Place) -> dict[str, dict[str, list[int]]]:
        mesh = Mesh({"dp_replicate": 2, "tp": 2}, place.rank)
        tp, data = mesh.axis("tp"), mesh.axis("data")
        x = torch.zeros(6, 4)
        collectives.all_reduce(x, tp)
        collectives.all_reduce(x, tp)
        collectives.all_gather(x, tp)
        collectives.reduce_scatter(x, data)
        collectives.broadcast(x, data)
        return {"tp": tp.traffic, "data": data.traffic, "world": mesh.axis("world").traffic}

    nbytes = 6 * 4 * 4
    assert (
        run_world(count)
        == [
            {
                "tp": {"all_reduce": [2, 2 * nbytes], "all_gather": [1, 2 * nbytes]},
                "data": {"reduce_scatter": [1, nbytes], "broadcast": [1, nbytes]},
                "world": {},
            }
        ]
        * 4
    )


def test_an_axis_of_one_rank_returns_its_input_and_counts_nothing() -> None:
    axis = Mesh().axis("tp")
    x = torch.ones(4, 4).t()[::2]
    assert all(COLLECTIVES[name](x, axis) is x for name in COLLECTIVES if name != "start_all_reduce")
    assert collectives.gather_json({"a": 1}, axis) == [{"a": 1}]
    assert collectives.gather_tensors(x, axis) == [x]
    assert axis.traffic == {}


@pytest.mark.world(3)
def test_tensors_of_unequal_length_are_gathered(run_world: RunWorld) -> None:
    cases = [(2, 0, 3), (0, 0, 1), (1, 1, 1), (0, 0, 0)]

    def gather(place: Place) -> list[list[list[Any]]]:
        axis = tp_axis(place)
        mine = [torch.full((lengths[place.rank], 2), float(place.rank)) for lengths in cases]
        return [[part.tolist() for part in collectives.gather_tensors(x, axis)] for x in mine]

    wanted = [[[[float(rank)] * 2] * length for rank, length in enumerate(lengths)] for lengths in cases]
    assert run_world(gather) == [wanted] * 3


@pytest.mark.world(3)
def test_values_of_any_length_are_gathered_as_json(run_world: RunWorld) -> None:
    def gather(place: Place) -> list[Any]:
        return collectives.gather_json({"rank": place.rank, "text": "é" * place.rank, "none": None}, tp_axis(place))

    wanted = [{"rank": rank, "text": "é" * rank, "none": None} for rank in range(3)]
    assert run_world(gather) == [wanted] * 3
