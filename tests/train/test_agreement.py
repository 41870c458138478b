"""What ranks decide, they decide alike, although each sees its own part: the stop, the best checkpoint, the skip, the metric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric  # here once, for all forked ranks

from disttrain import build
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel.step import Step
from disttrain.record import RunFolder
from tests import tiny
from tests.train.runs import EVERY_STEP, copy_of, notes_of, trainer_of
from tests.train.test_skips import FP16, plant

RunWorld = Callable[..., list[Any]]

STOPS = {
    "early_stopping": {"_target_": "disttrain.callbacks.early_stopping.EarlyStopping", "patience": 1},
    "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", "every": None, "keep_best": 1, "keep_last": 1},
}
OWN_LOSSES = ([9.0, 6.0, 5.0, 4.0, 3.0], [1.0, 2.0, 4.0, 9.0, 20.0])
"""Loss of each evaluation by rank: rank 0 alone would never stop, rank 1 after the second, and the mean says after the third."""


@pytest.mark.world(2)
def test_ranks_whose_own_losses_part_stop_at_one_step_and_name_one_best(run_world: RunWorld, tmp_path: Path) -> None:
    """G11, A02: by the mean over ranks, which is neither rank's own opinion."""

    def entry(place: Place) -> tuple[str, int, str, list[float]]:
        config = tiny.config(dp=2, steps=20, eval_every=2, callbacks=STOPS, dataset=tiny.TOKENS | {"num_validation": 8})
        trainer = build.build_trainer(config, RunFolder(tmp_path), place)
        evaluations: list[float] = []
        real = trainer.strategy.evaluate

        def parted(step: Step) -> tuple[Tensor, Any]:
            sums, seen = real(step)
            return torch.stack([sums[1] * OWN_LOSSES[place.rank][len(evaluations)], sums[1]]), seen

        trainer.strategy.evaluate = parted  # type: ignore[method-assign]
        trainer._on["on_validation_end"].append(lambda t, metrics: evaluations.append(metrics["val/loss"]))
        result = trainer.fit()
        return result.status, result.step, str(trainer.callbacks["checkpoint"].best(trainer)), evaluations  # type: ignore[attr-defined]

    first, second = run_world(entry)
    assert first == second
    status, step, best, losses = first
    assert losses == [5.0, 4.0, 4.5, 6.5]
    assert status == "stopped"
    assert step == 8  # asked for after the evaluation of step 6, agreed in step 7, known in step 8, whose own evaluation was due
    assert best == str(tmp_path / "checkpoints" / "step-4")


@pytest.mark.world(4)
def test_an_overflow_in_one_shard_of_a_hybrid_is_skipped_by_all_four_ranks(run_world: RunWorld) -> None:
    """D08, D07: rank 1 of dp 2 x tp 2 alone has it; then every rank has one scale, and replicas equal weights."""

    def entry(place: Place) -> dict[str, Any]:
        trainer = trainer_of(place, FP16 | plant("blocks.0.mlp.up.weight", [1]), dp=2, tp=2, steps=4, **EVERY_STEP)
        trainer.fit()
        return {
            "skipped": notes_of(trainer).skipped,
            "scales": trainer.callbacks["plant"].scales,  # type: ignore[attr-defined]
            "updates": int(trainer.update.updates),
            "weights": {name: value.tolist() for name, value in copy_of(trainer).items()},
        }

    by_rank = run_world(entry)
    for found in by_rank:
        assert found["skipped"] == [0, 1, 0, 0]
        assert found["scales"] == by_rank[0]["scales"]
        assert found["scales"][:2] == [1024, 512]
        assert found["updates"] == 3
    assert by_rank[0]["weights"] == by_rank[2]["weights"]
    assert by_rank[1]["weights"] == by_rank[3]["weights"]


class MeanTarget(MeanMetric):
    """A user's metric: the mean of each sample's first target."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(targets[:, 0].double())


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")
def test_a_users_metric_sees_each_validation_sample_once() -> None:
    """F02: 21 samples on 1, 2 and 4 ranks, three of which would be padding on four."""
    data = tiny.TOKENS | {"num_validation": 21}

    def value(place: Place, tp: int) -> float:
        config = tiny.config(dp=place.world_size // tp, tp=tp, dataset=data)
        config.metrics = {"mean": {"_target_": "tests.train.test_agreement.MeanTarget"}}
        return build.build_trainer(config, None, place).evaluate()["val/mean"]

    def by_hand(place: Place) -> float:
        split = trainer_of(place, dataset=data).data.validation()
        assert split is not None
        _, targets = split.batch(torch.arange(21), torch.zeros(21, dtype=torch.int64))
        return float(targets[:, 0].double().mean())

    (wanted,) = run_ranks(by_hand, 1)
    for size, tp in ((1, 1), (2, 1), (4, 1), (4, 2)):
        assert run_ranks(lambda place, tp=tp: value(place, tp), size) == pytest.approx([wanted] * size, rel=1e-6)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Draws from the global generator for each sample, as random augmentation does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sequence = torch.randint(tiny.VOCABULARY, (tiny.CONTEXT + 1,))
        return sequence[:-1], sequence[1:]


@pytest.mark.world(2)
def test_dropout_agrees_in_a_tensor_group_whatever_the_loader_draws(run_world: RunWorld) -> None:
    """C08: dropout 0.1, a data set that draws, with workers and without, over two epochs: one residual on both ranks."""

    def entry(place: Place, num_workers: int) -> list[list[float]]:
        source = {"_target_": "disttrain.data.adapt.Adapted", "train": {"_target_": "tests.train.test_agreement.Noisy"}}
        data = source | {"num_workers": num_workers}
        trainer = trainer_of(place, tp=2, model=tiny.GPT | {"dropout": 0.1}, dataset=data, steps=6)
        seen: list[list[float]] = []
        block = trainer.model.blocks[-1]  # type: ignore[index]
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().flatten().tolist()))
        trainer.fit()
        assert trainer.progress.epoch == 2
        return seen

    without, with_workers = run_world(entry, 0), run_world(entry, 2)
    assert len(without[0]) == 6
    assert without[0] == without[1] == with_workers[0] == with_workers[1]
