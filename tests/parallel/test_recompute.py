"""Recompute, offload and compile change what is kept and how it is computed, never what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.launch.place import Place, alone
from disttrain.models.cnn import SimpleCNN
from disttrain.models.transformer import Block, BlockShape
from disttrain.parallel.batch_norm import ALONE, share_statistics
from disttrain.parallel.blocks import blocks_of
from disttrain.parallel.random import Streams
from disttrain.parallel.recompute import offload_blocks, recompute_blocks
from disttrain.verify import verb
from tests import tiny
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]

SEQUENCE_CUT = {"tp": 2, "sequence_parallel": True}
SPLIT = {"pp": 2}
DEEP = {"model": tiny.LLAMA | {"num_layers": 4}, "micro_batch_size": 1}
DROPPING = tiny.GPT | {"dropout": 0.3}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at activations' .grad
@pytest.mark.parametrize(
    ("knobs", "layout"),
    [
        ({"recompute": "full"}, SEQUENCE_CUT),
        ({"recompute": "selective"}, {"tp": 2}),
        ({"recompute": "full", "recompute_every": 2, "offload_activations": True}, {"dp": 2}),
        *(({"recompute": "full", "schedule": name}, SPLIT | DEEP) for name in ("zbv", "dualpipev", "interleaved_zero_bubble")),
        ({"compile": True, "compile_backend": "eager", "zero": 0}, {"shard": 2, "ep": 2, "model": tiny.MOE}),
        ({"compile": True, "compile_backend": "eager"}, {"cp": 2, "model": tiny.MOE}),
        pytest.param({"compile": True, "compile_backend": "aot_eager"}, {"tp": 2}, marks=pytest.mark.long),
        pytest.param({"compile": True, "compile_backend": "aot_eager", "recompute": "full"}, {}, marks=pytest.mark.long),
    ],
)
def test_equal_to_one_device(knobs: dict[str, Any], layout: dict[str, Any]) -> None:
    proof = verb.prove(tiny.config(**{"strategy": knobs, "model": tiny.LLAMA, "micro_batch_size": 2, "verify": {"steps": 2}} | layout))
    assert proof.equal, (proof.failed, proof.cause)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("full", SEQUENCE_CUT), ("selective", SEQUENCE_CUT), ("full", SPLIT | {"strategy": {"schedule": "zbv"}})],
    ids=["full", "selective", "full, backward in two"],
)
def test_masks_are_drawn_again_as_they_were(run_world: RunWorld, kind: str, layout: dict[str, Any]) -> None:
    """In the shared stream, the rank's own, and in what follows: gradients with dropout are those without recompute."""

    def gradients(place: Place) -> float:
        found = []
        for knobs in ({}, {"recompute": kind}):
            more = {"model": DROPPING | {"num_layers": 4}, "micro_batch_size": 4, "dtype": "float64"}
            trainer = prepared(place, **more | layout | {"strategy": layout.get("strategy", {}) | knobs})
            run_step(trainer, 0)
            found.append(torch.cat([parameter.grad.flatten() for parameter in trainer.parameters.values() if parameter.grad is not None]))
        return float((found[0] - found[1]).abs().max() / found[0].abs().max())

    assert max(run_world(gradients)) < 1e-14


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_batch_norm_moves_its_statistics_once(kind: str) -> None:
    """On one rank, where torch's own kernel runs."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    again = copy.deepcopy(plain)
    share_statistics(again, ALONE)
    recompute_blocks({"block": again}, kind, 1, Streams(0, torch.device("cpu")))
    x = torch.randn(6, 4, dtype=torch.float64)
    for net in (plain, again):
        (net(x) ** 3).sum().backward()
    for (name, wanted), found in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)
    for (name, wanted), found in zip(plain.named_buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=name)


def saved_bytes(kind: str) -> int:
    """What one block keeps between forward and backward, its parameters left out."""
    block = Block(BlockShape(64, 4, 4, 256))
    if kind != "none":
        recompute_blocks({"block": block}, kind, 1, Streams(0, torch.device("cpu")))
    own = {parameter.data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x_btd = torch.randn(2, 32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y_btd = block(x_btd)
    del y_btd
    return sum(kept.values())


def test_full_keeps_the_input_alone() -> None:
    """2 x 32 x 64 float32 numbers; without recompute a GPT-2 block keeps at least 12 times that."""
    x_bytes = 2 * 32 * 64 * 4
    assert saved_bytes("none") >= 12 * x_bytes
    assert saved_bytes("full") <= x_bytes


def test_selective_runs_no_matrix_product_twice() -> None:
    """Products in forward and backward of a block of 4 linear maps: 4 + 8, and 4 more where all is recomputed."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for kind in ("none", "selective", "full"):
        block = Block(BlockShape(64, 4, 4, 256))
        if kind != "none":
            recompute_blocks({"block": block}, kind, 1, Streams(0, torch.device("cpu")))
        with FlopCounterMode(display=False) as counter:
            block(torch.randn(2, 32, 64, requires_grad=True)).sum().backward()
        flops[kind] = counter.get_total_flops()
    assert flops["selective"] == flops["none"]
    assert 1.2 < flops["full"] / flops["none"] <= 4 / 3


def test_offload_keeps_parameters_and_moves_the_rest() -> None:
    torch.manual_seed(0)
    block = Block(BlockShape(16, 2, 2, 32))
    plain = copy.deepcopy(block).double()
    offload_blocks([block])
    block.double()  # parameters get their memory after blocks were changed
    x_btd = torch.randn(2, 4, 16, dtype=torch.float64)
    plain(x_btd).square().sum().backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    moved = []
    pack = block.forward._pack
    block.forward._pack = lambda saved: moved.append(pack(saved)) or moved[-1]
    block(x_btd).square().sum().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(block.parameters(), wanted, strict=True))
    assert any(isinstance(one, tuple) for one in moved)
    assert not any(one[0].shape == block.attention.out.weight.shape for one in moved if isinstance(one, tuple))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not say which its blocks are"):
        blocks_of(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="SimpleCNN has no blocks that repeat"):
        blocks_of(SimpleCNN())


def test_names_stay_plain_when_compiled() -> None:
    """E07."""
    trainer = prepared(alone(), strategy={"compile": True, "compile_backend": "eager", "recompute": "full"})
    assert set(trainer.parameters) == set(prepared(alone()).parameters)
    assert set(trainer.model.state_dict()) == set(prepared(alone()).model.state_dict())
