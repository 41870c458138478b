"""Less memory for activations: computed again in backward, or kept on the host.

What is cut: nothing of the weights. What a rank holds between forward and backward, with a block's activations A
and its input x (b*t*d elements): A a block normally; x a block under `full`, at the price of a second forward of
the blocks, about a third more compute (Chen et al. 2016, arXiv:1604.06174); under `selective` x and the results of
matrix products and attention, so that only cheap operators run twice (Korthikanti et al. 2022, arXiv:2205.05198,
section 5). What moves: the collectives of a tensor-parallel block's forward move again in the second one. With
`offload` what is left is copied to host memory and back: 2A bytes over the bus a step.

Masks of dropout are drawn again from where they were drawn first, in the shared stream and the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.parallel.random import Streams
from disttrain.parallel.tensor import RowLinear

KEPT = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
"""Operators whose results `selective` keeps: the expensive ones."""


def recompute_blocks(blocks: Mapping[str, nn.Module], kind: str, every: int, streams: Streams) -> None:
    """Let every `every`-th of the model's blocks compute its activations again in backward. `kind`: full or selective."""
    for block in list(blocks.values())[::every]:
        if kind == "selective":
            for part in block.modules():
                if isinstance(part, RowLinear):
                    part.fused = False  # the product that is kept must not become the sum over ranks
        block.forward = _Recomputed(block.forward, kind == "selective", streams)


def offload_blocks(blocks: Iterable[nn.Module]) -> None:
    """Keep what these blocks save for backward in host memory; parameters stay where they are."""
    for block in blocks:
        block.forward = _Offloaded(block)


class _Recomputed:
    """A block's forward under torch's checkpoint; the rank's own random stream is put back for the second run."""

    def __init__(self, forward: Callable[..., Any], selective: bool, streams: Streams) -> None:
        self.forward = forward
        self.selective = selective
        self.streams = streams

    def __call__(self, *args: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self.forward(*args)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What surrounds the first and the second run."""
        again = self.streams.again()
        if not self.selective:
            return ExitStack(), again
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        first, second = create_selective_checkpoint_contexts(_kept_operators())
        return first, _both(again, second)


class _Offloaded:
    """A block's forward whose saved tensors wait in host memory, page-locked where there is a GPU."""

    def __init__(self, block: nn.Module) -> None:
        self.forward = block.forward
        self.parameters = block.parameters
        self.own: set[int] = set()

    def __call__(self, *args: Any) -> Any:
        # looked up at each call: FSDP2 puts whole weights in the place of shards just before
        self.own = {parameter.untyped_storage()._cdata for parameter in self.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return self.forward(*args)

    def _pack(self, saved: Tensor) -> Tensor | tuple[Tensor, torch.device]:
        if saved.untyped_storage()._cdata in self.own:
            return saved
        pinned = saved.device.type == "cuda"
        host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=pinned)
        host.copy_(saved, non_blocking=pinned)
        return host, saved.device


def _unpack(packed: Tensor | tuple[Tensor, torch.device]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    host, device = packed
    return host.to(device, non_blocking=True)


def _kept_operators() -> list[Any]:
    names = [getattr(torch.ops.aten, name, None) for name in KEPT]
    return [packet.default for packet in names if packet is not None]


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
