"""Conjugate pairs of tensor parallelism, named for what they do forward and backward (Megatron-LM, arXiv:1909.08053, figure 3).

    copy -> reduce            enters a column matrix           reduce -> copy            leaves a row matrix
    gather -> reduce_scatter  the same, sequence parallel      reduce_scatter -> gather  the same
    slice -> gather           enters a region cut by tokens    gather -> slice           leaves it, to go on alike everywhere

Every rank of the axis must call each of them. None reduces in place: what autograd has saved stays as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis


class _CopyReduce(torch.autograd.Function):
    """Forward: identity. Backward: sum of the gradients over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.axis), None


class _ReduceCopy(torch.autograd.Function):
    """Forward: sum over the axis, into a tensor of its own. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherReduceScatter(torch.autograd.Function):
    """Forward: concatenate along `dim`. Backward: sum, and keep this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatterGather(torch.autograd.Function):
    """Forward: sum, and keep this rank's part along `dim`. Backward: concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


class _GatherSlice(torch.autograd.Function):
    """Forward: concatenate along `dim`. Backward: this rank's slice.

    Right only where every rank goes on with the whole tensor in the same way (a loss that is the same on all
    ranks): each then holds the whole gradient already, and a sum would count it once per rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.axis.index * ctx.size, ctx.size), None, None


class _SliceGather(torch.autograd.Function):
    """Forward: this rank's slice along `dim` of a tensor that is whole on every rank. Backward: concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


def copy_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Same `x` on every rank, used in parts by each: identity forward, sum backward."""
    return _CopyReduce.apply(x, axis)  # type: ignore[no-any-return]


def reduce_copy(x: Tensor, axis: Axis) -> Tensor:
    """Sum of every rank's `x`, the same on each: sum forward, identity backward."""
    return _ReduceCopy.apply(x, axis)  # type: ignore[no-any-return]


def gather_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Whole tensor from parts along `dim`, used in parts by each rank: gather forward, reduce-scatter backward."""
    return _GatherReduceScatter.apply(x, axis, dim)  # type: ignore[no-any-return]


def reduce_scatter_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum: reduce-scatter forward, gather backward."""
    return _ReduceScatterGather.apply(x, axis, dim)  # type: ignore[no-any-return]


def gather_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Whole tensor from parts along `dim`, used alike by all ranks: gather forward, slice backward."""
    return _GatherSlice.apply(x, axis, dim)  # type: ignore[no-any-return]


def slice_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of a whole tensor: slice forward, gather backward."""
    return _SliceGather.apply(x, axis, dim)  # type: ignore[no-any-return]
