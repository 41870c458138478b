"""Ring attention: keys and values travel round the axis, and each rank's answer is merged block by block.

At step s a rank holds the keys and values of rank (i - s): it attends to them while they already leave for the next
rank and those of the one before come in. What blocks say is merged by the logarithm of their softmax's denominator
(online softmax, arXiv:1805.02867; Ring Attention, arXiv:2310.01889). Under head-tail cutting a causal block is one of
three, and none but a rank's own needs a mask: with chunks (i, 2n-1-i) of queries and (j, 2n-1-j) of keys,
  j = i   both see both, in order: the plain triangle
  j < i   both chunks of queries see the first chunk of keys whole, and nothing of the second
  j > i   the second chunk of queries sees both chunks of keys whole, the first nothing
so every step but the first costs the same on every rank.

Backward computes each block's softmax anew from the saved denominator (FlashAttention-2, arXiv:2307.08691, algorithm
2): keys and values go round once more, and their gradients, in float32 at least, travel one step behind them, home.
What moves a layer: n - 1 shifts of 2 b t g e elements forward; backward as many of them, and of their gradients.

Shape suffixes: b samples, h query heads, g key-value heads, t tokens (of this rank), s keys of a block, e size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.tensor import in_autocast_type

WHOLE = slice(None)


def ring_attention(axis: Axis) -> Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]:
    """Attention of this rank's queries to every rank's keys and values, which travel; see `context.Attend`."""

    def attend(q_bhte: Tensor, k_bgte: Tensor, v_bgte: Tensor, causal: bool, dropout: float) -> Tensor:
        if dropout:
            raise ConfigError("strategy.attention=ring recomputes its softmax in backward, without dropout", "strategy.attention=gather")
        q_bhte, k_bgte, v_bgte = in_autocast_type(q_bhte, k_bgte, v_bgte)
        with torch.autocast(q_bhte.device.type, enabled=False):
            y: Tensor = _Ring.apply(q_bhte, k_bgte, v_bgte, axis, causal)
        return y

    return attend


def _block(source: int, axis: Axis, length: int, causal: bool) -> tuple[slice, slice]:
    """Which of this rank's queries see which of rank `source`'s keys, tokens in the order in which a rank holds them."""
    if not causal or source == axis.index:
        return WHOLE, WHOLE
    return (WHOLE, slice(0, length // 2)) if source < axis.index else (slice(length // 2, length), WHOLE)


class _Ring(torch.autograd.Function):
    """Exact attention over a sequence that lies head-tail on the axis."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, causal: bool) -> Tensor:
        ctx.axis, ctx.causal = axis, causal
        own = kv = torch.stack([k, v])
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for step in range(axis.size):
            following = collectives.start_shift(kv, axis) if step < axis.size - 1 else None
            source = (axis.index - step) % axis.size
            rows, columns = _block(source, axis, q.shape[2], causal)
            k, v = kv[:, :, :, columns]
            y, of_block = block_forward(q[:, :, rows], k, v, causal and step == 0)
            _merge(out[:, :, rows], lse[:, :, rows], y, of_block)
            kv = kv if following is None else following.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        axis, length, dtype = ctx.axis, q.shape[2], q.dtype
        q_grad = torch.zeros_like(q, dtype=lse.dtype)
        own_grad = torch.zeros_like(kv, dtype=lse.dtype)
        travelling: collectives.Pending | None = None
        for step in range(axis.size):
            following = collectives.start_shift(kv, axis) if step < axis.size - 1 else None
            rows, columns = _block((axis.index - step) % axis.size, axis, length, ctx.causal)
            k, v = kv[:, :, :, columns]
            block = q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows]
            of_q, of_k, of_v = block_backward(grad[:, :, rows], *block, ctx.causal and step == 0)
            q_grad[:, :, rows] += of_q
            # a rank's own share waits at home for those of the others, which travel behind its keys and values
            kv_grad = own_grad if step == 0 else torch.zeros_like(own_grad) if travelling is None else travelling.wait()
            kv_grad[0, :, :, columns] += of_k
            kv_grad[1, :, :, columns] += of_v
            if step:
                travelling = collectives.start_shift(kv_grad, axis)
            kv = kv if following is None else following.wait()
        if travelling is not None:
            own_grad += travelling.wait()
        return q_grad.to(dtype), own_grad[0].to(dtype), own_grad[1].to(dtype), None, None


def _merge(out: Tensor, lse: Tensor, y: Tensor, of_block: Tensor) -> None:
    """Add a block's answer `y`, whose softmax has the log-denominator `of_block`, to those so far, in place."""
    total = torch.logaddexp(lse, of_block)
    out.mul_((lse - total).exp()[..., None]).add_(y * (of_block - total).exp()[..., None])
    lse.copy_(total)


# --- one block -----------------------------------------------------------------------------------------------------------


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one block and the log of its softmax's denominator [b, h, t]. `causal`: a square with the plain triangle."""
    if q.device.type == "cpu":
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return y, lse
    if _has_flash(q):
        y, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return y, lse
    return written_forward(q, k, v, causal)


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of the gradients of q, k and v. `out` and `lse` are those of the whole row, not of the block."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)  # type: ignore[no-any-return]
    if _has_flash(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, of which there is none
        cumulative = None, None, q.shape[2], k.shape[2]
        return flash(grad, q, k, v, out, lse.contiguous(), *cumulative, 0.0, causal, none, none)  # type: ignore[no-any-return]
    return written_backward(grad, q, k, v, out, lse, causal)


def _has_flash(q: Tensor) -> bool:
    """CUDA's fused kernel takes half types and heads of a multiple of eight."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def written_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`block_forward` as its formulas, in float32 at least: the scores of the block exist."""
    scores, (q, k, v) = _scores(q, k, v, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).flatten(1, 2), lse.flatten(1, 2)


def written_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` as its formulas: P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q."""
    scale, groups = q.shape[-1] ** -0.5, k.shape[1]
    scores, (q, k, v) = _scores(q, k, v, causal)
    grad, out = (x.to(scores.dtype).unflatten(1, (groups, -1)) for x in (grad, out))
    softmax = (scores - lse.unflatten(1, (groups, -1))[..., None]).exp()
    delta = (grad * out).sum(-1, keepdim=True)
    scores_grad = softmax * (grad @ v.mT - delta) * scale
    return (scores_grad @ k).flatten(1, 2), (scores_grad.mT @ q).sum(2), (softmax.mT @ grad).sum(2)


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Scores [b, g, h/g, t, s], and q, k, v in their type with heads by group."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)[:, :, None], v.to(wide)[:, :, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores, (q, k, v)
