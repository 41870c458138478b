"""BatchNorm over data ranks: the statistics, gradients and running values of one device, with every option."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain.launch.place import Place
from disttrain.models.micro_batch import MicroBatch, running
from disttrain.parallel.batch_norm import ALONE, SharedBatchNorm, share_statistics
from disttrain.parallel.mesh import Mesh
from disttrain.train.summary import warnings_of
from disttrain.verify import verb
from tests import nets, tiny
from tests.parallel.ranks import prepared, run_step, sizes

RunWorld = Callable[..., list[Any]]
OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
SHAPES = [(8, 3), (8, 3, 5), (8, 3, 4, 2)]
PARTS = [(8,), (3, 5), (2, 4, 1, 1)]


def layer(shape: tuple[int, ...], options: dict[str, Any]) -> nn.modules.batchnorm._BatchNorm:
    torch.manual_seed(0)
    made = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3, dtype=torch.float64, **options)
    if made.affine:
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    return made


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).normal_(3.0, 2.0, generator=torch.Generator().manual_seed(seed))


@pytest.mark.world(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_torchs_on_the_whole_batch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Three calls; uneven rows over 1, 2 and 4 ranks, each filled up with void rows that nobody may see."""
    plain = layer(shape, options)
    wholes = [numbers(shape, seed).requires_grad_() for seed in (1, 2, 4)]
    wanted = [plain(whole) for whole in wholes]
    sum((y * numbers(shape, 3)).sum() for y in wanted).backward()  # type: ignore[union-attr]

    def entry(place: Place) -> dict[str, Tensor]:
        rows = PARTS[{1: 0, 2: 1, 4: 2}[place.world_size]]
        start, count, most = sum(rows[: place.rank]), rows[place.rank], max(rows)
        valid = torch.arange(most) < count

        def filled(x: Tensor, void: float) -> Tensor:
            return torch.cat([x[start : start + count], torch.full((most - count, *shape[1:]), void, dtype=x.dtype)])

        model = nn.Sequential(layer(shape, options))
        assert share_statistics(model, Mesh({"dp_replicate": place.world_size}, place.rank).axis("data")) == []
        found: dict[str, Tensor] = {}
        with running(MicroBatch(valid if most > count or place.world_size > 1 else None)):
            mine = [filled(whole.detach(), 1e6).requires_grad_() for whole in wholes]
            outputs = [model(x) for x in mine]
            sum((y * filled(numbers(shape, 3), 0.0)).sum() for y in outputs).backward()  # type: ignore[union-attr]
        for index, (x, y) in enumerate(zip(mine, outputs, strict=True)):
            torch.testing.assert_close(y[:count], wanted[index][start : start + count], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x.grad[:count], wholes[index].grad[start : start + count], rtol=1e-11, atol=1e-11)  # type: ignore[index]
            assert not x.grad[count:].any()  # type: ignore[index]
        found |= {name: parameter.grad.clone() for name, parameter in model[0].named_parameters()}  # type: ignore[union-attr]
        return found | {name: buffer.clone() for name, buffer in model[0].named_buffers()}

    for by_rank in sizes(entry, 1, 2, 4):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(sum(part[name] for part in by_rank), parameter.grad, rtol=1e-11, atol=1e-11)
        for name, buffer in plain.named_buffers():
            for part in by_rank:
                torch.testing.assert_close(part[name], buffer, rtol=1e-12, atol=1e-12)
                assert torch.equal(part[name], by_rank[0][name])


def one(options: dict[str, Any] | None = None) -> SharedBatchNorm:
    made = layer((8, 3), options or {})
    share_statistics(made, ALONE)
    assert isinstance(made, SharedBatchNorm)
    return made


def test_evaluation_takes_the_running_statistics_of_torchs() -> None:
    shared, plain = one(), layer((8, 3), {})
    for made in (shared, plain):
        made(numbers((8, 3), 1))
        made.eval()
    x = numbers((4, 3), 5)
    with running(MicroBatch(torch.tensor([True, True, False, False]))):
        torch.testing.assert_close(shared(x), plain(x), rtol=0, atol=0)


def test_without_running_statistics_evaluation_leaves_void_rows_out() -> None:
    shared, plain = one({"track_running_stats": False}).eval(), layer((8, 3), {"track_running_stats": False}).eval()
    x = numbers((4, 3), 5)
    with running(MicroBatch(torch.tensor([True, True, True, False]))):
        torch.testing.assert_close(shared(x)[:3], plain(x[:3]), rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_a_sample_moves_nothing() -> None:
    shared = one()
    before = {name: buffer.clone() for name, buffer in shared.named_buffers()}
    with running(MicroBatch(torch.zeros(8, dtype=torch.bool))):
        assert shared(numbers((8, 3), 1)).isfinite().all()
    assert all(torch.equal(buffer, before[name]) for name, buffer in shared.named_buffers())


def test_a_forward_that_runs_again_in_backward_moves_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    shared, plain = one(), layer((8, 3), {})
    xs = [numbers((8, 3), 1).requires_grad_() for _ in range(2)]
    (checkpoint(shared, xs[0], use_reentrant=False) * numbers((8, 3), 2)).sum().backward()
    (plain(xs[1]) * numbers((8, 3), 2)).sum().backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-11, atol=1e-11)
    assert int(shared.num_batches_tracked) == 1  # type: ignore[arg-type]
    torch.testing.assert_close(shared.running_mean, plain.running_mean, rtol=1e-12, atol=0)


@pytest.mark.world(2)
def test_half_types_are_computed_in_float32(run_world: RunWorld) -> None:
    def entry(place: Place) -> Tensor:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(3))  # type: ignore[union-attr]
        share_statistics(model, Mesh({"dp_replicate": 2}, place.rank).axis("data"))
        x = numbers((8, 3), 1).float()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x[4 * place.rank :][:4])
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        assert model[1].running_mean.dtype == model[1].weight.grad.dtype == torch.float32  # type: ignore[union-attr]
        return model[1].running_mean  # type: ignore[no-any-return]

    wanted = numbers((8, 3), 1).bfloat16().float().mean(0) * 0.1
    for found in run_world(entry):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.world(2)
def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    def entry(place: Place) -> bool:
        shared = one()
        shared.axis = Mesh({"dp_replicate": place.world_size}, place.rank).axis("data")
        refused = pytest.raises(ValueError, match="more than 1 value per channel") if place.world_size == 1 else nullcontext()
        with refused:
            shared(numbers((1, 3), 1))
        return True

    assert all(all(found) for found in sizes(entry, 1, 2))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        one()(numbers((2, 3, 4, 4), 1))


class Own(nn.BatchNorm1d):
    """A user's subclass."""


def test_names_hooks_and_references_stay_and_a_subclass_is_left() -> None:
    inner = nn.BatchNorm1d(3)
    called: list[int] = []
    inner.register_forward_hook(lambda *_: called.append(1))
    model = nn.ModuleDict({"first": inner, "second": inner, "own": Own(3)})
    names = list(model.state_dict())
    assert share_statistics(model, ALONE) == ["own"]
    model["second"](torch.randn(4, 3))
    assert called
    assert model["first"] is inner
    assert isinstance(inner, SharedBatchNorm)
    assert list(model.state_dict()) == names


@pytest.mark.world(4)
def test_running_statistics_are_one_devices_on_every_rank_and_each_ranks_own_when_asked_for() -> None:
    """I05: batches of 2 on four ranks, of 8 on one; with `sync_batch_norm: false` a warning, and evaluation has one set."""

    def entry(place: Place, strategy: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[str]]:
        trainer = prepared(place, dp=place.world_size, strategy=strategy, dtype="float64", **nets.BATCH_NORM)
        for number in range(3):
            trainer.update(run_step(trainer, number))
        after = [buffer.clone() for buffer in trainer.model.buffers()]
        trainer.evaluate()
        return after, [buffer.clone() for buffer in trainer.model.buffers()], warnings_of(trainer)

    (alone,), four = sizes(lambda place: entry(place, {}), 1, 4)
    for after, _, warnings in four:
        assert not warnings
        for found, wanted in zip(after, alone[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    (own,) = sizes(lambda place: entry(place, {"sync_batch_norm": False}), 4)
    assert not torch.equal(own[0][0][0], own[1][0][0])
    for _, evaluated, warnings in own:
        assert all(torch.equal(found, wanted) for found, wanted in zip(evaluated, own[0][1], strict=True) if found.is_floating_point())
        assert "strategy.sync_batch_norm=false" in warnings[0]


@pytest.mark.world(4)
@pytest.mark.parametrize("dp", [2, 4])
def test_verify_of_a_net_with_batch_norm_in_two_micro_batches_with_void_rows(dp: int) -> None:
    proof = verb.prove(tiny.config(dp=dp, micro_batch_size=4 // dp, **nets.BATCH_NORM))
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.tolerance == 1e-10
    assert "buffer" in {error.quantity for error in proof.errors}


@pytest.mark.world(4)
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"pp": 2}, pytest.param({"dp": 4}, marks=pytest.mark.long)], ids=str)
def test_verify_of_resnet18(degrees: dict[str, int]) -> None:
    micro = 4 // degrees.get("dp", 2)
    config = tiny.config(**degrees, micro_batch_size=micro, verify={"steps": 2}, **nets.BATCH_NORM | {"model": nets.RESNET})
    proof = verb.prove(config)
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.world(2)
def test_each_ranks_own_statistics_are_not_the_same_training() -> None:
    proof = verb.prove(tiny.config(dp=2, strategy={"sync_batch_norm": False}, **nets.BATCH_NORM))
    assert not proof.equal
