"""Whole runs through a pipeline: the numbers of one device on every rank, and state that other layouts take up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torchmetrics import MeanMetric

from disttrain.checkpoint.save import save
from disttrain.config.schedules import SCHEDULES
from disttrain.data.dataset import Position
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel import collectives
from disttrain.parallel.pipeline import Pipeline
from disttrain.train.state import restore
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import EVERY_STEP, Samples, copy_of, notes_of, rows, trainer_of, with_samples
from tests.train.test_skips import FP16, plant

RunWorld = Callable[..., list[Any]]
DEEP = tiny.GPT | {"num_layers": 4}
UNEVEN = tiny.TOKENS | {"num_samples": 21, "num_validation": 21, "uneven": True}
RUN: dict[str, Any] = {"model": DEEP, "micro_batch_size": 2, "dtype": "float64", "dataset": UNEVEN, **EVERY_STEP}


class Accuracy(MeanMetric):
    """A metric that needs outputs."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().update((outputs.argmax(-1) == targets).double())


@pytest.fixture(scope="module")
def one_device() -> list[dict[str, float]]:
    (found,) = rows(**RUN, steps=6, eval_every=2)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"pp": 2, "strategy": {"schedule": "zbv"}},
        {"pp": 2, "dp": 2, "strategy": {"schedule": "interleaved_1f1b"}},
    ],
    ids=["1f1b", "zbv", "interleaved, data ranks"],
)
def test_every_rank_reports_one_devices_numbers(layout: dict[str, Any], one_device: list[dict[str, float]]) -> None:
    """C04, H04, H05: training and validation loss, gradient norm, last batches that are short; each rank, each step."""
    by_rank = rows(**RUN, steps=6, eval_every=2, **layout)
    for part in by_rank:
        assert len(part) == len(one_device)
        for found, wanted in zip(part, one_device, strict=True):
            assert found == pytest.approx(wanted, rel=1e-10)
    assert sum("val/loss" in row for row in one_device) == 3


@pytest.mark.world(4)
def test_a_metric_that_needs_outputs_is_the_same_on_every_rank(run_world: RunWorld) -> None:
    """H05: outputs exist on the last stage alone."""

    def entry(place: Place, **layout: Any) -> float:
        trainer = trainer_of(place, steps=1, **layout, **RUN)
        trainer.evaluator.metrics.own = {"accuracy": Accuracy()}  # type: ignore[union-attr]
        trainer.fit()
        return trainer.metrics["val/accuracy"]

    (wanted,) = run_ranks(entry, 1)
    found = run_world(lambda place: entry(place, pp=2, dp=2))
    assert 0 < wanted < 1
    assert found == [pytest.approx(wanted)] * 4


@pytest.mark.world(2)
def test_generation_is_the_same_on_every_rank_and_on_one(run_world: RunWorld) -> None:
    def entry(place: Place, **layout: Any) -> list[float]:
        trainer = trainer_of(place, steps=1, **RUN, **layout)
        trainer.model.eval()
        tokens = torch.arange(tiny.CONTEXT)[None] % tiny.VOCABULARY
        return trainer.strategy.outputs(tokens).flatten().tolist()[:50]

    (wanted,) = run_ranks(entry, 1)
    for strategy in ({}, {"schedule": "zbv"}):
        assert run_world(lambda place, chosen=strategy: entry(place, pp=2, strategy=chosen)) == [pytest.approx(wanted, rel=1e-12)] * 2


@pytest.mark.world(2)
@pytest.mark.parametrize("optimizer", [tiny.SGD, tiny.ADAMW], ids=["sgd", "adamw"])
def test_tied_embeddings_stay_one_weight(optimizer: dict[str, Any], run_world: RunWorld) -> None:
    """C10: copies equal to the bit after every step of twenty, the curve one device's; the norm counts them once (see above)."""
    config = RUN | {"steps": 20, "optimizer": optimizer, "log_every": 1}

    def entry(place: Place) -> tuple[list[bool], list[float]]:
        trainer = trainer_of(place, pp=2, **config)
        ends, same = trainer.mesh.axis("ends"), []

        def compare(t: Trainer, report: Any) -> None:
            first, second = collectives.gather_tensors(t.parameters["tokens.weight"].detach(), ends)
            same.append(bool((first == second).all()))

        trainer._on["on_train_step_end"].append(compare)
        trainer.fit()
        return same, notes_of(trainer).column("train/loss")

    (alone,) = rows(**config)
    for same, losses in run_world(entry):
        assert same == [True] * 20
        assert losses == pytest.approx([row["train/loss"] for row in alone], rel=1e-10)


@pytest.mark.world(2)
def test_each_outputs_loss_is_with_its_own_targets(run_world: RunWorld) -> None:
    """H07: micro-batches that are told apart by their loss, training and evaluation taking turns."""

    def entry(place: Place, **layout: Any) -> list[list[float]]:
        trainer = trainer_of(place, steps=1, **RUN | {"micro_batch_size": 1, "global_batch_size": 8}, **layout)
        found = []
        for number in range(2):
            (step,) = trainer.feed.steps(iter([(number, Position(0, number))]))
            trainer.strategy.count(step)
            found.append(trainer.strategy.finish(trainer.strategy.forward_backward(step), step).losses.flatten().tolist())
            sums, _ = trainer.strategy.evaluate(step)
            found.append(collectives.all_reduce(sums, trainer.mesh.axis("world"))[0].tolist())
            trainer.update.optimizer.zero_grad(set_to_none=True)
        return found

    (wanted,) = run_ranks(entry, 1)
    assert len({round(loss, 9) for loss in wanted[0]}) == 8
    for schedule in SCHEDULES:
        found = run_world(lambda place, name=schedule: entry(place, pp=2, strategy={"schedule": name}))
        assert found == [[pytest.approx(part, rel=1e-12) for part in wanted]] * 2


@pytest.mark.world(4)
def test_first_and_last_stage_hold_the_same_samples(run_world: RunWorld) -> None:
    """F10: 103 samples, data 2 x pipeline 2."""

    def entry(place: Place) -> tuple[int, list[list[int]]]:
        trainer = trainer_of(place, pp=2, dp=2, model=DEEP, micro_batch_size=2, steps=1)
        data = Samples(103, lambda indices: (indices[:, None].repeat(1, 4), indices[:, None].repeat(1, 4)))
        feed = with_samples(trainer, data).feed
        steps = list(feed.steps(iter([(n, Position(0, n)) for n in range(feed.order.steps_per_epoch)])))
        return feed.order.steps_per_epoch, [[int(i) for batch in step.micro for i in batch.indices] for step in steps]

    found = run_world(entry)
    assert {length for length, _ in found} == {13}
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]
    seen = sorted(i for rank in (0, 1) for step in found[rank][1] for i in step if i >= 0)
    assert seen == list(range(103))


@pytest.mark.world(4)
def test_an_overflow_in_one_stage_is_everybodys(run_world: RunWorld) -> None:
    """D08: rank 1, of the first stage, alone has it; all skip that step and back off."""

    def entry(place: Place) -> tuple[list[float], list[float], int]:
        config: dict[str, Any] = {"model": DEEP, "micro_batch_size": 2, "steps": 4, **EVERY_STEP}
        trainer = trainer_of(place, FP16 | plant("blocks.0.mlp.up.weight", [1]) if place.rank < 2 else FP16, pp=2, dp=2, **config)
        trainer.fit()
        scale = trainer.update.loss_scale
        assert scale is not None
        return notes_of(trainer).skipped, [float(scale.value)], int(trainer.update.updates)

    found = run_world(entry)
    assert found == [([0, 1, 0, 0], [512.0], 3)] * 4


EMA = {"ema": {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.5}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2}, {"pp": 2}),
        ({"pp": 2, "strategy": {"schedule": "zbv"}}, {}),
        ({}, {"pp": 2}),
        ({"pp": 2}, {"dp": 2}),
        ({"pp": 2, "strategy": {"schedule": "interleaved_1f1b"}}, {"pp": 2, "tp": 2}),
    ],
    ids=["same", "to one", "from one", "to data ranks", "to another cut"],
)
def test_a_run_goes_on_into_and_out_of_a_pipeline(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Weights, moments, averages: every stage's, by name."""
    folder = tmp_path / "step-2"
    config = RUN | {"steps": 4, "optimizer": tiny.ADAMW, "eval_every": 2}

    def first(place: Place) -> None:
        trainer = trainer_of(place, EMA, **config, **before)
        trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 2 else ()))
        trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 2 else None)
        trainer.fit()

    def second(place: Place, resumed: bool) -> list[dict[str, float]]:
        trainer = trainer_of(place, EMA, **config, **after)
        if resumed:
            assert restore(trainer, folder) == []
        trainer.fit()
        return notes_of(trainer).rows

    run_ranks(first, tiny.config(**before).launch.world_size)
    size = int(tiny.config(**after).launch.world_size)
    unbroken = run_ranks(lambda place: second(place, False), size)
    for part, wanted in zip(run_ranks(lambda place: second(place, True), size), unbroken, strict=True):
        assert [row["step"] for row in part] == [3, 4]
        assert "val/loss_ema" in part[-1]
        for row, other in zip(part, wanted[2:], strict=True):
            assert row == (other if before == after else pytest.approx(other, rel=1e-10))


@pytest.mark.world(2)
def test_masks_differ_by_stage_and_micro_batch_and_not_by_schedule(run_world: RunWorld) -> None:
    """With dropout: two schedules whose actions come in another order draw the same masks, so have the same gradients."""

    def entry(place: Place, schedule: str) -> tuple[list[tuple[str, int, int]], dict[str, torch.Tensor]]:
        model = DEEP | {"dropout": 0.2}
        trainer = trainer_of(place, pp=2, strategy={"schedule": schedule}, **RUN | {"model": model, "steps": 1})
        trainer.fit()
        assert isinstance(trainer.strategy.runner, Pipeline)
        return list(trainer.strategy.runner.actions), copy_of(trainer)

    for (actions, weights), (others, same) in zip(
        run_world(lambda place: entry(place, "gpipe")), run_world(lambda place: entry(place, "1f1b")), strict=True
    ):
        assert sorted(actions) == sorted(others)
        assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert run_world(lambda place: entry(place, "gpipe"))[0][0] != run_world(lambda place: entry(place, "1f1b"))[0][0]
