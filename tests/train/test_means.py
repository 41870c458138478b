"""One step, one mean: over the valid targets of the global batch, whatever is missing, ignored or spread unevenly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.data.dataset import Position
from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.task import Classification
from disttrain.parallel.loop import LossModule
from disttrain.train.batch import train_positions
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import EVERY_STEP, Samples, copy_of, notes_of, tokens, trainer_of, with_samples

RunWorld = Callable[..., list[Any]]
STILL = tiny.SGD | {"lr": 0.0}
MOVING = tiny.SGD | {"lr": 1.0}


def by_hand(trainer: Trainer, indices: Tensor) -> tuple[Tensor, int]:
    """Sum of losses over these samples' valid targets and their number, on one device, from torch alone."""
    inputs, targets = tokens(indices)
    logits = trainer.model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def still(place: Place, length: int, **config: Any) -> Trainer:
    trainer = trainer_of(place, dtype="float64", **EVERY_STEP | {"optimizer": STILL, "clip_norm": None} | config)
    return with_samples(trainer, Samples(length, tokens))


@pytest.mark.world(2)
def test_the_epochs_loss_is_its_sum_over_its_valid_targets() -> None:
    """M17: 103 samples, batch 8, on one and two ranks; the last batch has 7."""

    def epoch(place: Place) -> tuple[float, list[float]]:
        trainer = still(place, 103, dp=place.world_size, steps=13)
        trainer.fit()
        return notes_of(trainer).column("train/epoch_loss")[0], notes_of(trainer).column("train/loss")

    def reference(place: Place) -> float:
        with torch.no_grad():
            total, count = by_hand(still(place, 103), torch.arange(103))
        return float(total) / count

    (wanted,) = run_world(reference, 1)
    for world_size in (1, 2):
        for found, losses in run_world(epoch, world_size):
            assert found == pytest.approx(wanted, rel=1e-12)
            assert len(losses) == 13
            assert math.fsum(losses) / 13 != pytest.approx(wanted, rel=1e-6), "a mean of means would have passed"


@pytest.mark.world(2)
@pytest.mark.parametrize(("length", "on_each"), [(15, (4, 3)), (13, (3, 2)), (10, (2, 0))])
def test_a_short_window_is_the_mean_over_its_own_samples(length: int, on_each: tuple[int, int], run_world: RunWorld) -> None:
    """C02, F11: the second step's loss and update, with 4 + 3, 3 + 2 and 2 + 0 samples on two ranks."""

    def second(place: Place) -> tuple[int, float, float, float]:
        trainer = still(place, length, dp=2, steps=2, optimizer=MOVING, micro_batch_size=2)
        steps = list(trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 2)))
        mine = [int(index) for batch in steps[1].micro for index in batch.indices if index >= 0]
        everybody = trainer.feed.order.global_batch(Position(0, 1))
        strategy = trainer.strategy
        strategy.count(steps[1])
        trainer.model.train()
        before = copy_of(trainer)
        report = strategy.finish(strategy.forward_backward(steps[1]), steps[1])
        trainer.update(report)
        moved = {name: before[name] - parameter.detach() for name, parameter in trainer.parameters.items()}
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                parameter.copy_(before[name])
        total, count = by_hand(trainer, everybody[everybody >= 0])
        (total / count).backward()
        error = max(float((moved[name] - p.grad).abs().max()) for name, p in trainer.parameters.items() if p.grad is not None)
        return len(mine), float(report.loss), float(total.detach()) / count, error

    found = run_world(second)
    assert tuple(number for number, *_ in found) == on_each
    for _, loss, wanted, error in found:
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert error < 1e-14


def test_two_groupings_of_uneven_sequences_have_one_gradient() -> None:
    """C01: 8 sequences with 1 to 16 valid targets, on one rank and on two, two micro-batches each."""

    def gradient(place: Place, micro: int) -> list[float]:
        trainer = still(place, 8, dp=place.world_size, micro_batch_size=micro)
        (step,) = trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 1))
        trainer.strategy.count(step)
        report = trainer.strategy.finish(trainer.strategy.forward_backward(step), step)
        return [float(report.loss), float(report.grad_norm), *trainer.parameters["blocks.0.mlp.up.weight"].grad.flatten().tolist()]  # type: ignore[union-attr]

    (wanted,) = run_world(lambda place: gradient(place, 8), 1)
    for world_size, micro in ((1, 1), (1, 4), (2, 1), (2, 2), (2, 4)):
        for found in run_world(lambda place, micro=micro: gradient(place, micro), world_size):
            assert found == pytest.approx(wanted, rel=1e-12, abs=1e-15), (world_size, micro)


def test_nothing_leaks_from_one_epoch_into_the_next() -> None:
    """C14: three batches an epoch; every step updates, and each begins without gradients."""

    def two_epochs(place: Place) -> Any:
        trainer = still(place, 24, steps=6, optimizer=MOVING, micro_batch_size=2)
        begun: list[bool] = []
        trainer._on["on_train_step_start"].append(lambda t: begun.append(all(p.grad is None for p in t.parameters.values())))
        start = copy_of(trainer)
        trainer.fit()
        first, second = notes_of(trainer).weights
        moved = [not torch.equal(a["norm.weight"], b["norm.weight"]) for a, b in ((start, first), (first, second))]
        return begun, moved, int(trainer.update.updates), trainer.progress.epoch

    ((begun, moved, updates, epoch),) = run_world(two_epochs, 1)
    assert begun == [True] * 6
    assert moved == [True, True]
    assert (updates, epoch) == (6, 2)


@pytest.mark.world(4)
def test_ranks_of_a_tensor_group_see_the_same_samples_and_data_ranks_others(run_world: RunWorld) -> None:
    """F05, M11; F01: another order in the next epoch, of the same samples."""

    def samples(place: Place) -> list[Any]:
        trainer = still(place, 24, dp=2, tp=2, micro_batch_size=2)
        steps = trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 6))
        return [
            [([int(i) for i in batch.indices], batch.inputs.sum(1).tolist(), batch.targets.sum(1).tolist()) for batch in step.micro]
            for step in steps
        ]

    by_rank = run_world(samples)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    epochs = []
    for steps in (range(3), range(3, 6)):
        taken = [index for rank in (0, 2) for step in steps for indices, *_ in by_rank[rank][step] for index in indices]
        assert sorted(taken) == list(range(24))
        epochs.append(taken)
    assert epochs[0] != epochs[1]


@pytest.mark.world(4)
def test_each_validation_sample_counts_once_on_any_number_of_ranks() -> None:
    """M18, F02: 21 samples on 1, 2 and 4 ranks."""

    def validate(place: Place, tp: int) -> tuple[float, float, float]:
        trainer = trainer_of(place, dp=place.world_size // tp, tp=tp, dtype="float64", dataset=tiny.TOKENS)
        assert trainer.evaluator is not None
        found = trainer.evaluate()
        _, totals = trainer.evaluator._sums()
        return found["val/loss"], found["val/perplexity"], float(totals[1, 0])

    def reference(place: Place) -> float:
        trainer = trainer_of(place, dtype="float64", dataset=tiny.TOKENS)
        inputs, targets = trainer.data.validation().batch(torch.arange(21), torch.zeros(21, dtype=torch.int64))  # type: ignore[union-attr]
        with torch.no_grad():
            return float(F.cross_entropy(trainer.model(inputs).flatten(0, 1), targets.flatten()))

    (wanted,) = run_world(reference, 1)
    for world_size, tp in ((1, 1), (2, 1), (4, 1), (4, 2)):
        for loss, perplexity, count in run_world(lambda place, tp=tp: validate(place, tp), world_size):
            assert count == 21 * tiny.CONTEXT
            assert loss == pytest.approx(wanted, rel=1e-14)
            assert perplexity == pytest.approx(math.exp(wanted), rel=1e-13)


@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_a_task_that_gives_a_mean_is_told_so(shape: tuple[int, ...]) -> None:
    """One number for all samples would be taken for the sum of one."""

    class Mean(Classification):
        def losses(self, outputs, targets):
            return {"loss": super().losses(outputs, targets)["loss"].mean().expand(shape)}

    module = LossModule(nn.Linear(3, 2), Mean())
    with pytest.raises(ConfigError, match=r"'loss' the shape \[.*\], and a sum for each sample has \[4\]"):
        module(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
