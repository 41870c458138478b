"""Compressed gradients: what they lose, what they save, and that a checkpoint keeps what they remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.errors import ConfigError
from disttrain.launch.place import Place, alone
from disttrain.parallel.compress import PowerSGD
from disttrain.parallel.mesh import Mesh
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]
ROWS, COLUMNS = 24, 16


def parameters() -> dict[str, nn.Parameter]:
    return {"matrix": nn.Parameter(torch.zeros(ROWS, COLUMNS)), "vector": nn.Parameter(torch.zeros(5))}


def summed(place: Place, compressor: PowerSGD, matrix: torch.Tensor, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = torch.cat([matrix.flatten(), vector])
    views = {"matrix": flat[: matrix.numel()].view_as(matrix), "vector": flat[matrix.numel() :]}
    compressor.start(flat, views).wait()
    return views


def made(place: Place, rank: int) -> PowerSGD:
    axis = Mesh({"dp_replicate": place.world_size}, place.rank).axis("grad")
    return PowerSGD(axis, rank, parameters(), seed=0)


@pytest.mark.world(2)
def test_a_sum_of_low_rank_is_found_exactly(run_world: RunWorld) -> None:
    """Two ranks, each of a matrix of rank one: their sum has rank two, and two columns hold it after one warm start."""

    def error(place: Place) -> float:
        compressor = made(place, 2)
        outer = torch.outer(torch.arange(ROWS) + 1.0 + place.rank, torch.cos(torch.arange(COLUMNS) * (1.0 + place.rank)))
        every = sum(torch.outer(torch.arange(ROWS) + 1.0 + r, torch.cos(torch.arange(COLUMNS) * (1.0 + r))) for r in range(2))
        views = summed(place, compressor, outer, torch.ones(5) * (place.rank + 1))
        assert torch.equal(views["vector"], torch.full((5,), 3.0))
        return float((views["matrix"] - every).abs().max() / every.abs().max())

    assert max(run_world(error)) < 1e-5


@pytest.mark.world(2)
def test_what_was_lost_comes_later(run_world: RunWorld) -> None:
    """Error feedback: over many steps of one gradient, the mean of what was applied goes to the gradient."""

    def errors(place: Place) -> list[float]:
        generator = torch.Generator().manual_seed(3)
        parts = torch.randn(2, ROWS, COLUMNS, generator=generator)
        compressor, applied, found = made(place, 1), torch.zeros(ROWS, COLUMNS), []
        for step in range(1, 201):
            applied += summed(place, compressor, parts[place.rank].clone(), torch.ones(5))["matrix"]
            if step in (1, 20, 200):
                found.append(float((applied / step - parts.sum(0)).norm() / parts.sum(0).norm()))
        return found

    for first, later, last in run_world(errors):
        assert first > 0.5
        assert later < first / 2
        assert last < later / 5


@pytest.mark.world(2)
def test_an_overflow_leaves_no_trace(run_world: RunWorld) -> None:
    def kept(place: Place) -> bool:
        compressor = made(place, 1)
        matrix = torch.ones(ROWS, COLUMNS)
        if place.rank == 1:
            matrix[2, 3] = torch.inf
        views = summed(place, compressor, matrix, torch.ones(5))
        seen = not bool(views["matrix"].isfinite().all())
        return seen and all(bool(one.isfinite().all()) for one in compressor.state().values())

    assert run_world(kept) == [True, True]


@pytest.mark.world(2)
@pytest.mark.parametrize(("kind", "at_most"), [("bf16", 0.5), ("fp16", 0.5), ("powersgd", 0.45)])
def test_bytes_and_error_of_a_model(run_world: RunWorld, kind: str, at_most: float) -> None:
    def measured(place: Place) -> tuple[float, float]:
        plain, small = prepared(place, dp=2), prepared(place, dp=2, strategy={"compression": kind})
        run_step(plain, 0)
        run_step(small, 0)
        moved, whole = (trainer.mesh.axis("grad").traffic["all_reduce"][1] for trainer in (small, plain))
        gradient = torch.cat([parameter.grad.flatten() for parameter in plain.parameters.values()])
        found = torch.cat([parameter.grad.flatten() for parameter in small.parameters.values()])
        return moved / whole, float((found - gradient).norm() / gradient.norm())

    for share, error in run_world(measured):
        assert share <= at_most
        assert 0 < error < (0.01 if kind != "powersgd" else 0.9)


@pytest.mark.world(2)
def test_its_memory_is_part_of_the_state(run_world: RunWorld) -> None:
    def names(place: Place) -> set[str]:
        trainer = prepared(place, dp=2, strategy={"compression": "powersgd"})
        for name, (tensor, layout) in trainer.strategy.kept().items():
            ((whole, local),) = layout.pieces(trainer.mesh.coordinate())
            assert whole[0] == slice(place.rank, place.rank + 1)
            assert tensor[local].shape == tensor.shape, name
        return set(trainer.strategy.kept())

    (found, same) = run_world(names)
    assert found == same
    assert {"dp_replicate2/blocks.0.mlp.up.weight/error", "dp_replicate2/blocks.0.mlp.up.weight/q"} <= found


@pytest.mark.world(2)
def test_powersgd_is_refused_under_a_moving_loss_scale(run_world: RunWorld) -> None:
    def refused(place: Place) -> bool:
        amp = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16"}}
        with pytest.raises(ConfigError, match="loss scale"):
            prepared(place, dp=2, strategy={"compression": "powersgd"}, callbacks=amp)
        return True

    assert run_world(refused) == [True, True]


def test_one_rank_compresses_nothing() -> None:
    assert prepared(alone(), strategy={"compression": "bf16"}).strategy.compressors == []
