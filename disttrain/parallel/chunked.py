"""Cross-entropy some tokens at a time, so that whole logits never exist.

What is cut: the rows of the loss, n = b t tokens of a micro-batch, into chunks of `strategy.loss_chunk`. What a rank
holds of logits: one chunk's, twice (as they are and in float32), instead of n v, and as much again for their gradient;
for backward only the head's input and the log of each row's softmax denominator, from which backward computes a
chunk's logits anew: a third product of the head's size beside the two of its backward. What moves: as without
chunks; under `tp` the head's input is gathered or copied once for all chunks, and its gradient summed once.

The head puts off its product while losses are computed: what it hands on is its input, and the task's `row_loss`
does the rest. Whoever asks the model for outputs otherwise (generation, a user) gets logits.

Shape suffixes: b samples, t tokens, d hidden, n rows (b*t), c rows of a chunk, v this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.task import IGNORED, Classification, Task
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.pairs import copy_reduce, gather_reduce_scatter
from disttrain.parallel.plan import LOSS_KEY, match_plan
from disttrain.parallel.tensor import SEQUENCE_DIM, ColumnLinear, in_autocast_type


class ChunkedHead(nn.Module):
    """A head (Linear, or cut by vocabulary) that can hand on its input instead of logits."""

    def __init__(self, head: nn.Linear | ColumnLinear, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = isinstance(head, ColumnLinear) and head.sequence
        self.weight, self.bias = head.weight, head.bias
        self._puts_off = False

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d], or this rank's tokens of it, to logits [b, t, v]; or to whole [b, t, d] where the product is put off."""
        x_btd = gather_reduce_scatter(x_btd, self.axis, SEQUENCE_DIM) if self.sequence else copy_reduce(x_btd, self.axis)
        return x_btd if self._puts_off else self.logits(x_btd)

    def logits(self, x_btd: Tensor) -> Tensor:
        """What was put off: [b, t, d] to [b, t, v]."""
        return F.linear(x_btd, self.weight, self.bias)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """A block in which the head's product is left to the loss."""
        self._puts_off = True
        try:
            yield
        finally:
            self._puts_off = False

    def row_loss(self, chunk: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of rows [n, d] of what was put off, and their targets [n]: losses [n], zero where IGNORED."""

        def rows(x_nd: Tensor, targets_n: Tensor) -> Tensor:
            return _ChunkedCrossEntropy.apply(x_nd, self.weight, self.bias, targets_n, self.axis, chunk)  # type: ignore[no-any-return]

        return rows


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits x w^T + bias, of which a chunk exists at a time. Two small all-reduces, for all chunks together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, axis: Axis, chunk: int) -> Tensor:
        ctx.axis, ctx.chunk = axis, chunk
        ctx.types = x.dtype, weight.dtype
        x, weight = in_autocast_type(x, weight)
        local = targets - axis.index * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        local = local.masked_fill(~here, 0)
        wide = torch.promote_types(x.dtype, torch.float32)
        lse, target = torch.empty(2, len(x), dtype=wide, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for rows in _chunks(len(x), chunk):
                logits = _logits(x[rows], weight, bias)
                torch.logsumexp(logits, 1, out=lse[rows])
                target[rows] = logits.gather(1, local[rows, None]).squeeze(1)
        if axis.size > 1:
            peak = collectives.all_reduce(lse, axis, "max")
            total, target = collectives.all_reduce_(torch.stack([(lse - peak).exp(), target.masked_fill(~here, 0.0)]), axis)
            lse = peak + total.log()
        valid = targets != IGNORED
        ctx.save_for_backward(x, weight, bias, lse, local, here & valid, valid)
        losses: Tensor = (lse - target).masked_fill(~valid, 0.0)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight, bias, lse, local, is_target, valid = ctx.saved_tensors
        input_type, weight_type = ctx.types
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad * valid
        x_grad = torch.empty_like(x) if needs_input else None
        weight_grad = torch.zeros_like(weight, dtype=weight_type) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if needs_bias else None
        for rows in _chunks(len(x), ctx.chunk):
            of_logits = _logits(x[rows], weight, bias).sub_(lse[rows, None]).exp_()
            of_logits.scatter_add_(1, local[rows, None], -is_target[rows, None].to(of_logits.dtype))
            of_logits = of_logits.mul_(grad[rows, None]).to(x.dtype)
            if x_grad is not None:
                x_grad[rows] = of_logits @ weight
            if weight_grad is not None:
                weight_grad += of_logits.t() @ x[rows]
            if bias_grad is not None:
                bias_grad += of_logits.sum(0)
        return x_grad if x_grad is None else x_grad.to(input_type), weight_grad, bias_grad, None, None, None


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _logits(x_cd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A chunk's logits [c, v], float32 at least, in memory of their own."""
    logits = F.linear(x_cd, weight, None if bias is None else bias.to(weight.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chunk_loss(model: nn.Module, task: Task, plan: Mapping[str, str], axis: Axis, chunk: int) -> ChunkedHead:
    """Swap the head that the plan names, and the task's row loss, for their chunked forms.

    ConfigError where the plan does not say that the loss is of that head's outputs row by row, or the task has a loss of its own.
    """
    remedy = "strategy.loss_chunk=null"
    if type(task).losses is not Classification.losses:
        raise ConfigError(f"strategy.loss_chunk={chunk}: {type(task).__name__} has a loss of its own, which wants whole logits", remedy)
    heads = [name for name, style in match_plan(model, plan).items() if style == "vocab_head"]
    if len(heads) != 1 or plan.get(LOSS_KEY) != "vocab_parallel":
        kind = type(model).__name__
        raise ConfigError(
            f"strategy.loss_chunk={chunk}: the plan of {kind} does not name one head whose outputs the loss takes row by row", remedy
        )
    (name,) = heads
    head = model.get_submodule(name)
    if type(head) is not nn.Linear and not isinstance(head, ColumnLinear):
        raise ConfigError(f"strategy.loss_chunk={chunk}: the head '{name}' is a {type(head).__name__} and no Linear", remedy)
    made = ChunkedHead(head, axis)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, made)
    task.row_loss = made.row_loss(chunk)  # type: ignore[attr-defined]
    return made
