"""Updates that must not be made: agreed by all ranks, counted, and without a trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain.callbacks.amp import AMP
from disttrain.data.dataset import Position
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel.step import Report
from disttrain.train.assembly import make_feed
from disttrain.train.batch import train_positions
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import EVERY_STEP, Samples, copy_of, notes_of, rows, tokens, trainer_of

RunWorld = Callable[..., list[Any]]
FP16 = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16", "init_scale": 1024.0, "growth_interval": 3}}
WARMUP = {"_target_": "disttrain.train.optimizer.Constant", "warmup_steps": 4}


class Plant(Callback):
    """Puts an infinite number into one parameter's gradient, at the given steps on one rank."""

    def __init__(self, name: str, rank: int, steps: list[int]) -> None:
        self.name, self.rank, self.steps = name, rank, steps
        self.scales: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            return gradient * torch.inf if trainer.mesh.rank == self.rank and trainer.progress.step in self.steps else gradient

        trainer.parameters[self.name].register_hook(spoil)

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        assert trainer.update.loss_scale is not None
        self.scales.append(float(trainer.update.loss_scale.value))


def plant(name: str, steps: list[int]) -> dict[str, Any]:
    return {"plant": {"_target_": "tests.train.test_skips.Plant", "name": name, "rank": 1, "steps": steps}}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "name"), [({"tp": 2}, "blocks.0.mlp.up.weight"), ({"dp": 2}, "norm.weight")], ids=["tensor parallel shard", "data rank"]
)
def test_an_overflow_on_one_rank_is_everybodys(layout: dict[str, int], name: str, run_world: RunWorld) -> None:
    """D01, D07, D08: same steps skipped, same scale, same weights; rate and count move on real updates only."""

    def run(place: Place) -> dict[str, Any]:
        trainer = trainer_of(place, FP16 | plant(name, [1, 2]), steps=8, scheduler=WARMUP, **EVERY_STEP, **layout)
        trainer.fit()
        planted = trainer.callbacks["plant"]
        assert isinstance(planted, Plant)
        notes = notes_of(trainer)
        return {
            "skipped": notes.skipped,
            "counted": notes.column("train/skipped_updates"),
            "rates": notes.column("train/lr"),
            "scales": planted.scales,
            "updates": int(trainer.update.updates),
            "replicated": trainer.parameters["norm.bias"].tolist(),
            "finite": all(bool(torch.isfinite(p).all()) for p in trainer.parameters.values()),
        }

    first, second = run_world(run)
    assert first == second
    assert first["finite"]
    assert first["skipped"] == [0, 1, 1, 0, 0, 0, 0, 0]
    assert first["counted"] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert first["updates"] == 6
    assert first["scales"] == [1024, 512, 256, 256, 256, 512, 512, 512]
    assert first["rates"] == pytest.approx([rate * 1e-3 for rate in (0.25, 0.5, 0.5, 0.5, 0.75, 1, 1, 1)])


@pytest.mark.world(2)
def test_fp16_and_bf16_follow_float32(run_world: RunWorld) -> None:
    """D02: the norm that is logged, and clipped by, is unscaled."""
    fast = {"steps": 10, "tp": 2, "optimizer": tiny.ADAMW | {"lr": 3e-3}, "dataset": tiny.TOKENS | {"num_samples": 8}, **EVERY_STEP}
    plain = rows(**fast)[0]
    assert plain[-1]["train/loss"] < plain[0]["train/loss"] - 0.2, "weights that do not move in half precision would pass"
    for precision in ("fp16", "bf16"):
        amp = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": precision}}
        half = rows(callbacks=amp, **fast)[0]
        for key, tolerance in (("train/loss", 1e-2), ("train/grad_norm", 2e-2)):
            assert [row[key] for row in half] == pytest.approx([row[key] for row in plain], rel=tolerance)
        assert [row["train/loss"] for row in half] != [row["train/loss"] for row in plain]
        assert half[-1]["train/skipped_updates"] == 0


def test_autocast_begins_where_its_context_is_entered() -> None:
    """A context that was made and never entered would keep autocast on, and its cache of half weights forever."""
    context = AMP("bf16").forward_context()
    assert not torch.is_autocast_enabled("cpu")
    with context:
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.world(2)
def test_ignored_targets_count_nothing_even_all_of_a_ranks_or_of_a_step(run_world: RunWorld) -> None:
    """I08: even steps have targets on rank 0 only, odd ones none at all."""

    def make(indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = tokens(indices)
        return inputs, targets.masked_fill((indices >= 4)[:, None], -100)

    def run(place: Place) -> dict[str, Any]:
        trainer = trainer_of(place, dp=2, steps=4, dtype="float64", scheduler=WARMUP, **EVERY_STEP)
        order = type(trainer.feed.order)(16, 8, 0, shuffle=False)
        trainer.feed = make_feed(trainer.data, Samples(16, make).train(), order, trainer.feed.part, trainer.strategy)
        steps = list(trainer.feed.steps(train_positions(order, 0, Position(), 2)))
        weights = [copy_of(trainer)]
        trainer._on["on_train_step_end"].append(lambda t, report: weights.append(copy_of(t)))
        trainer.fit()
        notes = notes_of(trainer)
        return {
            "local": [step.local_counts["loss"] for step in steps],
            "losses": notes.column("train/loss"),
            "skipped": notes.column("train/skipped_updates"),
            "rates": notes.column("train/lr"),
            "moved": [any(not torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(weights)],
        }

    first, second = run_world(run)
    assert first["local"][0] > 0
    assert second["local"][0] == 0
    assert first["local"][1] == second["local"][1] == 0
    for found in (first, second):
        assert found["losses"] == first["losses"]
        assert 3.0 < found["losses"][0] < 4.0  # ln 32 = 3.47
        assert found["losses"][1] == found["losses"][3] == 0.0
        assert found["skipped"] == [0, 1, 1, 2]
        assert found["moved"] == [True, False, True, False]
        assert found["rates"] == pytest.approx([0.25e-3, 0.5e-3, 0.5e-3, 0.75e-3])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": tiny.ADAMW,
    "sgd": tiny.SGD,
    "momentum": tiny.SGD | {"momentum": 0.9},
    "nesterov": tiny.SGD | {"momentum": 0.9, "nesterov": True},
    "rmsprop, which ignores found_inf": {"_target_": "torch.optim.RMSprop", "lr": 1e-3},
}


def alone_after(place: Place, optimizer: dict[str, Any], skip_first: bool) -> list[float]:
    trainer = trainer_of(place, optimizer=optimizer, steps=4)
    (step,) = trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 1))
    trainer.model.train()
    for skip in (True, False) if skip_first else (False,):
        trainer.strategy.count(step)
        report = trainer.strategy.finish(trainer.strategy.forward_backward(step), step)
        if skip:
            report.skip = torch.ones_like(report.skip)
        trainer.update(report)
    return torch.cat([p.detach().flatten() for p in trainer.parameters.values()]).tolist()


def test_a_skipped_first_step_leaves_no_trace_in_any_optimizer() -> None:
    """Weights after a skipped step and a real one equal those after the real one alone."""

    def both(place: Place) -> dict[str, bool]:
        return {name: alone_after(place, one, True) == alone_after(place, one, False) for name, one in OPTIMIZERS.items()}

    assert run_ranks(both, 1) == [dict.fromkeys(OPTIMIZERS, True)]
