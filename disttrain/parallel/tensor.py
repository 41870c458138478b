"""Tensor parallelism: each layer's matrices are shared out over the axis `tp` (Megatron-LM, arXiv:1909.08053).

What is cut: the first matrix of a pair by output features (column), the second by input features (row), the
embedding and the head by vocabulary. What each rank holds: 1/tp of those, whole norms. What moves: with x the
input of a block half, [b, t, d], one all-reduce of b*t*d forward (after the row matrix) and one backward (of
the column matrices' input gradient), so four a block, each 2(n-1)/n of b*t*d elements on the wire. With
sequence parallelism (arXiv:2205.05198) activations between the pairs are cut along t, and each all-reduce is
an all-gather and a reduce-scatter: the same bytes, 1/tp of the memory of norms and residuals.

A model holds none of this: it states `plan`, and `plan.py` swaps the modules that it names for those below.

Shape suffixes: b batch, t tokens, d hidden, n rows (b*t), v vocabulary; a local part has the same letter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.projections import Projections
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.pairs import copy_reduce, gather_reduce_scatter, gather_slice, reduce_copy, reduce_scatter_gather, slice_gather
from disttrain.parallel.random import Streams

SEQUENCE_DIM = 1
"""Dimension of tokens in activations [b, t, d]."""


def in_autocast_type(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's type, where it is on: what is saved is then what backward multiplies with."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.dtype != torch.float64 else x for x in tensors]


class _ColumnLinears(torch.autograd.Function):
    """Several column matrices of one input: y_i = x w_i^T.

    Backward sends the input's gradient on its way as soon as it is whole, and computes the weights' gradients
    while it travels. Under sequence parallelism x is this rank's tokens: it is gathered, and gathered again
    in backward rather than kept whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sequence = axis, sequence
        x, *cast = in_autocast_type(x, *weights)
        ctx.save_for_backward(x, *cast)
        whole = collectives.all_gather(x, axis, SEQUENCE_DIM) if sequence else x
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(whole, weight) for weight in cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        whole = collectives.all_gather(x, ctx.axis, SEQUENCE_DIM) if ctx.sequence else x
        input_grad, pending = None, None
        if ctx.needs_input_grad[0]:
            input_grad = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                input_grad += grad @ weight
            if not ctx.sequence:
                pending = collectives.start_all_reduce(input_grad.contiguous(), ctx.axis)
        rows_nd = whole.reshape(-1, whole.shape[-1])
        weight_grads = [
            grad.reshape(-1, grad.shape[-1]).t() @ rows_nd if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[3:], strict=True)
        ]
        if pending is not None:
            input_grad = pending.wait()
        elif input_grad is not None:
            input_grad = collectives.reduce_scatter(input_grad, ctx.axis, SEQUENCE_DIM)
        return input_grad, None, None, *weight_grads


class _RowLinear(torch.autograd.Function):
    """y = sum over ranks of x w^T, x cut along its last dimension; reduced in the product's own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        x, weight = in_autocast_type(x, weight)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            partial = F.linear(x, weight)
        return collectives.reduce_scatter(partial, axis, SEQUENCE_DIM) if sequence else collectives.all_reduce_(partial, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            grad = collectives.all_gather(grad, ctx.axis, SEQUENCE_DIM)
        input_grad = grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return input_grad, weight_grad, None, None


def _columns(x: Tensor, axis: Axis, sequence: bool, fused: bool, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """x w_i^T for each weight. Unfused, the exchange is a node of its own: a backward for inputs runs it, one for weights does not."""
    if fused:
        return _ColumnLinears.apply(x, axis, sequence, *weights)  # type: ignore[no-any-return]
    (x,) = in_autocast_type(x)
    whole = gather_reduce_scatter(x, axis, SEQUENCE_DIM) if sequence else copy_reduce(x, axis)
    return tuple(F.linear(whole, weight) for weight in weights)


class ColumnLinear(nn.Module):
    """`nn.Linear` cut by output features; `gather` makes its output whole again, for a model that goes on alike everywhere."""

    def __init__(self, linear: nn.Linear, axis: Axis, sequence: bool, gather: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence, self.gather, self.fused = axis, sequence, gather, True
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to this rank's [..., out/tp], or all of it if gathered."""
        (y,) = _columns(x, self.axis, self.sequence, self.fused, [self.weight])
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return gather_slice(y, self.axis, -1) if self.gather else y


class ColumnProjections(nn.Module):
    """`Projections` cut by heads: one input, several outputs, one all-reduce backward."""

    def __init__(self, projections: Projections, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence, self.fused = axis, sequence, True
        self.segments = [size // axis.size for size in projections.segments]
        self.merged = projections.merged
        if self.merged:
            self.weight, self.bias = projections.weight, projections.bias
        else:
            for name, linear in projections.named_children():
                self.add_module(name, linear)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in] to this rank's part of each projection."""
        if self.merged:
            (y,) = _columns(x, self.axis, self.sequence, self.fused, [self.weight])
            y = y if self.bias is None else y + self.bias.to(y.dtype)
            return y.split(self.segments, dim=-1)  # type: ignore[no-any-return]
        linears: list[nn.Linear] = list(self.children())  # type: ignore[arg-type]
        ys = _columns(x, self.axis, self.sequence, self.fused, [linear.weight for linear in linears])
        return tuple(y if linear.bias is None else y + linear.bias.to(y.dtype) for y, linear in zip(ys, linears, strict=True))


class RowLinear(nn.Module):
    """`nn.Linear` cut by input features; the bias is whole on every rank and added once, after the sum."""

    def __init__(self, linear: nn.Linear, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence, self.fused = axis, sequence, True
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """This rank's [..., in/tp] to whole [..., out]; ValueError for an input of another width."""
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"a row-parallel layer takes this rank's {self.weight.shape[1]} input features, but was fed {x.shape[-1]}: "
                "the layer before it must be column-parallel without gathering"
            )
        if self.fused:
            y: Tensor = _RowLinear.apply(x, self.weight, self.axis, self.sequence)
        else:
            partial = F.linear(x, self.weight)
            y = reduce_scatter_gather(partial, self.axis, SEQUENCE_DIM) if self.sequence else reduce_copy(partial, self.axis)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y


class SequencePart(nn.Module):
    """A module whose output [.., t, d] is cut to this rank's tokens (learned positions under sequence parallelism)."""

    def __init__(self, embedding: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [.., t] to this rank's [.., t/tp, d]."""
        mine: Tensor = positions.chunk(self.axis.size, dim=-1)[self.axis.index]
        return F.embedding(mine, self.weight)


class OwnRandom(nn.Module):
    """Runs a module on this rank's own random stream: what it draws for differs over the tensor group."""

    def __init__(self, module: nn.Module, streams: Streams) -> None:
        super().__init__()
        self.module = module
        self.streams = streams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module."""
        if not self.training:
            return self.module(*args, **kwargs)
        with self.streams.own():
            return self.module(*args, **kwargs)


def inner_name(name: str) -> str:
    """The name that a module has in the model as written, without those of wrappers around it."""
    while name.endswith(".module"):
        name = name.removesuffix(".module")
    return name


class SequenceSplit(nn.Module):
    """An identity at which whole activations [b, t, d] are cut to this rank's tokens; the gradient is made whole again."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t/tp, d]; ConfigError if t does not divide."""
        if x_btd.shape[SEQUENCE_DIM] % self.axis.size:
            raise ConfigError(
                f"sequence parallel: {x_btd.shape[SEQUENCE_DIM]} tokens are not divisible by strategy.tp={self.axis.size}",
                "strategy.sequence_parallel=false",
            )
        return slice_gather(x_btd, self.axis, SEQUENCE_DIM)


class SequenceGather(nn.Module):
    """An identity at which this rank's tokens are made whole again, for a model that goes on alike everywhere."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t/tp, d] to [b, t, d]."""
        return gather_slice(x_btd, self.axis, SEQUENCE_DIM)


class WholeSequence:
    """A module's forward for whole sequences where others hold parts of them: tokens are gathered, this rank's results kept.

    All ranks compute the same on the same tokens, so gradients of what is whole are whole on each.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], axis: Axis) -> None:
        self.forward = forward
        self.axis = axis

    def __call__(self, x_btd: Tensor) -> Tensor:
        """[b, t/tp, d] to [b, t/tp, d]."""
        return slice_gather(self.forward(gather_slice(x_btd, self.axis, SEQUENCE_DIM)), self.axis, SEQUENCE_DIM)


def unfuse(model: nn.Module) -> None:
    """Part exchanges from products in every cut layer, for schedules that run the backward for inputs and for weights apart.

    A fused function would run whole in both: products twice, exchanges twice.
    """
    for module in model.modules():
        if isinstance(module, (ColumnLinear, ColumnProjections, RowLinear)):
            module.fused = False
