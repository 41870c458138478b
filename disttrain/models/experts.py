"""A mixture of experts in place of a feed-forward: each token goes to the top_k of num_experts narrow ones.

Routing: softmax over experts, the top_k largest, their weights normalised to one (GShard, Lepikhin et al. 2020,
arXiv:2006.16668; with top_k 1 they are kept as they are, as in Switch, Fedus et al. 2021, arXiv:2101.03961, equation 2:
normalised, the router would get no gradient). Balance: the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437,
equations 17 to 20), one number a sequence, so that it does not matter how sequences lie in micro-batches and on ranks.
Dropless: tokens are sorted by expert, and each expert multiplies what it gets. A capacity, if asked for, holds for each
sequence by itself, for the same reason. Nothing here knows of ranks.

Shape suffixes: b samples, t tokens, n tokens of the micro-batch (b*t), d hidden size, k choices of a token, p pairs of a
token and an expert (n*k), e experts (of this rank, where they are shared out), w width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.micro_batch import attach
from disttrain.models.transformer import BlockShape, FeedForward, GatedFeedForward, gelu

BALANCE = "balance"
"""Name of the loss term that evens out the load of experts."""


@dataclass(frozen=True)
class ExpertShape:
    """Fields of a mixture of experts.

    intermediate_size: width of each expert; null is the dense feed-forward's. every: of the blocks, every n-th has experts.
    num_shared: experts that see every token, beside the routed ones. balance_weight: factor of the balance loss.
    capacity_factor: of a sequence, an expert takes at most this times its even share of tokens, the first ones; null takes all.
    """

    num_experts: int = 8
    top_k: int = 2
    intermediate_size: int | None = None
    every: int = 1
    num_shared: int = 0
    balance_weight: float = 0.01
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        """Refuse more choices than experts."""
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"model.experts.top_k={self.top_k} is more than model.experts.num_experts={self.num_experts}",
                f"model.experts.top_k={self.num_experts}",
            )

    def width(self, shape: BlockShape) -> int:
        """Width of one expert."""
        return self.intermediate_size or shape.intermediate_size

    def flops(self, shape: BlockShape, length: int) -> float:
        """Forward of one sample: the experts that its tokens go to, those that all share, and the router."""
        active = (self.top_k + self.num_shared) * self.width(shape) * (3 if shape.mlp == "swiglu" else 2)
        return 2.0 * length * shape.hidden_size * (active + self.num_experts)


class MixtureOfExperts(nn.Module):
    """Router, experts, shared experts. Deterministic: of equal probabilities the lower expert's wins."""

    def __init__(self, shape: BlockShape, experts: ExpertShape) -> None:
        super().__init__()
        self.shape = experts
        self.router = nn.Linear(shape.hidden_size, experts.num_experts, bias=False)
        self.experts = Experts(shape, experts)
        self.shared = self._shared(shape, experts) if experts.num_shared else None
        self.dropout = nn.Dropout(shape.dropout)
        self.over_sequence: Callable[[Tensor], Tensor] = _alone
        """Sums what was counted over a sequence's tokens [b, e] where others have the rest of them: who cuts sequences gives it.

        The balance losses of all parts then add up to the whole sequence's.
        """

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]; the balance loss goes its own way (see `attach`)."""
        b, t, d = x_btd.shape
        weights_nk, chosen_nk, balance_b = self.route(x_btd)
        kept_nk = None if self.shape.capacity_factor is None else self._within_capacity(chosen_nk, t)
        y_nkd = _visit(self.experts, x_btd.reshape(b * t, d), chosen_nk, kept_nk, self.shape.num_experts)
        y_btd = (y_nkd * weights_nk[..., None]).sum(1).view(b, t, d)
        if self.shared is not None:
            y_btd = y_btd + self.shared(x_btd)
        y_btd = self.dropout(y_btd)
        return attach(y_btd, BALANCE, balance_b) if self.shape.balance_weight else y_btd

    @staticmethod
    def _shared(shape: BlockShape, experts: ExpertShape) -> nn.Module:
        """Those that see every token: together one feed-forward."""
        alike = replace(shape, intermediate_size=experts.num_shared * experts.width(shape), dropout=0.0)
        return GatedFeedForward(alike) if shape.mlp == "swiglu" else FeedForward(alike)

    def route(self, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and experts of each token's choices [n, k], largest first, and each sample's balance loss [b]; float32 at least."""
        b, t, _ = x_btd.shape
        num_experts, top_k = self.shape.num_experts, self.shape.top_k
        wide = torch.promote_types(x_btd.dtype, torch.float32)
        with torch.autocast(x_btd.device.type, enabled=False):
            share_ne = F.linear(x_btd.to(wide), self.router.weight.to(wide)).softmax(-1).view(b * t, num_experts)
        sorted_ne, order_ne = share_ne.sort(dim=-1, descending=True, stable=True)
        weights_nk, chosen_nk = sorted_ne[:, :top_k], order_ne[:, :top_k]
        load_be = self.over_sequence(_chosen(chosen_nk, share_ne).view(b, t, -1).sum(1))
        whole_t = load_be.sum(-1, keepdim=True) / top_k
        balance_be = load_be * (num_experts / (top_k * whole_t)) * share_ne.view(b, t, -1).sum(1) / whole_t
        balance_b = self.shape.balance_weight * balance_be.sum(-1)
        return weights_nk / weights_nk.sum(-1, keepdim=True) if top_k > 1 else weights_nk, chosen_nk, balance_b

    def _within_capacity(self, chosen_nk: Tensor, t: int) -> Tensor:
        """Which choices [n, k] find room: of a sequence's tokens, each expert takes its first ones."""
        assert self.shape.capacity_factor is not None
        capacity = math.ceil(self.shape.capacity_factor * t * self.shape.top_k / self.shape.num_experts)
        taken_ne = _chosen(chosen_nk, torch.zeros(len(chosen_nk), self.shape.num_experts, device=chosen_nk.device))
        place_ne = taken_ne.view(-1, t, self.shape.num_experts).cumsum(1).view_as(taken_ne)
        return place_ne.gather(1, chosen_nk) <= capacity


def _alone(x_be: Tensor) -> Tensor:
    """Nobody has other tokens of these sequences."""
    return x_be


class Experts(nn.Module):
    """Feed-forwards of one shape as stacked matrices [e, out, in], without biases: GELU, or SwiGLU, as the block's own."""

    def __init__(self, shape: BlockShape, experts: ExpertShape) -> None:
        super().__init__()
        e, w, d = experts.num_experts, experts.width(shape), shape.hidden_size
        self.gate = nn.Parameter(torch.empty(e, w, d)) if shape.mlp == "swiglu" else None
        self.up = nn.Parameter(torch.empty(e, w, d))
        self.down = nn.Parameter(torch.empty(e, d, w))
        self.activation = gelu(shape)

    def forward(self, x_pd: Tensor, counts_e: Tensor) -> Tensor:
        """Rows sorted by expert, and how many each gets, to as many rows [p, d]."""
        up_pw = grouped_linear(x_pd, counts_e, self.up)
        if self.gate is None:
            return grouped_linear(self.activation(up_pw), counts_e, self.down)
        return grouped_linear(F.silu(grouped_linear(x_pd, counts_e, self.gate)) * up_pw, counts_e, self.down)


def grouped_linear(x_pi: Tensor, counts_e: Tensor, weight_eoi: Tensor) -> Tensor:
    """Each group of rows times its own matrix: [p, i] to [p, o].

    On a GPU in bf16 one kernel that reads the counts there; else one product an expert, which costs the host a read of them.
    """
    kind = x_pi.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x_pi.dtype != torch.float64 else x_pi.dtype
    if kind == "cuda" and dtype == torch.bfloat16:
        ends_e = counts_e.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_pi.to(dtype), weight_eoi.to(dtype).transpose(1, 2), offs=ends_e)
    parts = x_pi.split(counts_e.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_eoi.unbind(), strict=True)])


def _visit(experts: nn.Module, x_nd: Tensor, chosen_nk: Tensor, kept_nk: Tensor | None, num_experts: int) -> Tensor:
    """What each token's experts make of it [n, k, d]; zero where there was no room."""
    n, k = chosen_nk.shape
    nowhere = num_experts
    expert_p = (chosen_nk if kept_nk is None else chosen_nk.masked_fill(~kept_nk, nowhere)).flatten()
    order_p = expert_p.argsort(stable=True)
    counts_e = torch.zeros(num_experts + 1, dtype=torch.int64, device=x_nd.device)
    counts_e = counts_e.scatter_add_(0, expert_p, torch.ones_like(expert_p))[:num_experts]
    x_pd = permute(x_nd[:, None].expand(n, k, -1).reshape(n * k, -1), order_p)
    if kept_nk is None:
        y_pd = experts(x_pd, counts_e)
    else:  # those without room come last
        num_kept = int(counts_e.sum())
        y_pd = F.pad(experts(x_pd[:num_kept], counts_e), (0, 0, 0, n * k - num_kept))
    return permute(y_pd, inverse(order_p)).view(n, k, -1)


class _Permute(torch.autograd.Function):
    """Forward: rows in another order. Backward: back again, with no sum that could run in any order."""

    @staticmethod
    def forward(ctx: Any, x_pd: Tensor, order_p: Tensor) -> Tensor:
        ctx.order_p = order_p
        return x_pd[order_p]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_pd: Tensor) -> tuple[Tensor, None]:
        return grad_pd[inverse(ctx.order_p)], None


def permute(x_pd: Tensor, order_p: Tensor) -> Tensor:
    """Rows of `x_pd` in the order `order_p`, a permutation."""
    return _Permute.apply(x_pd, order_p)  # type: ignore[no-any-return]


def inverse(order_p: Tensor) -> Tensor:
    """The permutation that undoes another."""
    back_p = torch.empty_like(order_p)
    back_p[order_p] = torch.arange(len(order_p), device=order_p.device)
    return back_p


def _chosen(chosen_nk: Tensor, like_ne: Tensor) -> Tensor:
    """One where a token chose an expert, else zero [n, e]; no gradient."""
    return torch.zeros_like(like_ne).scatter_(1, chosen_nk, 1.0)
