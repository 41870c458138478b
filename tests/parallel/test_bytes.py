"""Bytes on the wire of a step, as the ledger counts them (those of the whole tensor), equal the closed formulas exactly.

Letters: m micro-batches of b samples, t tokens (of this rank's cp part), d hidden, L layers, n ranks of the axis, g key-value
heads (of this rank) of e numbers, z bytes a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from tests import tiny
from tests.parallel.ranks import prepared, run_step

Traffic = dict[str, list[int]]
"""By collective: calls and bytes."""

d, L, V = 32, 2, tiny.VOCABULARY
MICRO, SAMPLES = 2, 4
SIZES = {"float32": 4, "float64": 8}


def measured(**config: Any) -> dict[str, Traffic]:
    """What the second step moves over `cp`, `tp` and `grad`, counted on rank 0."""

    def entry(place: Place) -> dict[str, Traffic]:
        trainer = prepared(place, micro_batch_size=SAMPLES, **config)
        axes = [trainer.mesh.axis(name) for name in ("cp", "tp", "grad")]
        trainer.update(run_step(trainer, 0))
        for axis in axes:
            axis.traffic.clear()
        run_step(trainer, 1)
        return {axis.name: dict(axis.traffic) for axis in axes}

    return run_world(entry, int(tiny.config(**config).launch.world_size))[0]  # type: ignore[no-any-return]


def times(each: Mapping[str, tuple[int, int]]) -> Traffic:
    """{collective: (calls a micro-batch, bytes a call)} over all micro-batches."""
    return {name: [MICRO * calls, MICRO * calls * size] for name, (calls, size) in each.items()}


def attention_traffic(attention: str, n: int, tp: int, size: int) -> Traffic:
    """Over cp: keys and values of all ranks at once, their gradients back; or rank by rank, with gradients behind them."""
    g, e = 2 // tp, d // 4
    own = 2 * SAMPLES * (tiny.CONTEXT // n) * g * e * size
    if attention == "gather":
        return times({"all_gather": (L, n * own), "reduce_scatter": (L, n * own)})
    return times({"shift": (3 * (n - 1) * L, own)})


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_context_parallel(cp: int, tp: int, attention: str, dtype: str) -> None:
    found = measured(cp=cp, tp=tp, model=tiny.LLAMA, strategy={"attention": attention}, dtype=dtype)
    assert found["cp"] == attention_traffic(attention, cp, tp, SIZES[dtype])
    if tp == 1:  # the gradients of all weights, once a step
        weights = 2 * V * d + L * (2 * d + 2 * d * d + 2 * d * d // 2 + 3 * 48 * d) + d
        (_, moved) = found["grad"]["all_reduce"]
        assert moved == weights * SIZES[dtype]


def tensor_traffic(t: int, size: int, sequence: bool) -> Traffic:
    """GPT-2 with its vocabulary cut: the embedding, four a layer (two forward, two backward), the head's input gradient.

    Under sequence parallelism an all-reduce is a reduce-scatter and an all-gather; what a column matrix gathered in
    forward it gathers again in backward: 2 a layer and the head's. The loss: a maximum, a sum and a target each token.
    """
    activations = SAMPLES * t * d * size
    of_loss = SAMPLES * t * size
    loss = [MICRO * 2, MICRO * 3 * of_loss]
    if not sequence:
        calls = 1 + 4 * L + 1
        return {"all_reduce": [MICRO * calls + loss[0], MICRO * calls * activations + loss[1]]}
    norms, row_biases, positions = (2 * L + 1) * 2 * d, 2 * L * d, tiny.CONTEXT * d
    in_parts = (norms + row_biases + positions) * size
    scattered = 1 + 2 * L + 2 * L + 1
    gathered = scattered + 2 * L + 1
    moved = times({"all_gather": (gathered, activations), "reduce_scatter": (scattered, activations)})
    return moved | {"all_reduce": [loss[0] + 1, loss[1] + in_parts]}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (1, 4), (2, 2)])
def test_tensor_parallel(cp: int, tp: int, sequence: bool) -> None:
    found = measured(cp=cp, tp=tp, sequence_parallel=sequence)
    assert found["tp"] == tensor_traffic(tiny.CONTEXT // cp, 4, sequence)
