"""A decoder of transformer blocks in numbers: its widths, what it has of parameters, what a token costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder of transformer blocks; see `disttrain.models.gpt.GPT`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    """SwiGLU: three matrices in the feed-forward instead of two."""
    tied: bool = False
    """The head is the token embedding."""
    positions: int = 0
    """Rows of a learned position table; 0: rotary or none."""
    vectors: float = 0
    """Elements of a block's biases and norms, in the mean."""
    last_norm: int = 0
    """Elements of the norm before the head."""
    experts: int = 0
    """Experts a layer, 0 for a dense model; each has the feed-forward's width `ffn`."""
    top_k: int = 0
    """Experts that a token visits."""
    shared_ffn: int = 0
    """Width of a feed-forward that all tokens visit beside the experts'."""
    balanced: bool = False
    """The loss has a second term, which evens out the load of experts."""
    bias: bool = False
    """Of linear maps; `vectors` counts it."""
    norm_bias: bool = False
    rms: bool = False
    """Norms are RMSNorm."""
    merged: bool = True
    """Query, key and value are one matrix, gate and up another."""
    longest: int = 0
    """Tokens that the model can see, by which its stages are balanced; 0: not known."""
    every: int = 1
    """Of the layers, every n-th has experts; the others have a feed-forward of width `dense_ffn`."""
    dense_ffn: int = 0
    """0: `ffn`."""

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts in place of a feed-forward."""
        return self.experts > 0 and (layer + 1) % self.every == 0

    @property
    def sparse_share(self) -> float:
        """Share of the layers that have experts."""
        return self.layers // self.every / self.layers if self.experts else 0.0

    @property
    def fed(self) -> int:
        """Width of a feed-forward without experts."""
        return self.dense_ffn or self.ffn

    @property
    def cut_by_tensor(self) -> tuple[int, ...]:
        """What the tensor axis must divide."""
        return self.kv_heads, self.heads, self.vocab, self.ffn, self.fed

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Matrices of one layer's attention: query, key, value, output."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_width)

    def of_feed_forward(self, is_sparse: bool, active: bool = False) -> int:
        """Elements of one layer's feed-forward or mixture, matrices only; `active`: of those a token passes through."""
        if not is_sparse:
            return self.matrices * self.hidden * self.fed
        visited = self.top_k if active else self.experts
        return self.matrices * self.hidden * (visited * self.ffn + self.shared_ffn) + self.hidden * self.experts

    def feed_forward_parameters(self, active: bool = False) -> float:
        """Mean of `of_feed_forward` over layers."""
        share = self.sparse_share
        return share * self.of_feed_forward(True, active) + (1 - share) * self.of_feed_forward(False)

    @property
    def expert_parameters(self) -> float:
        """Mean over layers of what expert parallelism shares out."""
        return self.matrices * self.hidden * self.ffn * self.experts * self.sparse_share

    @property
    def layer_parameters(self) -> float:
        """Mean over layers of all parameters of one."""
        return self.attention_parameters + self.feed_forward_parameters() + self.vectors

    @property
    def embedding_parameters(self) -> int:
        """Token and position tables."""
        return self.hidden * (self.vocab + self.positions)

    @property
    def head_parameters(self) -> int:
        """The head's matrix, whether or not it is the embedding's."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> float:
        """All of them, each once."""
        ends = self.embedding_parameters + (0 if self.tied else self.head_parameters)
        return self.layers * self.layer_parameters + ends + self.last_norm

    @property
    def active_parameters(self) -> float:
        """Those that a token passes through, tables of embeddings left out and the head counted."""
        return self.layers * (self.attention_parameters + self.feed_forward_parameters(active=True)) + self.head_parameters

    def flops(self, length: int) -> float:
        """Model flops of a token, forward and backward: 6 a parameter and 6 L s h for causal attention.

        Half of the square that Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count, as a causal kernel computes half.
        """
        return 6.0 * self.active_parameters + 6.0 * self.layers * length * self.hidden
