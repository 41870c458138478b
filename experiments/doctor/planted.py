"""Faults to be found: a data set that sleeps, a rank that is kept busy, a callback that reads every tensor on the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.parallel.step import Report
    from disttrain.train.trainer import Trainer


class Sleepy(torch.utils.data.Dataset[Any]):
    """Random tokens; each sample takes `seconds`, as one from a slow disk does."""

    def __init__(self, seconds: float = 0.002, context: int = 32, length: int = 4096) -> None:
        self.seconds, self.context, self.length = seconds, context, length

    def __len__(self) -> int:
        """Samples."""
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(tokens, the tokens that follow them)."""
        time.sleep(self.seconds)
        text = torch.randint(256, (self.context + 1,), generator=torch.Generator().manual_seed(index))
        return text[:-1], text[1:]


class Busy(Callback):
    """Counts for `seconds` before each step, on one rank."""

    def __init__(self, rank: int = 1, seconds: float = 0.02) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Keep this rank's processor busy."""
        until = time.thread_time() + self.seconds
        while trainer.mesh.rank == self.rank and time.thread_time() < until:
            pass


class Statistics(Callback):
    """Looks at every weight and gradient in every step, number by number."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        """Read mean, deviation and extremes of all tensors on the host."""
        for name, parameter in trainer.parameters.items():
            for kind, tensor in (("weight", parameter.detach()), ("gradient", parameter.grad)):
                if tensor is not None:
                    numbers = tensor.mean(), tensor.std(), tensor.min(), tensor.max()
                    self.seen |= {f"{kind}/{name}/{number}": value.item() for number, value in enumerate(numbers)}
