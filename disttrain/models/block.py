"""A lone transformer block, for regression: the smallest thing that a tensor plan cuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from disttrain.models.model import Parts
from disttrain.models.task import Regression, Task
from disttrain.models.transformer import Block, BlockShape, block_plan, init_transformer, start


class TransformerBlock(nn.Module):
    """One pre-norm block without a causal mask: vectors [b, t, d] to vectors [b, t, d]."""

    def __init__(
        self,
        *,
        hidden_size: int = 512,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        max_seq_len: int = 32,
        dropout: float = 0.0,
        bias: bool = True,
        merged_qkv: bool = True,
        init_std: float = 0.02,
        task: Task | None = None,
    ) -> None:
        """Fields as in `GPT`; the feed-forward is 4 hidden_size wide with GELU unless `intermediate_size` says otherwise."""
        super().__init__()
        self.shape = BlockShape(
            hidden_size,
            num_heads,
            num_kv_heads or num_heads,
            intermediate_size or 4 * hidden_size,
            dropout,
            bias=bias,
            merged_qkv=merged_qkv,
            causal=False,
        )
        self.max_seq_len = max_seq_len
        self.init_std = init_std
        self.task: Task = task or Regression()
        self.enter = nn.Identity()  # where a plan may cut whole inputs along tokens, and below make outputs whole again
        self.blocks = nn.ModuleList([Block(self.shape)])
        self.leave = nn.Identity()
        start(self)

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        y_btd: Tensor = self.leave(self.blocks[0](self.enter(x_btd)))
        return y_btd

    @property
    def plan(self) -> dict[str, str]:
        """The block's; inputs, outputs and loss are whole on every rank."""
        return {"enter": "sequence_split"} | block_plan(self.shape) | {"leave": "sequence_gather"}

    def parts(self) -> Parts:
        """The one block."""
        return Parts(first=("enter",), repeated=("blocks.0",), last=("leave",), cost={"blocks.0": self.shape.flops(self.max_seq_len)})

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Forward and backward of one sample: three times the forward's (see `BlockShape.flops`)."""
        return 3.0 * self.shape.flops(shape[0] if shape else self.max_seq_len)

    def init_parameter(self, name: str, shape: tuple[int, ...], rows: range, generator: torch.Generator) -> Tensor:
        """See `init_transformer`."""
        return init_transformer(name, shape, rows, generator, self.init_std, num_layers=1)
