"""Faults of sequences cut over ranks, planted as those of `faults.py` are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from disttrain.parallel import context, pairs, ring
from disttrain.parallel.context import HeadTail
from disttrain.parallel.random import Streams
from disttrain.parallel.strategy import Strategy
from tests import tiny
from tests.verify.faults import LAYOUTS, LOST_BACKWARD, MASKS, WRONG_FORWARD, fault, wrapped

LAYOUTS |= {
    "cp": tiny.config(cp=2, micro_batch_size=4, verify={"steps": 2}),
    "cp_rotary": tiny.config(cp=2, micro_batch_size=4, model=tiny.LLAMA, verify={"steps": 2}),
    "cp_ring": tiny.config(
        cp=3, micro_batch_size=4, model=tiny.LLAMA, dataset=tiny.TOKENS | {"context": 12}, strategy={"attention": "ring"}
    ),
    "cp_dropout": tiny.config(cp=2, micro_batch_size=4, model=tiny.GPT | {"dropout": 0.1}, verify={"steps": 1}),
}


def in_one_piece(self: HeadTail, length: int, device: torch.device) -> Tensor:
    """Positions of a sequence cut into one part a rank."""
    return torch.arange(length, device=device) + self.axis.index * length


def local(self: HeadTail, length: int, device: torch.device) -> Tensor:
    """Positions within the part."""
    return torch.arange(length, device=device)


@fault("cp", "gradient", WRONG_FORWARD, named=("positions.weight", "loss"))
def learned_positions_of_a_sequence_in_one_piece_a_rank() -> AbstractContextManager[Any]:
    return patch.object(HeadTail, "positions", in_one_piece)


@fault("cp_rotary", "gradient", WRONG_FORWARD, named=("blocks.0.attention.qkv.q.weight", "loss"))
def rotary_positions_are_local() -> AbstractContextManager[Any]:
    return patch.object(HeadTail, "positions", local)


@fault("cp_rotary", "gradient", WRONG_FORWARD, named=("blocks.0.attention.qkv.k.weight", "loss"))
def causal_mask_in_local_coordinates() -> AbstractContextManager[Any]:
    def upper_left(rows: int, columns: int, device: torch.device) -> Tensor:
        return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()

    return patch.object(context, "_lower_right", upper_left)


@fault("cp", "gradient", LOST_BACKWARD, named=("blocks.0.attention.qkv.weight", "tokens.weight"), spared=("norm.weight",))
def gradients_of_the_others_keys_do_not_come_home() -> AbstractContextManager[Any]:
    def own_part(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.axis.size, ctx.dim)[ctx.axis.index].contiguous(), None, None

    return patch.object(pairs._GatherReduceScatter, "backward", staticmethod(own_part))


@fault("cp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.weight"))
def gradients_are_not_summed_over_cp() -> AbstractContextManager[Any]:
    return patch.object(Strategy, "_gradient_syncs", lambda self, roots: [])


@fault("cp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.weight"))
def mean_of_each_cp_ranks_own_targets() -> AbstractContextManager[Any]:
    def own_mean(original: Any, self: Strategy, step: Any) -> list[float]:
        mine = [self.context.part(batch.targets) for batch in step.micro]
        count = sum(float(self.task.counts(targets)["loss"].sum()) for targets in mine)
        return [1.0 / max(count * self.context.axis.size, 1.0)]

    return wrapped(Strategy, "_loss_weights", own_mean)


@fault("cp_ring", "gradient", WRONG_FORWARD, named=("blocks.0.attention.qkv.v.weight", "loss"))
def the_ring_sees_the_future() -> AbstractContextManager[Any]:
    return patch.object(ring, "_block", lambda *_: (ring.WHOLE, ring.WHOLE))


@fault("cp_ring", "gradient", WRONG_FORWARD, named=("blocks.0.attention.out.weight", "loss"))
def blocks_are_added_without_their_denominators() -> AbstractContextManager[Any]:
    def plainly(out: Tensor, lse: Tensor, y: Tensor, of_block: Tensor) -> None:
        out.add_(y)
        lse.copy_(torch.logaddexp(lse, of_block))

    return patch.object(ring, "_merge", plainly)


@fault(
    "cp_ring",
    "gradient",
    LOST_BACKWARD,
    named=("blocks.0.attention.qkv.k.weight", "blocks.0.attention.qkv.v.weight"),
    spared=("head.weight",),
)
def the_rings_backward_takes_the_blocks_own_denominator() -> AbstractContextManager[Any]:
    def own(original: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
        return original(grad, q, k, v, *ring.block_forward(q, k, v, causal), causal)

    return wrapped(ring, "block_backward", own)


@fault("cp_dropout", "mask", MASKS, named=("dropout", "blocks.0.attention.core", "blocks.1.mlp.dropout"))
def context_ranks_share_their_masks() -> AbstractContextManager[Any]:
    def shared(original: Any, self: Streams, seed: int, device: torch.device, grad_index: int = 0, tensor_index: int = 0) -> None:
        original(self, seed, device, 0, tensor_index)

    return wrapped(Streams, "__init__", shared)
