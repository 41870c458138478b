"""The plain loop over a step's micro-batches, for a rank that holds the whole depth of the model.

What is cut: nothing; micro-batches follow each other, each forward and backward, and gradients add up in place.
What moves: nothing here. The last backward is announced to those who send gradients (`GradientSync.arm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.models.micro_batch import MicroBatch, each, running, valid_only
from disttrain.models.task import Task
from disttrain.parallel.data import GradientSync
from disttrain.parallel.step import Local, Step
from disttrain.parallel.watch import passing

Seen = list[tuple[Any, Any, Tensor | None]]
"""(outputs, targets, valid) of each micro-batch, where outputs exist."""


class LossModule(nn.Module):
    """Model and task in one forward, so that every layout computes the loss in the same place."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.contexts: list[Callable[[], AbstractContextManager[Any]]] = []

    def forward(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """Per-sample loss sums [micro], by term."""
        return self.losses(self.outputs(inputs), targets)

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """What the task says of outputs. ConfigError for a mean, which would be taken for a sum of one sample."""
        terms = dict(self.task.losses(outputs, targets))
        for name, term in terms.items():
            if term.dim() != 1 or (isinstance(targets, Tensor) and len(term) != len(targets)):
                samples = len(targets) if isinstance(targets, Tensor) else "samples"
                found = f"the task's losses give '{name}' the shape {list(term.shape)}, and a sum for each sample has [{samples}]"
                raise ConfigError(found, 'reduction="none" in the loss, then the sum over all but the first dimension')
        return terms

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs under the policies' contexts."""
        return self.within(self.model, inputs)

    def within(self, call: Callable[[Any], Any], x: Any) -> Any:
        """`call(x)` under the policies' contexts."""
        contexts = [make() for make in self.contexts]
        for context in contexts:
            context.__enter__()
        try:
            return call(x)
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)


class Runner(Protocol):
    """Runs the micro-batches of a step: this loop, or a pipeline's schedule."""

    def train(self, step: Step, weights: Sequence[Tensor | float]) -> Local:
        """Both directions. `weights`: what each term's per-sample sums are multiplied with (loss scale / global count)."""

    def evaluate(self, step: Step) -> tuple[Tensor, Seen]:
        """Forward only: loss sums [terms], float64, and what was seen."""

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs for any inputs."""


class Loop:
    """One micro-batch after the other."""

    def __init__(self, module: LossModule, syncs: Sequence[GradientSync]) -> None:
        self.module = module
        self.syncs = syncs

    def train(self, step: Step, weights: Sequence[Tensor | float]) -> Local:
        """See `Runner`."""
        sums: list[Tensor] = []
        by_term = dict(zip(step.local_counts, weights, strict=True))
        last = len(step.micro) - 1
        for index, batch in enumerate(step.micro):
            if index == last:
                for sync in self.syncs:
                    sync.arm()
            with running(MicroBatch(batch.valid, by_term)) as micro:
                with passing("forward", index):
                    terms = self.module(batch.inputs, batch.targets)
                with passing("backward", index):
                    backward(list(terms.values()), [by_term[term] for term in terms], batch.valid)
            sums.extend(micro.sums_with(terms, by_term))
        return Local(sums, len(weights))

    def evaluate(self, step: Step) -> tuple[Tensor, Seen]:
        """See `Runner`."""
        sums: list[Tensor] = []
        seen = []
        unweighted = dict.fromkeys(step.local_counts, 0.0)
        for batch in step.micro:
            with running(MicroBatch(batch.valid, unweighted)) as micro:
                outputs = self.module.outputs(batch.inputs)
                terms = self.module.losses(outputs, batch.targets)
            sums.append(torch.stack(micro.sums_with(terms, unweighted)))
            seen.append((outputs, batch.targets, batch.valid))
        return torch.stack(sums).sum(0), seen

    def outputs(self, inputs: Any) -> Any:
        """See `Runner`."""
        return self.module.outputs(inputs)


_run_backward = torch.autograd.Variable._execution_engine.run_backward


def backward(terms: Sequence[Tensor], weights: Sequence[Tensor | float], valid: Tensor | None) -> None:
    """Add the gradient of one micro-batch: of its per-sample sums, void ones left out, times their term's weight.

    RuntimeError where no term depends on a parameter. It begins at the weights, and leaves out how
    `torch.autograd.backward` looks its arguments over, which takes as long as a layer.
    """
    moved = [(term, valid_only(each(weight, term), valid)) for term, weight in zip(terms, weights, strict=True) if term.requires_grad]
    if not moved:
        raise RuntimeError("the loss does not depend on any parameter that is trained")
    roots, seeds = zip(*moved, strict=True)
    _run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


def weighted(terms: Sequence[Tensor], weights: Sequence[Tensor | float], valid: Tensor | None) -> Tensor:
    """The number whose gradient `backward` adds, for a schedule that runs backward itself."""
    parts = [torch.dot(term, valid_only(each(weight, term), valid)) for term, weight in zip(terms, weights, strict=True)]
    return sum(parts[1:], parts[0])
