"""What a pipeline sends, what it refuses at run time, and which models it cuts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torch import nn

from disttrain.callbacks.grad_accumulation import GradAccumulation
from disttrain.config.schedules import SCHEDULES, holders
from disttrain.errors import ConfigError, UserError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.models.cnn import SimpleCNN
from disttrain.models.micro_batch import attach
from disttrain.models.task import Classification
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.options import Options
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.parallel.ranks import prepared, run_step
from tests.parallel.test_refused import Rows

RunWorld = Callable[..., list[Any]]
DEEP = tiny.GPT | {"num_layers": 4}


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, False])
def test_what_crosses_the_pipeline_is_what_the_formula_says(schedule: str, tied: bool, run_world: RunWorld) -> None:
    """A border between ranks: one send of the residual stream forward, one of its gradient backward, a micro-batch."""

    def entry(place: Place) -> dict[str, dict[str, list[int]]]:
        model = DEEP | {"tie_embeddings": tied}
        trainer = prepared(place, pp=2, strategy={"schedule": schedule}, model=model, micro_batch_size=2, dtype="float64")
        run_step(trainer, 0)
        trainer.update.optimizer.zero_grad(set_to_none=True)
        axes = {name: trainer.mesh.axis(name) for name in ("pp", "ends")}
        for axis in axes.values():
            axis.traffic.clear()
        run_step(trainer, 1)
        return {name: axis.traffic for name, axis in axes.items()}

    where = holders(schedule, 2, 2 if schedule in ("gpipe", "1f1b") else 4)
    borders = sum(a != b for a, b in pairwise(where))
    num_micro, stream = 4, 2 * tiny.CONTEXT * 32 * 8
    for found in run_world(entry):
        moved = [num_micro * borders, num_micro * borders * stream]
        assert found["pp"] == {"send": moved, "receive": moved}
        tied_over_ends = tied and where[-1] != where[0]
        assert found["ends"] == ({"all_reduce": [1, tiny.VOCABULARY * 32 * 8]} if tied_over_ends else {})


@pytest.mark.world(2)
def test_sequence_parallel_streams_cross_in_parts(run_world: RunWorld) -> None:
    def entry(place: Place) -> list[int]:
        trainer = prepared(place, pp=2, tp=2, sequence_parallel=True, model=DEEP, micro_batch_size=4, dtype="float64")
        run_step(trainer, 0)
        trainer.mesh.axis("pp").traffic.clear()
        trainer.update.optimizer.zero_grad(set_to_none=True)
        run_step(trainer, 1)
        return trainer.mesh.axis("pp").traffic["send"]

    assert run_ranks(entry, 4) == [[2, 2 * 4 * (tiny.CONTEXT // 2) * 32 * 8]] * 4


@pytest.mark.world(2)
def test_each_rank_holds_its_layers_alone_and_draws_one_devices_start(run_world: RunWorld) -> None:
    """H11: stages are drawn by name, so no two layers start alike and all start as on one device."""

    def entry(place: Place, **layout: Any) -> dict[str, list[float]]:
        trainer = prepared(place, model=DEEP, micro_batch_size=2, **layout)
        assert set(trainer.layouts) >= set(trainer.parameters)
        return {name: parameter.flatten().tolist() for name, parameter in trainer.parameters.items()}

    (whole,) = run_ranks(entry, 1)
    for schedule, size in (("1f1b", 2), ("1f1b", 4), ("zbv", 2)):
        parts = run_ranks(lambda place, name=schedule, n=size: entry(place, pp=n, strategy={"schedule": name}), size)
        assert {name for part in parts for name in part} == set(whole)
        assert all(values == whole[name] for part in parts for name, values in part.items())
        shared = [name for name in whole if sum(name in part for part in parts) > 1]
        assert shared == (["tokens.weight"] if schedule == "1f1b" else [])
    layers = [values for name, values in whole.items() if name.endswith("mlp.up.weight")]
    assert len({tuple(values) for values in layers}) == 4


# --- other models -------------------------------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(index), dtype=torch.float64), index % 10


def losses(model: nn.Module, data: Any, mesh: Mesh, micro: int | None = 2, **options: Any) -> list[float]:
    """Final loss and norm of three steps."""
    callbacks = [GradAccumulation(micro)] if micro else []
    trainer = Trainer(
        model, data, steps=3, global_batch_size=12, dtype=torch.float64, mesh=mesh, options=Options(**options), callbacks=callbacks
    )
    trainer.fit()
    return [trainer.metrics["train/loss"], trainer.metrics["train/grad_norm"]]


def sequential() -> nn.Module:
    layers = [("up", nn.Linear(8, 16)), ("act", nn.Tanh()), ("mid", nn.Linear(16, 16)), ("act2", nn.Tanh()), ("out", nn.Linear(16, 2))]
    model = nn.Sequential(OrderedDict(layers))
    model.task = Classification(accuracy=False)  # type: ignore[assignment]
    return model


def frozen() -> nn.Module:
    model = sequential()
    model.get_submodule("up").requires_grad_(False)
    return model


def cnn() -> nn.Module:
    return SimpleCNN(task=Classification(accuracy=False))


@pytest.mark.parametrize(("make", "data"), [(sequential, Rows()), (frozen, Rows()), (cnn, Images())], ids=["sequential", "frozen", "cnn"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_any_chain_of_modules_is_cut(make: Callable[[], nn.Module], data: Any, schedule: str) -> None:
    if make is cnn and schedule == "zbv":
        pytest.skip("it has two parts, and zbv on two ranks wants four")

    def entry(place: Place) -> list[float]:
        torch.manual_seed(0)
        mesh = Mesh({"pp": place.world_size}, place.rank)
        return losses(make(), data, mesh, schedule=schedule)

    ((wanted),) = run_ranks(entry, 1)
    assert run_ranks(entry, 2) == [pytest.approx(wanted, rel=1e-12)] * 2


class Plain(nn.Module):
    """Says nothing of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.task = sequential(), Classification(accuracy=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Pair(nn.Module):
    """Two tensors, where a pipeline can send one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


def pairs() -> nn.Module:
    model = nn.Sequential(Pair(), nn.Identity())
    model.task = Classification(accuracy=False)  # type: ignore[assignment]
    return model


def shared() -> nn.Module:
    """One weight in stages that are neither first nor last."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model.get_submodule("2").weight = model.get_submodule("1").weight
    model.task = Classification(accuracy=False)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("make", "ranks", "options", "said"),
    [
        (Plain, 2, {}, "does not say what they are"),
        (sequential, 6, {}, "5 layers for 6 pipeline stages"),
        (sequential, 2, {"schedule": "zbv", "virtual_stages": 3}, "exactly 2 a rank"),
        (sequential, 2, {"stage_split": ["out", "mid"]}, "names the first module of 2 stages, but there are 1"),
        (sequential, 2, {"stage_split": ["middle"]}, "no stage can begin at middle; it can at act, mid, act2, out"),
        (sequential, 3, {"stage_split": ["out", "mid"]}, "not in the order of forward"),
        (shared, 4, {}, "are one parameter"),
        (pairs, 2, {}, "passes one floating-point tensor; a stage of this model returns a tuple"),
    ],
)
def test_what_can_not_be_cut_is_refused_by_name(make: Callable[[], nn.Module], ranks: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, UserError)) as caught:
        run_ranks(lambda place: losses(make(), Rows(), Mesh({"pp": ranks}, place.rank), **options), ranks)
    assert said in str(caught.value)


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_work_or_are_refused_and_never_hang(schedule: str, run_world: RunWorld) -> None:
    """H02, H01: one, two, four micro-batches on four ranks."""

    def entry(place: Place) -> list[str]:
        found = []
        for micro in (12, 6, 3):
            torch.manual_seed(0)
            layers = [nn.Linear(8, 8) for _ in range(7)]
            model = nn.Sequential(*layers, nn.Linear(8, 2))
            model.task = Classification(accuracy=False)  # type: ignore[assignment]
            try:
                loss, norm = losses(model, Rows(), Mesh({"pp": 4}, place.rank), micro, schedule=schedule)
                found.append(f"{loss:.12f} {norm:.12f}")
            except ConfigError as error:
                found.append(error.message)
        return found

    def alone(place: Place) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)), nn.Linear(8, 2))
        model.task = Classification(accuracy=False)  # type: ignore[assignment]
        loss, norm = losses(model, Rows(), Mesh(), 3)
        return f"{loss:.12f} {norm:.12f}"

    least = {"1f1b": 4, "dualpipev": 8}.get(schedule, 1)
    (wanted,) = run_ranks(alone, 1)
    for found in run_world(entry):
        for num_micro, said in zip((1, 2, 4), found, strict=True):
            assert said == wanted if num_micro >= least else f"at least {least} micro-batches" in said


class Inner(nn.Module):
    """Attaches a loss of its own in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return attach(y, "inner", y.square().sum(1))


class TwoTerms(Classification):
    """Counts the loss that arises inside as well."""

    def counts(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().counts(targets), "inner": torch.ones(len(targets))}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_arises_in_a_stage_counts(schedule: str) -> None:
    def entry(place: Place) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), Inner(), nn.Linear(16, 16), nn.Linear(16, 2))
        return losses_of_terms(model, Mesh({"pp": place.world_size}, place.rank), schedule)

    (wanted,) = run_ranks(entry, 1)
    assert run_ranks(entry, 2) == [pytest.approx(wanted, rel=1e-12)] * 2


def losses_of_terms(model: nn.Module, mesh: Mesh, schedule: str) -> list[float]:
    trainer = Trainer(
        model,
        Rows(),
        task=TwoTerms(accuracy=False),
        steps=3,
        global_batch_size=12,
        dtype=torch.float64,
        mesh=mesh,
        options=Options(schedule=schedule),
        callbacks=[GradAccumulation(3)],
    )
    trainer.fit()
    return [trainer.metrics[key] for key in sorted(trainer.metrics) if key.startswith("train/loss")] + [trainer.metrics["train/grad_norm"]]
