"""One decoder, GPT-2 or Llama by a few fields.

GPT-2: Radford et al. 2019. Llama: Touvron et al. 2023 (arXiv:2302.13971).

Shape suffixes: b samples, t tokens, d hidden size, v vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from disttrain.models.model import Parts
from disttrain.models.task import LanguageModelling, Task
from disttrain.models.transformer import Block, BlockShape, block_plan, choice, init_transformer, llama_width, make_norm, start


class GPT(nn.Module):
    """Decoder-only language model: token numbers [b, t] to logits [b, t, v]."""

    def __init__(
        self,
        *,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden_size: int = 128,
        intermediate_size: int | None = None,
        vocab_size: int = 256,
        max_seq_len: int = 128,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        norm: Literal["layer", "rms"] = "layer",
        position: Literal["learned", "rotary"] = "learned",
        mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu",
        bias: bool = True,
        merged_qkv: bool = True,
        rope_theta: float = 10_000.0,
        init_std: float = 0.02,
        task: Task | None = None,
    ) -> None:
        """The defaults are a small GPT-2.

        num_kv_heads: key-value heads that groups of query heads share; null is num_heads.
        intermediate_size: width of the feed-forward; null is 4 hidden_size, or Llama's rule for swiglu.
        tie_embeddings: the head is the token embedding.
        bias: of linear maps and of LayerNorm; the head has none.
        merged_qkv: one matrix for query, key and value (and one for gate and up).
        rope_theta: base of the rotary angles. init_std: of the weights' start.
        """
        super().__init__()
        choice("position", position, ("learned", "rotary"))
        self.shape = BlockShape(
            hidden_size,
            num_heads,
            num_kv_heads or num_heads,
            intermediate_size or (llama_width(hidden_size) if mlp == "swiglu" else 4 * hidden_size),
            dropout,
            norm,
            mlp,
            bias,
            merged_qkv,
            rope_theta if position == "rotary" else None,
        )
        self.num_layers = num_layers
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.init_std = init_std
        self.task: Task = task or LanguageModelling()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_seq_len, hidden_size) if position == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.shape) for _ in range(num_layers))
        self.norm = make_norm(norm, hidden_size, bias)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.tokens.weight
        start(self)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [b, t, v] of each next token."""
        t = tokens_bt.shape[1]
        assert t <= self.max_seq_len, f"{t} tokens, but model.max_seq_len={self.max_seq_len}"
        x_btd = self.tokens(tokens_bt)
        if self.positions is not None:
            x_btd = x_btd + self.positions(torch.arange(t, device=tokens_bt.device)[None])
        x_btd = self.dropout(x_btd)
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv: Tensor = self.head(self.norm(x_btd))
        return logits_btv

    @property
    def plan(self) -> dict[str, str]:
        """Blocks as in `BLOCK_PLAN`; the vocabulary is cut in embedding, head and loss, so whole logits exist nowhere."""
        ends = {"tokens": "vocab_embedding", "positions": "position_embedding", "dropout": "residual_dropout", "norm": "sequence_norm"}
        if self.positions is None:
            del ends["positions"]
        return ends | block_plan(self.shape) | {"head": "vocab_head", "loss": "vocab_parallel"}

    def parts(self) -> Parts:
        """Embeddings, blocks, norm and head."""
        names = tuple(f"blocks.{i}" for i in range(self.num_layers))
        cost = dict.fromkeys(names, self.shape.flops(self.max_seq_len))
        return Parts(
            first=("tokens", *(("positions",) if self.positions is not None else ()), "dropout"),
            repeated=names,
            last=("norm", "head"),
            tied=(("tokens.weight", "head.weight"),) if self.head.weight is self.tokens.weight else (),
            cost=cost | {"head": 2.0 * self.max_seq_len * self.shape.hidden_size * self.vocab_size},
        )

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Forward and backward of one sample, by default of max_seq_len tokens: three times the forward's (see `BlockShape.flops`)."""
        length = shape[0] if shape else self.max_seq_len
        head = 2.0 * length * self.shape.hidden_size * self.vocab_size
        return 3.0 * (self.num_layers * self.shape.flops(length) + head)

    def init_parameter(self, name: str, shape: tuple[int, ...], rows: range, generator: torch.Generator) -> Tensor:
        """See `init_transformer`."""
        return init_transformer(name, shape, rows, generator, self.init_std, self.num_layers)
