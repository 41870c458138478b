"""Embedding and loss cut by vocabulary: whole logits never exist.

Each rank holds a block of the vocabulary's rows. What moves: one all-reduce (or reduce-scatter) of the embedded
tokens; for the loss, two all-reduces of a number or two a row, instead of the logits' v.

Shape suffixes: b batch, t tokens, d hidden, n rows (b*t), v this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.pairs import reduce_copy, reduce_scatter_gather
from disttrain.parallel.tensor import SEQUENCE_DIM


class VocabEmbedding(nn.Module):
    """`nn.Embedding` cut by rows: each rank looks up its own tokens, the sum over ranks has them all."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight = embedding.weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Token numbers to [b, t, d], whole or this rank's tokens."""
        num_rows = self.weight.shape[0]
        _must_be_below(num_rows * self.axis.size, tokens_bt)
        local_bt = tokens_bt - self.axis.index * num_rows
        elsewhere_bt = (local_bt < 0) | (local_bt >= num_rows)
        x_btd = F.embedding(local_bt.masked_fill(elsewhere_bt, 0), self.weight)
        x_btd = x_btd.masked_fill(elsewhere_bt[..., None], 0.0)
        return reduce_scatter_gather(x_btd, self.axis, SEQUENCE_DIM) if self.sequence else reduce_copy(x_btd, self.axis)


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits cut by vocabulary; whole logits never exist. Two small all-reduces: maximum; sum and target."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor, axis: Axis, ignored: int) -> Tensor:
        num_rows = logits_nv.shape[1]
        valid_n = targets_n != ignored
        _must_be_below(num_rows * axis.size, targets_n.masked_fill(~valid_n, 0))
        peak_n = collectives.all_reduce(logits_nv.max(dim=1).values, axis, "max")
        shifted_nv = logits_nv - peak_n[:, None]
        local_n = targets_n - axis.index * num_rows
        here_n = (local_n >= 0) & (local_n < num_rows)
        local_n = local_n.masked_fill(~here_n, 0)
        picked_n = shifted_nv.gather(1, local_n[:, None]).squeeze(1).masked_fill(~here_n, 0.0)
        exp_nv = shifted_nv.exp_()
        total_n, target_n = collectives.all_reduce_(torch.stack([exp_nv.sum(1), picked_n]), axis)
        ctx.save_for_backward(exp_nv.div_(total_n[:, None]), local_n, here_n, valid_n)
        losses_n: Tensor = (total_n.log() - target_n).masked_fill(~valid_n, 0.0)
        return losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_nv, local_n, here_n, valid_n = ctx.saved_tensors
        grad_nv = softmax_nv.clone()
        grad_nv.scatter_add_(1, local_n[:, None], -here_n.to(grad_nv.dtype)[:, None])
        return grad_nv.mul_((grad_n * valid_n)[:, None]), None, None, None


def _must_be_below(size: int, numbers: Tensor) -> None:
    """Fail as torch's own lookup does on a token that no rank holds, without the device being waited for: it would count as nothing."""
    torch._assert_async(((numbers >= 0) & (numbers < size)).all(), f"a token is not among the {size} of the vocabulary")


def vocab_cross_entropy(axis: Axis, ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A row loss for logits [n, v/tp] and targets [n]: losses [n], zero where `ignored`; float32 at least."""

    def row_loss(logits_nv: Tensor, targets_n: Tensor) -> Tensor:
        wide = logits_nv.float() if logits_nv.dtype in (torch.float16, torch.bfloat16) else logits_nv
        return _VocabCrossEntropy.apply(wide, targets_n, axis, ignored)  # type: ignore[no-any-return]

    return row_loss
