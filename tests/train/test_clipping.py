"""Clipping under a loss scale: threshold and norm are those of the true gradients, and all ranks clip alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from disttrain.launch.place import Place
from disttrain.parallel.step import Report
from disttrain.train.trainer import Trainer
from tests.train.runs import EVERY_STEP, copy_of, notes_of, trainer_of

RunWorld = Callable[..., list[Any]]
PRECISIONS = {
    "fp32": {},
    "fp16": {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16", "init_scale": 65536.0}},
}
RATE = 0.01


def norms_and_moves(place: Place, precision: str, clip_norm: float) -> tuple[list[float], list[float]]:
    """Logged norm of each step, and by how much plain gradient descent moved the weights over its rate: the clipped norm."""
    sgd = {"_target_": "torch.optim.SGD", "lr": RATE}
    trainer = trainer_of(place, PRECISIONS[precision], dp=2, steps=6, clip_norm=clip_norm, optimizer=sgd, **EVERY_STEP)
    weights = [copy_of(trainer)]
    moves: list[float] = []

    def note(t: Trainer, report: Report) -> None:
        weights.append(copy_of(t))
        before, after = weights[-2:]
        moves.append(float(torch.stack([(after[name] - before[name]).double().norm() for name in after]).norm()) / RATE)

    trainer._on["on_train_step_end"].append(note)
    trainer.fit()
    return notes_of(trainer).column("train/grad_norm"), moves


@pytest.mark.world(2)
def test_a_loss_scale_changes_neither_the_norm_nor_what_is_clipped(run_world: RunWorld) -> None:
    """D02: the threshold lies amid the norms of the run, so that some steps are clipped and others are not."""
    (free, _), _ = run_world(norms_and_moves, "fp32", 1e9)
    threshold = sorted(free)[2] + 0.4 * (sorted(free)[3] - sorted(free)[2])
    (norms, moves), _ = run_world(norms_and_moves, "fp32", threshold)
    clipped = [norm > threshold for norm in norms]
    assert set(clipped) == {True, False}
    assert moves == pytest.approx([min(norm, threshold) for norm in norms], rel=1e-3)
    for half_norms, half_moves in run_world(norms_and_moves, "fp16", threshold):
        assert half_norms == pytest.approx(norms, rel=1e-2)
        assert half_moves == pytest.approx(moves, rel=1e-2)
        assert half_norms != norms
