"""What moves on the sharded data axis and what a rank holds, against the formulas of `parallel/shard.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]
WARM = ["torch.distributed.fsdp", "torch._dynamo"]
BLOCKS = ("blocks.0.", "blocks.1.")
FLOAT = 4
"""Bytes."""


def shapes_of(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Whole shapes of a model's parameters, from one rank."""
    return run_ranks(lambda place: {name: tuple(p.shape) for name, p in prepared(place, model=model).parameters.items()}, 1)[0]


def padded(shapes: Iterable[tuple[int, ...]], ranks: int) -> int:
    """Elements, rows filled up to a multiple of `ranks`."""
    return sum(-(-shape[0] // ranks) * ranks * torch.Size(shape[1:]).numel() for shape in shapes)


def unit_sizes(ranks: int, model: dict[str, Any] = tiny.GPT) -> list[int]:
    """Padded elements of each block and, last, of the rest."""
    shapes = shapes_of(model)
    blocks = [padded((shape for name, shape in shapes.items() if name.startswith(block)), ranks) for block in BLOCKS]
    return [*blocks, padded((shape for name, shape in shapes.items() if not name.startswith(BLOCKS)), ranks)]


# --- what moves -------------------------------------------------------------------------------------------------------------


def traffic(place: Place, **config: Any) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """On the axes that cut and that replicate, in one step."""
    trainer = prepared(place, **config)
    run_step(trainer, 0)
    return trainer.mesh.axis("dp_shard").traffic, trainer.mesh.axis("replicate").traffic


@pytest.mark.world(3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_on_the_axis_are_the_formulas(zero: int, run_world: RunWorld) -> None:
    """Three ranks, so that rows are filled up; two micro-batches."""
    units, m = unit_sizes(3), 2
    everything, root = sum(units) * FLOAT, units[-1] * FLOAT
    wanted = {
        1: {"all_gather": [3, everything], "reduce_scatter": [3, everything]},
        2: {"all_gather": [3, everything], "reduce_scatter": [3 * m, everything * m]},
        3: {"all_gather": [5 * m, (2 * everything - root) * m], "reduce_scatter": [3 * m, everything * m]},
    }[zero]
    found = run_world(lambda place: traffic(place, shard=3, global_batch_size=12, micro_batch_size=2, strategy={"zero": zero}), warm=WARM)
    assert found == [(wanted, {})] * 3


@pytest.mark.world(4)
def test_replicas_sum_their_shards_once_a_step(run_world: RunWorld) -> None:
    units = unit_sizes(2)
    found = run_world(lambda place: traffic(place, dp=2, shard=2, micro_batch_size=1, strategy={"zero": 2}), warm=WARM)
    shard = {"all_gather": [3, sum(units) * FLOAT], "reduce_scatter": [6, 2 * sum(units) * FLOAT]}
    assert found == [(shard, {"all_reduce": [3, sum(units) * FLOAT // 2]})] * 4


@pytest.mark.world(2)
def test_gathering_in_bf16_halves_those_bytes_only(run_world: RunWorld) -> None:
    everything = sum(unit_sizes(2)) * FLOAT
    found = run_world(lambda place: traffic(place, shard=2, strategy={"zero": 2, "gather_dtype": "bf16"}), warm=WARM)
    assert found == [({"all_gather": [3, everything // 2], "reduce_scatter": [3, everything]}, {})] * 2


# --- what a rank holds --------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes of whole weights and whole gradients, looked at before each module's forward and backward."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.weights, self.gradients = 0, 0
        for module in trainer.model.modules():
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self.then_backward)

    def then_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            output.register_hook(self.look)

    def look(self, *_: Any) -> None:
        whole = [p for p in self.trainer.model.parameters() if type(p) is nn.Parameter]
        self.weights = max(self.weights, storages(whole))
        self.gradients = max(self.gradients, storages(p.grad for p in whole if p.grad is not None))


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece of memory once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for pointer, size in found.items() if pointer)


WIDE = tiny.GPT | {"hidden_size": 64, "vocab_size": 64, "num_layers": 2}


@pytest.mark.world(2)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_holds_what_the_formula_says(zero: int, run_world: RunWorld) -> None:
    """At rest 1/n of weights, gradients and two moments; within a step whole ones by `zero`. J11: no more with eight micro-batches."""

    def measure(place: Place, micro: int) -> dict[str, int]:
        trainer = prepared(place, shard=2, model=WIDE, global_batch_size=16, micro_batch_size=micro, strategy={"zero": zero})
        memory = Memory(trainer)
        report = run_step(trainer, 0)
        rows = trainer.parameters.values()
        found = {"weights": storages(rows), "gradients": storages(p.grad for p in rows if p.grad is not None)}
        trainer.update(report)
        moments = [value for state in trainer.update.optimizer.state.values() for value in state.values() if value.dim()]
        return found | {"moments": storages(moments), "whole weights": memory.weights, "whole gradients": memory.gradients}

    *blocks, root = unit_sizes(2, WIDE)
    everything, largest = sum(blocks) + root, max(blocks)
    for micro in (8, 1):
        for found in run_world(measure, micro, warm=WARM):
            assert found["weights"] == pytest.approx(everything / 2 * FLOAT, rel=0.01)
            assert found["gradients"] == pytest.approx(everything / 2 * FLOAT, rel=0.01)
            assert found["moments"] == pytest.approx(2 * everything / 2 * FLOAT, rel=0.01)
            whole = root + largest if zero == 3 else everything
            assert found["whole weights"] == pytest.approx(whole * FLOAT, rel=0.01)
            if zero == 1 and micro == 1:
                assert found["whole gradients"] == pytest.approx(everything * FLOAT, rel=0.01)
            else:
                assert found["whole gradients"] <= (root + largest) * FLOAT * 1.01
