"""What a batch means to a model: which loss, how many targets count, which metrics.

A task returns per-sample sums, never a mean: means over micro-batches, ranks or short windows would not be
the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.errors import ConfigError

IGNORED = -100
"""Target value that counts for nothing."""


@runtime_checkable
class Task(Protocol):
    """The contract of every task, the user's own included.

    A task may also say what its `unit` is ('samples', 'tokens'), and, in the class that has `losses`, that they are sums
    over tokens (`by_token = True`): then a part of the sequence has a part of them.

    The first term counts the targets, from which perplexity and rates follow; `train/loss` and `val/loss` are the sum of
    all terms' means, each also reported alone where there are several.
    """

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

    by_token = True

    def __init__(self, unit: str = "samples", accuracy: bool = True, attached: Sequence[str] = ()) -> None:
        """`unit` is what one target is called in tables and rates; `accuracy` adds torchmetrics' MulticlassAccuracy.

        `attached`: loss terms that the model brings in itself (see `micro_batch.attach`), one number a sample.
        """
        self.unit = unit
        self.accuracy = accuracy
        self.attached = tuple(attached)
        self.row_loss: Callable[[Tensor, Tensor], Tensor] = token_cross_entropy

    def losses(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Sum of cross-entropies over each sample's valid targets."""
        if targets.dim() == 1 and outputs.dim() == 2:
            return {"loss": self.row_loss(outputs, targets)}
        rows = self.row_loss(outputs.flatten(0, -2), targets.flatten())
        return {"loss": _per_sample(rows.view(targets.shape))}

    def counts(self, targets: Tensor) -> Mapping[str, Tensor]:
        """Targets of each sample that are not IGNORED; of an attached term, the sample itself."""
        return {"loss": _per_sample(targets != IGNORED)} | {term: torch.ones(len(targets), device=targets.device) for term in self.attached}

    def metrics(self) -> Mapping[str, Any]:
        """Accuracy, if asked for."""
        if not self.accuracy:
            return {}
        from disttrain.models.metrics import Accuracy  # torchmetrics takes 3 s to import, so only where it is used

        return {"accuracy": Accuracy()}


class LanguageModelling(Classification):
    """Next-token prediction: inputs and targets [micro, t], targets already shifted by one."""

    def __init__(self, accuracy: bool = False, attached: Sequence[str] = ()) -> None:
        """Counted in tokens; perplexity and, where the data knows its bytes a token, bits per byte are the loop's."""
        super().__init__("tokens", accuracy, attached)


class Regression:
    """Squared error, mean over each target element: outputs and targets [micro, ...]."""

    unit = "samples"
    by_token = True

    def losses(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Sum of squared errors of each sample; ValueError where shapes differ, which would broadcast in silence."""
        if outputs.shape != targets.shape:
            raise ValueError(f"outputs have the shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}")
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return {"loss": _per_sample((outputs.to(wide) - targets).square())}

    def counts(self, targets: Tensor) -> Mapping[str, Tensor]:
        """Number of target elements of each sample."""
        return {"loss": torch.full((targets.shape[0],), targets[0].numel(), device=targets.device)}

    def metrics(self) -> Mapping[str, Any]:
        """None beside the loss."""
        return {}


def loss_names(terms: Sequence[str], task: Task) -> list[str]:
    """What the terms of a loss are called in metrics, where there are several: by their names, the first by what it counts."""
    return [f"loss_{term if index else getattr(task, 'unit', term)}" for index, term in enumerate(terms)] if len(terms) > 1 else []


def _per_sample(values: Tensor) -> Tensor:
    """Sums over all dimensions but the first."""
    return values if values.dim() == 1 else values.reshape(values.shape[0], -1).sum(1)


def task_of(model: nn.Module) -> Task:
    """The task that the model states as its attribute `task`."""
    task = getattr(model, "task", None)
    if not isinstance(task, Task):
        raise ConfigError(
            f"{type(model).__name__} does not say what its task is (loss, valid targets, metrics)",
            "model.task._target_=disttrain.models.task.Classification, or set self.task in the model's __init__",
        )
    return task
