"""BatchNorm over one micro-batch of all data ranks: the training of one device, void rows left out.

What is cut: the rows of each micro-batch, over the axis `data`. What each rank holds: whole weights and running
statistics, the same everywhere. What moves, with c channels and n ranks: an all-gather of 2c + 1 numbers a rank forward
(mean, sum of squares about it, count) and an all-reduce of 2c backward, so (n-1)(2c+1) and 4c(n-1)/n numbers on the
wire a layer and micro-batch. Every forward waits for the slowest rank, which data parallelism else does once a step.

Ioffe and Szegedy 2015 (arXiv:1502.03167), algorithm 1; statistics of parts are merged as in Chan, Golub and LeVeque
1979, equation 2.1, since sums of squares cancel. torch's SyncBatchNorm computes the same, but refuses the CPU, knows no
void rows and can't be told a mesh's axis.

Shape suffixes: n rows, c channels, p positions (none, or the dimensions after c); r ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from disttrain.models import micro_batch
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Whose forward is known. A subclass may do anything, and is left as it is."""


def share_statistics(model: nn.Module, axis: Axis) -> list[str]:
    """Let every BatchNorm of `model` see its micro-batch over `axis`; returns the names of those that can't.

    A module becomes another class in place, as torch's lazy modules do: names, hooks and references to it stay.
    """
    left = []
    for name, module in model.named_modules():
        if type(module) in PLAIN:
            module.plain, module.axis = type(module), axis
            module.__class__ = SharedBatchNorm
        elif isinstance(module, _BatchNorm):
            left.append(name)
    return left


class SharedBatchNorm(_BatchNorm):
    """A BatchNorm whose batch is one micro-batch over an axis. Every rank of the axis must call it in training."""

    plain: type[_BatchNorm]
    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, p] to the same shape and type. In training statistics are the batch's, else the running ones if there are any."""
        self._check_input_dim(x)
        batch = micro_batch.current()
        of_batch = self.training or self.running_mean is None
        valid_n = None if batch is None else _rows_of(batch.valid, len(x))
        # in evaluation a lone call may be one rank's own; inside a micro-batch all ranks take part
        axis = self.axis if self.training or batch is not None else ALONE
        if not of_batch or (axis.size == 1 and valid_n is None):
            return self._alone(x)
        if valid_n is None and x.numel() // x.shape[1] * axis.size < 2:
            raise ValueError(f"BatchNorm in training needs more than one value a channel; the input is {tuple(x.shape)}")
        y, mean_c, variance_c, count = _Normalise.apply(x, self.weight, self.bias, valid_n, axis, self.eps)
        if self.training and self.running_mean is not None and not micro_batch.runs_again():
            self._follow(mean_c, variance_c, count)
        return y  # type: ignore[no-any-return]

    def _alone(self, x: Tensor) -> Tensor:
        """torch's own kernel; when activations are computed again the running statistics, which have been moved, stay: a share of 0."""
        if not self.training or self.running_mean is None or not micro_batch.runs_again():
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _follow(self, mean_c: Tensor, variance_c: Tensor, count: Tensor) -> None:
        """Move the running statistics, unless every row was void. On the device: the host knows no count."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        is_any = count > 0
        self.num_batches_tracked += is_any
        share = self.num_batches_tracked.clamp(min=1).to(mean_c.dtype).reciprocal() if self.momentum is None else self.momentum
        share = is_any.to(mean_c.dtype) * share
        unbiased_c = variance_c * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean_c.to(self.running_mean.dtype), share.to(self.running_mean.dtype))
        self.running_var.lerp_(unbiased_c.to(self.running_var.dtype), share.to(self.running_var.dtype))

    def _check_input_dim(self, x: Tensor) -> None:
        self.plain._check_input_dim(self, x)


ALONE = Axis("alone", 1, 0, (0,))


def _rows_of(valid: Tensor | None, num_rows: int) -> Tensor | None:
    """Which rows [n] belong to valid samples; samples may have been flattened into several rows each."""
    if valid is None or num_rows == len(valid):
        return valid
    if num_rows % len(valid):
        raise ValueError(f"BatchNorm sees {num_rows} rows, which do not come out even over {len(valid)} samples, some of them void")
    return valid.repeat_interleave(num_rows // len(valid))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias; also mean and variance [c] and count, of valid rows over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, valid_n: Tensor | None, axis: Axis, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mask = None if valid_n is None else valid_n.view(-1, *[1] * (x.dim() - 1))
        own = _statistics(wide, mask)
        means_rc, squares_rc, counts_r1 = collectives.all_gather(own[None], axis).split([x.shape[1], x.shape[1], 1], 1)
        count = counts_r1.sum()
        at_least_one = count.clamp(min=1)
        mean_c = (means_rc * counts_r1).sum(0) / at_least_one
        variance_c = (squares_rc + counts_r1 * (means_rc - mean_c).square()).sum(0) / at_least_one
        scale_c = (variance_c + eps).rsqrt()
        ctx.save_for_backward(x, weight, mask, mean_c, scale_c, at_least_one)
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean_c, variance_c, count)
        y = (wide - _wide(mean_c, x)) * _wide(scale_c if weight is None else scale_c * weight, x)
        return (y if bias is None else y + _wide(bias, x)).to(x.dtype), mean_c, variance_c, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mask, mean_c, scale_c, count = ctx.saved_tensors
        grad = grad.to(mean_c.dtype)
        normal = (x.to(mean_c.dtype) - _wide(mean_c, x)) * _wide(scale_c, x)
        dims = _dims(x)
        bias_grad_c, weight_grad_c = grad.sum(dims), (grad * normal).sum(dims)
        x_grad = None
        if ctx.needs_input_grad[0]:
            grad_mean_c, pull_c = (collectives.all_reduce(torch.stack([bias_grad_c, weight_grad_c]), ctx.axis) / count).unbind()
            through = _wide(grad_mean_c, x) + normal * _wide(pull_c, x)  # what statistics send back: to the rows they were made of
            through = through if mask is None else through.masked_fill(~mask, 0.0)
            x_grad = ((grad - through) * _wide(scale_c if weight is None else scale_c * weight, x)).to(x.dtype)
        if weight is None:
            return x_grad, None, None, None, None, None
        return x_grad, weight_grad_c.to(weight.dtype), bias_grad_c.to(weight.dtype), None, None, None


def _statistics(x: Tensor, mask: Tensor | None) -> Tensor:
    """[mean, sum of squares about it, count] of this rank's valid rows: 2c + 1 numbers."""
    dims = _dims(x)
    positions = x[0, 0].numel()
    if mask is None:
        variance_c, mean_c = torch.var_mean(x, dims, correction=0)
        count = x.new_full((1,), len(x) * positions)
        return torch.cat([mean_c, variance_c * count, count])
    count = mask.sum().to(x.dtype)[None] * positions
    mean_c = x.masked_fill(~mask, 0.0).sum(dims) / count.clamp(min=1)
    squares_c = (x - _wide(mean_c, x)).masked_fill(~mask, 0.0).square().sum(dims)
    return torch.cat([mean_c, squares_c, count])


def _dims(x: Tensor) -> list[int]:
    """All dimensions but that of channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(of_c: Tensor, x: Tensor) -> Tensor:
    """[c] so that it lies along the channels of x."""
    return of_c.view(1, -1, *[1] * (x.dim() - 2))
