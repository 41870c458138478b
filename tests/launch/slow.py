"""Runs to which something happens on their way: a callback that makes them last so long, and what is compared in the end."""

from __future__ import annotations

import time
from pathlib import Path

from disttrain.parallel.step import Report
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer

HURRY = "hurry"
"""A file in the folder the command was typed in: from when it is there, steps are as quick as they can be."""


class Dawdles(Callback):
    """Steps of a tenth of a second."""

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if not Path(HURRY).exists():
            time.sleep(0.1)


def curve(folder: Path) -> dict[int, float]:
    """The training loss by step, as a run folder has it."""
    return {row["step"]: row["train/loss"] for row in RunFolder(folder).read() if "train/loss" in row}
