"""Expert parallelism: ranks that see different samples share out the experts, and send each other tokens.

What is cut: the stacked matrices of the experts, by expert, over the axis `ep` (a part of the data ranks). What each rank
holds: num_experts / ep of them whole, everything else as without. What moves, with n tokens of a rank's micro-batch, k
experts a token, d numbers a token: the counts, num_experts integers of 8 bytes; then an all-to-all of the n k rows of d
sorted by expert, to whoever holds it, and one back; the same two backward. So 4 n k d elements a layer, micro-batch and
rank on average, of which (ep-1)/ep cross the wire where routing is even; what one rank gets is another's choice. Gradients
of experts are whole after that, for samples of all of `ep`, and are summed over the other data ranks only
(the view `grad_beside_ep`); those of everything else over all of them.

GShard: Lepikhin et al. 2020 (arXiv:2006.16668), section 3; Switch: Fedus et al. 2021 (arXiv:2101.03961); dropless with uneven
splits as in DeepSeek-V3 (arXiv:2412.19437), section 2.1.2. The splits are known to the devices alone, so each layer's
forward costs the host one read; recomputed, one more.

A model's plan names its experts by the style `experts`: a module whose parameters are all stacked [experts, ...], and
whose forward(rows sorted by expert, rows of each expert) computes with as many experts as it holds.

Shape suffixes: p rows (a token and one of its experts), d hidden size, e all experts, l experts of this rank, s ranks of `ep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from disttrain.errors import ConfigError
from disttrain.models.experts import Experts, inverse, permute
from disttrain.parallel import collectives
from disttrain.parallel.layout import Cut, Placement
from disttrain.parallel.mesh import Axis
from disttrain.parallel.pairs import copy_reduce, reduce_copy

BESIDE_EP = "grad_beside_ep"
"""Ranks that hold the same experts and see different samples."""

Forward = Callable[[Tensor, Tensor], Tensor]


def share_experts(model: nn.Module, names: Sequence[str], axis: Axis) -> set[str]:
    """Let each rank of `ep` compute its experts, for the tokens of all; returns the names of parameters that are cut.

    Forward is wrapped in place, so names stay. ConfigError for a model without experts, or with a number that does not divide.
    """
    if not names:
        raise ConfigError(
            f"strategy.ep={axis.size} shares out experts, and {type(model).__name__} names none in its plan",
            "strategy.ep=1, or model=moe_tiny",
        )
    cut = set()
    for name in names:
        module = model.get_submodule(name)
        for key, parameter in module.named_parameters():
            if parameter.shape[0] % axis.size:
                raise ConfigError(
                    f"the {parameter.shape[0]} experts of '{name}' are not divisible by strategy.ep={axis.size}",
                    f"model.experts.num_experts={-(-parameter.shape[0] // axis.size) * axis.size}",
                )
            cut.add(f"{name}.{key}")
        module.forward = _Exchanged(module.forward, axis)
    return cut


def cut_width(module: nn.Module, axis: Axis) -> dict[str, Placement]:
    """Cut each expert's width over `tp`: the first matrices by outputs, the last by inputs. A user's own experts stay whole."""
    if not isinstance(module, Experts):
        return {}
    width = module.up.shape[1]
    if width % axis.size:
        raise ConfigError(
            f"tensor parallel: the width {width} of experts is not divisible by strategy.tp={axis.size}",
            f"model.experts.intermediate_size={-(-width // axis.size) * axis.size}",
        )
    module.forward = _Narrowed(module.forward, axis)  # type: ignore[method-assign]
    return {name: Cut(2 if name == "down" else 1) for name, _ in module.named_parameters()}


class _Narrowed:
    """Experts of which each rank of `tp` holds a part of the width: their results are summed, the input's gradients too."""

    def __init__(self, forward: Forward, axis: Axis) -> None:
        self.forward = forward
        self.axis = axis

    def __call__(self, x_pd: Tensor, counts_e: Tensor) -> Tensor:
        return reduce_copy(self.forward(copy_reduce(x_pd, self.axis), counts_e), self.axis)


class _Exchanged:
    """Rows go to the ranks that hold their experts, are computed there, and come back. Every rank of `ep` must call it."""

    def __init__(self, forward: Forward, axis: Axis) -> None:
        self.forward = forward
        self.axis = axis

    def __call__(self, x_pd: Tensor, counts_e: Tensor) -> Tensor:
        """Rows sorted by expert, and how many each of all experts gets, to as many rows in the same order."""
        sent_sl = counts_e.view(self.axis.size, -1)
        received_sl = collectives.all_to_all(counts_e, self.axis).view_as(sent_sl)
        sent, received = torch.stack([sent_sl.sum(1), received_sl.sum(1)]).tolist()
        x_pd = _AllToAll.apply(x_pd, self.axis, sent, received)
        order_p = _by_expert(received_sl, len(x_pd))
        y_pd = permute(self.forward(permute(x_pd, order_p), received_sl.sum(0)), inverse(order_p))
        return _AllToAll.apply(y_pd, self.axis, received, sent)  # type: ignore[no-any-return]


def _by_expert(received_sl: Tensor, num_rows: int) -> Tensor:
    """The order that sorts rows by this rank's expert, which came sorted by rank and then by expert."""
    expert_sl = torch.arange(received_sl.shape[1], device=received_sl.device).expand_as(received_sl)
    expert_p = expert_sl.flatten().repeat_interleave(received_sl.flatten(), output_size=num_rows)
    return expert_p.argsort(stable=True)


class _AllToAll(torch.autograd.Function):
    """Forward: send[i] rows go to rank i, received[i] come from it. Backward: gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x_pd: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return collectives.all_to_all(x_pd, axis, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_pd: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.all_to_all(grad_pd, ctx.axis, sent=ctx.received, received=ctx.sent), None, None, None
