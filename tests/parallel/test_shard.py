"""The sharded data axis: who holds which rows, and that odd models train on their shares as they do whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.models.task import Regression
from disttrain.parallel.blocks import blocks_of, class_name
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.unit import _scatter_zeros
from disttrain.verify import verb
from tests import tiny
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]
WARM = ["torch.distributed.fsdp", "torch._dynamo"]
# --- what is cut -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (5, 4), (2, 3), (1, 4), (9, 2)])
def test_ragged_rows_are_cut_as_torch_chunks_them(rows: int, ranks: int) -> None:
    whole = torch.arange(rows * 3).view(rows, 3)
    layout = Layout((rows, 3), {"dp_shard": Cut(0, ragged=True)}, {"dp_shard": ranks})
    chunks = [*whole.chunk(ranks), *[whole[:0]] * ranks][:ranks]
    for rank, chunk in enumerate(chunks):
        at = {"dp_shard": rank}
        assert layout.local_shape(at) == tuple(chunk.shape)
        found = torch.cat([whole[source] for source, _ in layout.pieces(at)] or [whole[:0]])
        assert torch.equal(found, chunk)


class Odd(nn.Module):
    """Rows that don't divide, fewer rows than ranks, a scalar, a frozen layer, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Regression()
        self.narrow, self.wide = nn.Linear(32, 2), nn.Linear(2, 32)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.tied = nn.Linear(2, 32, bias=False)
        self.tied.weight = self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.frozen(x))
        return self.wide(y) * self.gain + self.tied(y)


ODD: dict[str, Any] = {"model": {"_target_": "tests.parallel.test_shard.Odd"}, "dataset": tiny.VECTORS, "global_batch_size": 12}


def odd_run(place: Place, **config: Any) -> dict[str, Any]:
    trainer = prepared(place, dtype="float64", log_every=1, steps=3, optimizer=tiny.ADAMW | {"lr": 1e-2}, **ODD, **config)
    held = {name: tuple(parameter.shape) for name, parameter in trainer.parameters.items()}
    trainer.fit()
    pieces = {
        name: [(source, parameter[local].tolist()) for source, local in trainer.layouts[name].pieces(trainer.mesh.coordinate())]
        for name, parameter in trainer.parameters.items()
    }
    return {"held": held, "pieces": pieces, "metrics": trainer.metrics}


@pytest.mark.world(2)
def test_a_sharded_model_is_called_by_its_own_name(run_world: RunWorld) -> None:
    """FSDP2 gives it another class, which no message may name."""

    def entry(place: Place) -> tuple[str, str]:
        model = prepared(place, shard=2, **ODD).model
        with pytest.raises(ConfigError, match=r"^Odd does not say which its blocks are"):
            blocks_of(model)
        return type(model).__name__, class_name(model)

    assert run_world(entry, warm=WARM) == [("FSDPOdd", "Odd")] * 2


@pytest.mark.world(3)
@pytest.mark.parametrize("zero", [1, 3])
def test_odd_parameters_train_as_on_one_rank(zero: int, run_world: RunWorld) -> None:
    """Empty shards, a scalar that can't be cut, frozen and tied parameters: norm, fused AdamW and weights come out the same."""
    (alone,) = run_ranks(odd_run, 1)
    parts = run_world(lambda place: odd_run(place, shard=3, micro_batch_size=2, strategy={"zero": zero}), warm=WARM)
    assert [part["held"]["narrow.weight"] for part in parts] == [(1, 32), (1, 32), (0, 32)]
    assert [part["held"]["wide.weight"] for part in parts] == [(11, 2), (11, 2), (10, 2)]
    assert [part["held"]["gain"] for part in parts] == [()] * 3
    for name, whole in alone["pieces"].items():
        wanted = torch.tensor(whole[0][1], dtype=torch.float64)
        found = torch.full_like(wanted, torch.nan)
        for part in parts:
            for source, values in part["pieces"][name]:
                found[source] = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert parts[0]["metrics"]["train/grad_norm"] == pytest.approx(alone["metrics"]["train/grad_norm"], rel=1e-12)


@pytest.mark.world(4)
def test_replicas_of_shards_start_and_stay_equal_whatever_ranks_would_draw(run_world: RunWorld) -> None:
    """I11: a model without `init_parameter`, built from another seed on every rank."""

    def run(place: Place) -> list[dict[str, list[Any]]]:
        torch.manual_seed(place.rank)
        trainer = prepared(place, dp=2, shard=2, steps=10, model=ODD["model"], dataset=tiny.VECTORS, seed=0)
        seen = [{name: parameter.tolist() for name, parameter in trainer.parameters.items()}]
        trainer.fit()
        return [*seen, {name: parameter.tolist() for name, parameter in trainer.parameters.items()}]

    by_rank = run_world(run, warm=WARM)
    assert by_rank[0] == by_rank[2]
    assert by_rank[1] == by_rank[3]
    assert by_rank[0][0]["wide.weight"] != by_rank[1][0]["wide.weight"]
    assert by_rank[0][0] != by_rank[0][1]


@pytest.mark.world(2)
def test_a_shard_degree_of_one_is_plain_data_parallelism(run_world: RunWorld) -> None:
    def gradients(place: Place) -> tuple[list[float], list[str]]:
        trainer = prepared(place, dp=2, shard=1, strategy={"name": "hsdp"})
        run_step(trainer, 0)
        return trainer.parameters["norm.weight"].grad.tolist(), [type(sync).__name__ for sync in trainer.strategy.syncs]  # type: ignore[union-attr]

    (first, syncs), (second, _) = run_world(gradients)
    assert first == second
    assert syncs == ["Reducer"]


class Partial(nn.Module):
    """Half of it stands in no tensor plan."""

    plan: ClassVar[dict[str, str]] = {"up": "column", "down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.task = Regression()
        self.up, self.down, self.rest = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(self.down(self.up(x).relu()) + x)
        return y


@pytest.mark.world(4)
def test_clipping_where_a_plan_leaves_parameters_out() -> None:
    """C13: shards of shards, shards of copies and copies in one norm."""
    model = {"_target_": "tests.parallel.test_shard.Partial"}
    proof = verb.prove(tiny.config(shard=2, tp=2, model=model, dataset=tiny.VECTORS, micro_batch_size=2, clip_norm=1e-3))
    assert proof.equal, (proof.failed, proof.cause)
    assert {"gradient norm", "rest.weight", "up.bias"} <= {error.name for error in proof.errors}


# --- parameters that take no part -----------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_gradients_of_different_parameters_are_never_added_up(run_world: RunWorld) -> None:
    """A unit's buffer that lacks a gradient on one rank is refused there, by the parameter's name."""

    def entry(place: Place) -> None:
        trainer = prepared(place, shard=2, **ODD)
        if place.rank == 1:
            wide = trainer.model.wide
            wide.forward = lambda x: nn.functional.linear(x, wide.weight)  # type: ignore[assignment, arg-type, method-assign, union-attr]
        run_step(trainer, 0)

    with pytest.raises(Exception, match=r"took no part in the loss of a step.*: wide.bias\n"):
        run_world(entry, warm=WARM)


def test_a_unit_that_can_not_scatter_zeros_is_refused() -> None:
    """torch before 2.13."""
    with pytest.raises(ConfigError, match=r"needs torch 2.13 or later"):
        _scatter_zeros(object())  # type: ignore[arg-type]


# --- start cost -------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from disttrain import build
from disttrain.launch.place import alone
from tests import tiny
build.build_trainer(tiny.config(steps=1), None, alone()).fit()
print(sorted(name for name in sys.modules if name.startswith(("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo."))))
"""


def test_other_strategies_import_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
