"""One decoder, GPT-2 or Llama by a few fields.

GPT-2: Radford et al. 2019. Llama: Touvron et al. 2023 (arXiv:2302.13971).

Shape suffixes: b samples, t tokens, d hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from disttrain.models.experts import BALANCE, ExpertShape, MixtureOfExperts
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
        experts: ExpertShape | None = None,
        task: Task | None = None,
    ) -> None:
        """The defaults are a small GPT-2.

        num_kv_heads: key-value heads that groups of query heads share; null is num_heads.
        intermediate_size: width of the feed-forward; null is 4 hidden_size, or Llama's rule for swiglu.
        tie_embeddings: the head is the token embedding.
        bias: of linear maps and of LayerNorm; the head has none.
        merged_qkv: one matrix for query, key and value (and one for gate and up).
        rope_theta: base of the rotary angles. init_std: of the weights' start.
        experts: mixtures of experts in place of every n-th block's feed-forward.
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
        self.num_layers, self.vocab_size, self.max_seq_len = num_layers, vocab_size, max_seq_len
        self.init_std = init_std
        self.experts = experts
        self.task: Task = task or LanguageModelling(attached=(BALANCE,) if experts and experts.balance_weight else ())
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_seq_len, hidden_size) if position == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(self._block(index) for index in range(num_layers))
        self.norm = make_norm(norm, hidden_size, bias)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.tied = tie_embeddings
        if tie_embeddings:
            self.head.weight = self.tokens.weight
        start(self)

    def _block(self, index: int) -> Block:
        return Block(self.shape, MixtureOfExperts(self.shape, self.experts) if self.experts and self._has_experts(index) else None)

    def _has_experts(self, index: int) -> bool:
        """Of n blocks the last, counted from the first."""
        return self.experts is not None and (index + 1) % self.experts.every == 0

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [b, t, v] of each next token."""
        x_btd = self.begin(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.end(x_btd)

    def begin(self, tokens_bt: Tensor) -> Tensor:
        """The residual stream [b, t, d] before the first block."""
        t = tokens_bt.shape[1]
        assert t <= self.max_seq_len, f"{t} tokens, but model.max_seq_len={self.max_seq_len}"
        x_btd = self.tokens(tokens_bt)
        if self.positions is not None:
            x_btd = x_btd + self.positions(torch.arange(t, device=tokens_bt.device)[None])
        y_btd: Tensor = self.dropout(x_btd)
        return y_btd

    def end(self, x_btd: Tensor) -> Tensor:
        """Logits [b, t, v] from the residual stream behind the last block."""
        logits_btv: Tensor = self.head(self.norm(x_btd))
        return logits_btv

    @property
    def plan(self) -> dict[str, str]:
        """Blocks as in `BLOCK_PLAN`; the vocabulary is cut in embedding, head and loss, so whole logits exist nowhere."""
        ends = {"tokens": "vocab_embedding", "positions": "position_embedding", "dropout": "residual_dropout", "norm": "sequence_norm"}
        if self.positions is None:
            del ends["positions"]
        mixed = [index for index in range(self.num_layers) if self._has_experts(index)]
        blocks = block_plan(self.shape, len(mixed) < self.num_layers) | self._expert_plan(mixed)
        return ends | blocks | {"head": "vocab_head", "loss": "vocab_parallel"}

    def _expert_plan(self, mixed: Sequence[int]) -> dict[str, str]:
        """Of the blocks `mixed`, which have experts."""
        if not mixed or self.experts is None:
            return {}
        shared = {"gate_up" if self.shape.mlp == "swiglu" else "up": "column", "down": "row"} if self.experts.num_shared else {}
        plan = {f"blocks.{index}.mlp": "whole_sequence" for index in mixed} | {"blocks.*.mlp.experts": "experts"}
        return plan | {f"blocks.*.mlp.shared.{name}": style for name, style in shared.items()}

    def parts(self) -> Parts:
        """Embeddings, blocks, norm and head."""
        names = tuple(f"blocks.{i}" for i in range(self.num_layers))
        cost = {name: self._block_flops(index, self.max_seq_len) for index, name in enumerate(names)}
        return Parts(
            first=("tokens", *(("positions",) if self.positions is not None else ()), "dropout"),
            repeated=names,
            last=("norm", "head"),
            tied=(("tokens.weight", "head.weight"),) if self.tied else (),
            cost=cost | {"head": 2.0 * self.max_seq_len * self.shape.hidden_size * self.vocab_size},
            begin=self.begin,
            end=self.end,
        )

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Forward and backward of one sample, by default of max_seq_len tokens: three times the forward's (see `BlockShape.flops`)."""
        length = shape[0] if shape else self.max_seq_len
        head = 2.0 * length * self.shape.hidden_size * self.vocab_size
        return 3.0 * (sum(self._block_flops(index, length) for index in range(self.num_layers)) + head)

    def _block_flops(self, index: int, length: int) -> float:
        """Forward of one block."""
        if self.experts is None or not self._has_experts(index):
            return self.shape.flops(length)
        return self.shape.attention_flops(length) + self.experts.flops(self.shape, length)

    def init_parameter(self, name: str, shape: tuple[int, ...], rows: range, generator: torch.Generator) -> Tensor:
        """See `init_transformer`."""
        return init_transformer(name, shape, rows, generator, self.init_std, self.num_layers)
