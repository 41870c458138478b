"""What a module deep inside a model may know of the micro-batch it works on, whatever stage of a layout it stands in.

Whoever runs a micro-batch enters a `MicroBatch` around forward and backward. It says which rows are void, for what
looks over a batch (BatchNorm), and it takes losses that arise inside (the balance loss of a mixture of experts):
`attach` sends their gradient into the graph on the spot, so the loss at the end of the model need not know of them,
and a pipeline's stage has them although it never sees that end.

Shape suffixes: s samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from disttrain.errors import ConfigError


@dataclass
class MicroBatch:
    """One micro-batch under way."""

    valid: Tensor | None = None
    """[s] bool; None where every row is a sample."""
    weights: Mapping[str, Tensor | float] = field(default_factory=dict)
    """What each loss term's per-sample sums are multiplied with (loss scale / global count), for all terms that are counted."""
    attached: dict[str, Tensor] = field(default_factory=dict)
    """Sums over samples of the terms that arose inside, float64."""

    def sums_with(self, terms: Mapping[str, Tensor], order: Mapping[str, Any]) -> list[Tensor]:
        """Loss sums in the order of terms counted: the task's, from its per-sample sums [s], and those that were attached."""
        found = {term: valid_only(per_s.detach(), self.valid).sum(dtype=torch.float64) for term, per_s in terms.items()}
        found |= self.attached
        return [found[term] if term in found else torch.zeros_like(next(iter(found.values()))) for term in order]


_running: MicroBatch | None = None


@contextmanager
def running(batch: MicroBatch) -> Iterator[MicroBatch]:
    """`batch` is the one that modules work on inside the block."""
    global _running
    before, _running = _running, batch
    try:
        yield batch
    finally:
        _running = before


def current() -> MicroBatch | None:
    """The micro-batch under way; None where a model is called by itself."""
    return _running


def runs_again() -> bool:
    """Whether this forward is a second one, inside a backward that computes activations again: it must leave no trace."""
    return torch._C._current_graph_task_id() != -1


def attach(x: Tensor, term: str, per_s: Tensor) -> Tensor:
    """`x` as it is; its backward sends weights[term] into `per_s` [s], one loss a sample, void samples left out.

    Nothing happens where a model is called by itself. ConfigError for a term that the task does not count.
    """
    batch = _running
    if batch is None:
        return x
    if term not in batch.weights:
        raise ConfigError(
            f"the model attaches the loss term '{term}', which its task does not count",
            f"+model.task.attached=[{term}], or count it in your task",
        )
    if not runs_again():
        total = valid_only(per_s.detach(), batch.valid).sum(dtype=torch.float64)
        batch.attached[term] = batch.attached[term] + total if term in batch.attached else total
    return _Attach.apply(x, per_s, valid_only(each(batch.weights[term], per_s), batch.valid))  # type: ignore[no-any-return]


class _Attach(torch.autograd.Function):
    """Forward: identity. Backward: the gradient passes, and the weights [s] go to the per-sample losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, per_s: Tensor, weights_s: Tensor) -> Tensor:
        ctx.weights_s = weights_s
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.weights_s, None


def valid_only(per_s: Tensor, valid: Tensor | None) -> Tensor:
    """Per-sample numbers [s] with void samples at zero, even where theirs is not finite."""
    return per_s if valid is None else per_s.masked_fill(~valid, 0.0)


def each(weight: Tensor | float, per_s: Tensor) -> Tensor:
    """A term's weight, for each sample [s]; not to be written to."""
    if isinstance(weight, float):
        if torch.compiler.is_compiling():  # which sees no cache
            return torch.full((len(per_s),), weight, dtype=per_s.dtype, device=per_s.device)
        return _filled(weight, len(per_s), per_s.dtype, per_s.device)
    return weight.to(per_s.dtype).expand(len(per_s))


@lru_cache(maxsize=16)
def _filled(weight: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight that the host knows stays the same for many steps."""
    return torch.full((length,), weight, dtype=dtype, device=device)
