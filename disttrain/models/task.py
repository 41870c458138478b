"""What a batch means to a model: which loss, how many targets count, which metrics.

A task returns per-sample sums, never a mean: means over micro-batches, ranks or short windows would not be
the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Target value that counts for nothing."""


@runtime_checkable
class Task(Protocol):
    """The contract of every task, the user's own included."""

    def losses(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Per-sample sums [micro], by term."""

    def counts(self, targets: Any) -> Mapping[str, Tensor]:
        """Per-sample number of valid targets [micro], by the same terms."""

    def metrics(self) -> Mapping[str, Any]:
        """torchmetrics objects by name, fed with (outputs, targets) of valid samples in evaluation."""


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each row: logits [n, classes], targets [n] to losses [n]; zero where IGNORED. float32 at least."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORED)


class Classification:
    """Cross-entropy over the last dimension of the outputs: images (targets [micro]) or tokens (targets [micro, t]).

    `row_loss` is the one place where a vocabulary-parallel head puts its own.
    """

    def __init__(self, unit: str = "samples", accuracy: bool = True) -> None:
        """`unit` is what one target is called in tables and rates; `accuracy` adds torchmetrics' MulticlassAccuracy."""
        self.unit = unit
        self.accuracy = accuracy
        self.row_loss: Callable[[Tensor, Tensor], Tensor] = token_cross_entropy

    def losses(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Sum of cross-entropies over each sample's valid targets."""
        rows = self.row_loss(outputs.flatten(0, -2), targets.flatten())
        return {"loss": rows.view(targets.shape[0], -1).sum(1)}

    def counts(self, targets: Tensor) -> Mapping[str, Tensor]:
        """Targets of each sample that are not IGNORED."""
        return {"loss": (targets != IGNORED).view(targets.shape[0], -1).sum(1)}

    def metrics(self) -> Mapping[str, Any]:
        """Accuracy, if asked for."""
        if not self.accuracy:
            return {}
        from torchmetrics.classification import Accuracy  # 3 s of import, so only where it is used

        raise NotImplementedError(Accuracy)


class LanguageModelling(Classification):
    """Next-token prediction: inputs and targets [micro, t], targets already shifted by one."""

    def __init__(self, accuracy: bool = False) -> None:
        """Counted in tokens; perplexity and bits per byte follow from the loss and are the loop's."""
        super().__init__(unit="tokens", accuracy=accuracy)


class Regression:
    """Squared error, mean over each target element: outputs and targets [micro, ...]."""

    unit = "samples"

    def losses(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Sum of squared errors of each sample."""
        return {"loss": (outputs - targets).square().flatten(1).sum(1)}

    def counts(self, targets: Tensor) -> Mapping[str, Tensor]:
        """Number of target elements of each sample."""
        per_sample = targets[0].numel()
        return {"loss": torch.full((targets.shape[0],), per_sample, device=targets.device)}

    def metrics(self) -> Mapping[str, Any]:
        """None beside the loss."""
        return {}


def task_of(model: nn.Module) -> Task:
    """The task that the model states as its attribute `task`."""
    task = getattr(model, "task", None)
    if not isinstance(task, Task):
        from disttrain.errors import ConfigError

        raise ConfigError(
            f"{type(model).__name__} does not say what its task is (loss, valid targets, metrics)",
            "model.task._target_=disttrain.models.task.Classification, or set self.task in the model's __init__",
        )
    return task
