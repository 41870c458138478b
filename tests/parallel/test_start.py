"""The same start in every layout, and who draws which dropout masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.data.synthetic import Synthetic
from disttrain.launch.place import Place
from disttrain.models.task import Regression
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.random import Streams, mix
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.parallel.ranks import prepared, run_step, sizes

RunWorld = Callable[..., list[Any]]
CPU = torch.device("cpu")

Values = dict[str, torch.Tensor]


def start(place: Place, **config: Any) -> dict[str, Any]:
    """This rank's part of every parameter, as lists, and where it lies."""
    trainer = prepared(place, tp=place.world_size, **config)
    at = trainer.mesh.coordinate()
    return {
        name: (parameter.tolist(), trainer.layouts[name].shape, trainer.layouts[name].pieces(at))
        for name, parameter in trainer.parameters.items()
    }


def gathered(by_rank: list[dict[str, Any]]) -> Values:
    """Whole parameters from every rank's pieces."""
    whole: Values = {}
    for parts in by_rank:
        for name, (values, shape, pieces) in parts.items():
            target = whole.setdefault(name, torch.full(shape, torch.nan))
            for source, local in pieces:
                target[source] = torch.tensor(values)[local]
    return whole


@pytest.mark.world(4)
@pytest.mark.parametrize("model", [tiny.GPT, tiny.LLAMA_MERGED | {"num_kv_heads": 4}], ids=["gpt", "llama"])
def test_the_start_is_the_same_in_every_tensor_degree_and_shards_differ(model: dict[str, Any]) -> None:
    """M9, M10, I10."""
    by_size = sizes(lambda place: start(place, model=model), 1, 2, 4)
    one, two, four = (gathered(by_rank) for by_rank in by_size)
    for name, value in one.items():
        assert not value.isnan().any()
        assert torch.equal(two[name], value), name
        assert torch.equal(four[name], value), name
    cut = [name for name, (values, shape, _) in by_size[1][0].items() if torch.tensor(values).shape != torch.Size(shape)]
    assert {"tokens.weight", "blocks.0.mlp.down.weight", "blocks.1.attention.out.weight"} <= set(cut)
    for name in cut:
        first, second = (torch.tensor(part[name][0]) for part in by_size[1])
        assert name.endswith("bias") or not torch.equal(first, second), f"the shards of {name} are identical"


def test_the_start_has_the_width_that_the_model_states() -> None:
    """Of the whole fan-in's, in float32 whatever the weights' type; another seed, other weights."""
    wide = tiny.GPT | {"hidden_size": 256, "num_layers": 1, "vocab_size": 64}
    (one,), (double,), (other,) = (
        sizes(lambda place, more=more: start(place, model=wide, **more), 1)[0] for more in ({}, {"dtype": "float64"}, {"seed": 1})
    )
    weights = gathered([one])
    assert float(weights["blocks.0.mlp.up.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(weights["blocks.0.mlp.down.weight"].std()) == pytest.approx(0.02 / 2**0.5, rel=0.02)
    assert torch.equal(gathered([double])["tokens.weight"], weights["tokens.weight"])
    assert not torch.equal(gathered([other])["tokens.weight"], weights["tokens.weight"])


@pytest.mark.world(2)
def test_a_model_without_init_parameter_starts_as_it_was_built(run_world: RunWorld) -> None:
    """Built whole under one seed on every rank, then cut."""

    class Plain(nn.Module):
        plan = {"0": "column", "2": "row"}

        def __init__(self) -> None:
            super().__init__()
            self.task = Regression()
            for name, layer in enumerate((nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))):
                self.add_module(str(name), layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    def parts(place: Place) -> list[list[float]]:
        torch.manual_seed(7)
        model = Plain()
        data = Synthetic(kind="vectors", shape=(4,), num_samples=8, num_validation=0)
        trainer = Trainer(model, data, steps=1, global_batch_size=8, mesh=Mesh({"tp": 2}, place.rank))
        return [trainer.parameters["0.weight"].tolist(), trainer.parameters["2.weight"].tolist(), trainer.parameters["2.bias"].tolist()]

    first, second = run_world(parts)
    torch.manual_seed(7)
    whole = Plain()
    assert first[0] + second[0] == whole.get_parameter("0.weight").tolist()
    assert [a + b for a, b in zip(first[1], second[1], strict=True)] == whole.get_parameter("2.weight").tolist()
    assert first[2] == second[2] == whole.get_parameter("2.bias").tolist()


# --- random streams ---------------------------------------------------------------------------------------------------


def test_streams_follow_from_seed_step_and_place_alone() -> None:
    """The shared stream is one per data rank, the own one is each rank's; drawing from the own one moves the shared one nowhere."""

    def draws(rank: int, step: int, seed: int = 0) -> tuple[float, float, float, float]:
        mesh = Mesh.__new__(Mesh)
        mesh.degrees, mesh.rank, mesh.size = {"pp": 1, "dp_replicate": 2, "dp_outer": 1, "ep": 1, "cp": 1, "tp": 2}, rank, 4
        at = mesh.coordinate()
        streams = Streams(seed, CPU, at["data"], at["tp"])
        streams.begin(step)
        first = torch.rand(()).item()
        with streams.own():
            own = torch.rand(()).item()
        with streams.own():
            own_again = torch.rand(()).item()
        return first, own, own_again, torch.rand(()).item()

    before = torch.get_rng_state()
    by_rank = [draws(rank, step=3) for rank in range(4)]
    assert by_rank[0][0] == by_rank[1][0] != by_rank[2][0] == by_rank[3][0]
    assert by_rank[0][3] == by_rank[1][3] != by_rank[0][0]
    assert len({own for _, own, *_ in by_rank}) == 4
    assert all(own != again for _, own, again, _ in by_rank)
    assert draws(0, step=3) == by_rank[0]
    assert draws(0, step=4)[0] != by_rank[0][0]
    assert draws(0, step=3, seed=1)[0] != by_rank[0][0]
    torch.set_rng_state(before)


def test_mixed_numbers_do_not_collide() -> None:
    assert len({mix(seed, step, rank) for seed in range(8) for step in range(32) for rank in range(8)}) == 8 * 32 * 8


@pytest.mark.world(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_residual_activations_agree_in_the_tensor_group_with_dropout(sequence_parallel: bool, run_world: RunWorld) -> None:
    """C08: at the first step and later, whatever else draws; under sequence parallelism each rank has its own tokens."""

    def residuals(place: Place) -> list[list[float]]:
        model = tiny.GPT | {"dropout": 0.1}
        trainer = prepared(place, dp=2, tp=2, model=model, sequence_parallel=sequence_parallel, optimizer=tiny.SGD)
        seen: list[list[float]] = []
        block = trainer.model.blocks[-1]  # type: ignore[index]
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().flatten().tolist()))
        for number in range(3):
            trainer.update(run_step(trainer, number))
        return seen

    by_rank = run_world(residuals)
    assert len(by_rank[0]) == 3
    if sequence_parallel:
        assert all(a != b for a, b in zip(by_rank[0], by_rank[1], strict=True))
    else:
        assert by_rank[0] == by_rank[1]
        assert by_rank[2] == by_rank[3]
    assert by_rank[0] != by_rank[2]
