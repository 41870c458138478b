"""A moving average of the weights, evaluated beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from disttrain.config.limits import check_limits
from disttrain.parallel.step import Report
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.train.trainer import Trainer

_SET = "shadow"


class EMA(Callback):
    """average <- average + (1 - d) (weights - average), after every real update (Polyak and Juditsky 1992).

    d = min(decay, (1 + n) / (10 + n)) at the n-th update, so that the start is soon forgotten. A skipped update
    moves nothing, decided on the device. Each rank averages what it holds; metrics are `val/<name>_ema`.
    """

    def __init__(self, decay: float = 0.999) -> None:
        """`decay` in [0, 1): weight of the past a step."""
        check_limits("ema", {"decay": decay})
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}
        self._restored = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin at the weights, unless a checkpoint gave an average."""
        self._make(trainer)
        if not self._restored:
            for name, average in self.shadow.items():
                average.copy_(trainer.parameters[name].detach())

    @torch.no_grad()
    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """Move towards the weights, by nothing where the update was skipped."""
        if not self.shadow:  # a stage without trained parameters
            return
        updates = trainer.update.updates.float()
        step = torch.clamp(9.0 / (10.0 + updates), min=1.0 - self.decay) * (1.0 - report.on(updates.device).skip)
        averages = list(self.shadow.values())
        apart = torch._foreach_sub([trainer.parameters[name].detach() for name in self.shadow], averages)
        torch._foreach_mul_(apart, step)
        torch._foreach_add_(averages, apart)

    def weight_sets(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The averages, under the suffix 'ema'."""
        return {"ema": self.shadow}

    def state_dict(self) -> dict[str, Any]:
        """Only that there is an average; its values are tensors."""
        return {"decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The averages come, or came, with the tensors."""
        self._restored = True

    def state_tensors(self, trainer: Trainer) -> Mapping[str, Tensor]:
        """The averages, laid out as their parameters."""
        self._make(trainer)
        return {f"{_SET}/{name}": average for name, average in self.shadow.items()}

    def _make(self, trainer: Trainer) -> None:
        if not self.shadow:
            held = {name: parameter for name, parameter in trainer.parameters.items() if parameter.requires_grad}
            self.shadow = {name: parameter.detach().clone() for name, parameter in held.items()}
