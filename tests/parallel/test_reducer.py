"""The data axis: gradients are summed exactly, in fixed buckets, whatever the micro-batches, and resumes are bit-exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.parallel.data import MEBIBYTE, Reducer, _grouped
from disttrain.parallel.mesh import Axis, Mesh
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {f"p{number}": nn.Parameter(torch.ones(size, dtype=dtype)) for number, size in enumerate(sizes)}


def data_axis(place: Place) -> Axis:
    return Mesh({"dp_replicate": place.world_size}, place.rank).axis("data")


def backward(parameters: dict[str, nn.Parameter], factor: float, without: tuple[str, ...] = ()) -> None:
    """d/dp = factor x (1 + number of the parameter), for every element."""
    total = sum(p.sum() * factor * (1 + number) for number, (name, p) in enumerate(parameters.items()) if name not in without)
    assert isinstance(total, torch.Tensor)
    total.backward()


@pytest.mark.world(3)
@pytest.mark.parametrize("bucket_size", [25.0, 1e-5], ids=["one bucket", "a bucket each"])
def test_gradients_are_the_sum_over_ranks_and_micro_batches(bucket_size: float, run_world: RunWorld) -> None:
    def grads(place: Place) -> list[list[list[float]]]:
        parameters = parameters_of(3, 2, 4)
        reducer = Reducer(parameters, data_axis(place), bucket_size, False)
        steps = []
        for _ in range(2):
            for micro in range(3):
                if micro == 2:
                    reducer.arm()
                backward(parameters, 10.0**place.rank)
            reducer.finish()
            steps.append([p.grad.tolist() for p in parameters.values()])  # type: ignore[union-attr]
            for parameter in parameters.values():
                parameter.grad = None
        return steps

    wanted = [[3 * 111.0 * (1 + number)] * size for number, size in enumerate((3, 2, 4))]
    assert run_world(grads) == [[wanted, wanted]] * 3


def test_buckets_follow_the_order_of_backward_and_hold_one_type() -> None:
    quarter = MEBIBYTE // 8 // 4
    parameters = list(parameters_of(*[quarter] * 20).values()) + list(parameters_of(4, dtype=torch.float32).values())
    groups = _grouped(parameters, 2 * MEBIBYTE)
    assert [p for group in groups for p in group] == parameters
    assert [len(group) for group in groups] == [4, 8, 8, 1], "the first bucket has 1 MiB, the others 2; another type begins anew"
    (large,) = _grouped([nn.Parameter(torch.ones(MEBIBYTE))], MEBIBYTE)
    assert len(large) == 1


@pytest.mark.world(2)
def test_each_gradient_travels_once_a_step(run_world: RunWorld) -> None:
    """Bytes on the axis are the parameters' own and one float64 count, however many micro-batches there are."""

    def traffic(place: Place) -> tuple[int, int]:
        trainer = prepared(place, dp=2, micro_batch_size=1)
        axis = trainer.mesh.axis("grad")
        run_step(trainer, 0)
        return axis.traffic["all_reduce"][1], sum(p.nbytes for p in trainer.parameters.values())

    for moved, nbytes in run_world(traffic):
        assert moved == nbytes


@pytest.mark.world(2)
def test_a_parameter_that_takes_no_part_is_named(run_world: RunWorld) -> None:
    """C11."""

    def entry(place: Place) -> None:
        parameters = parameters_of(2, 2, 2)
        reducer = Reducer(parameters, data_axis(place), 25.0, False)
        reducer.arm()
        backward(parameters, 1.0, without=("p1",))
        reducer.finish()

    with pytest.raises(UserError, match=r"took no part in the loss of a step.*: p1\n.*find_unused_parameters=true"):
        run_world(entry)


@pytest.mark.world(2)
def test_unused_parameters_may_be_asked_for(run_world: RunWorld) -> None:
    """p1 is used on rank 0 only: the sum is rank 0's. p2 is used nowhere: it has no gradient, and no optimizer moves it."""

    def entry(place: Place) -> list[Any]:
        parameters = parameters_of(2, 2, 2)
        reducer = Reducer(parameters, data_axis(place), 25.0, True)
        seen = []
        for _ in range(2):
            reducer.arm()
            backward(parameters, 1.0, without=("p2",) if place.rank == 0 else ("p1", "p2"))
            reducer.finish()
            seen.append([None if p.grad is None else p.grad.tolist() for p in parameters.values()])
            for parameter in parameters.values():
                parameter.grad = None
        return seen

    assert run_world(entry) == [[[[2.0, 2.0], [2.0, 2.0], None]] * 2] * 2


@pytest.mark.world(3)
def test_a_fresh_process_sums_in_the_same_order_as_one_that_has_run(run_world: RunWorld) -> None:
    """Three ranks, float32, small buckets: the gradient of step 3 after three other steps, and in a process that has made none."""

    def gradient(place: Place, before: int) -> list[list[float]]:
        trainer = prepared(place, dp=3, global_batch_size=6, micro_batch_size=1, steps=8)
        for number in range(before):
            run_step(trainer, number)
            for parameter in trainer.parameters.values():
                parameter.grad = None
        run_step(trainer, 5)
        return [p.grad.flatten().tolist() for p in trainer.parameters.values()]  # type: ignore[union-attr]

    assert run_world(gradient, 3) == run_world(gradient, 0)
