"""What is planned: a model's shape, how it lies on the ranks, what a step is. Plain numbers, no torch, no config.

Letters in the formulas of this room: L layers, h hidden size, a heads, g key-value heads, f feed-forward width,
V vocabulary, s tokens a sample, b samples a micro-batch, m micro-batches, n = s b / cp tokens a rank sees of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev", "zero_bubble", "zero_bubble_2p")
"""Schedules that compute the gradients of inputs and of weights at different times."""
V_SHAPED = ("zbv", "dualpipev")
"""Each rank holds one chunk of the way there and one of the way back: the first rank has embedding and head."""


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


@dataclass(frozen=True)
class Recompute:
    """Shares of the forward pass that the backward computes again, by kind of work."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    kept: float = 1.0
    """Share of a layer's activations that stay in memory, the block's input left out."""

    @property
    def layers(self) -> float:
        """Share of layers whose whole forward, collectives too, runs again."""
        return min(self.gemm, self.attention, self.memory)


NONE = Recompute()
FULL = Recompute(1.0, 1.0, 1.0, 0.0)
SELECTIVE = Recompute(0.0, 1.0, 0.0, 1.0)
"""The attention's core (Korthikanti et al. 2022, arXiv:2205.05198, section 5). With a fused kernel nothing is saved by it."""


def every(share: float) -> Recompute:
    """Full recomputation of this share of the layers."""
    return Recompute(share, share, share, 1.0 - share)


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh and what goes with them. `dp_shard` cuts states (ZeRO), `ep` divides dp_shard x cp."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    """What dp_shard shares out: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    """Chunks of layers a pipeline rank holds."""
    recompute: Recompute = NONE
    micro_batch: int = 1
    blocks: tuple[tuple[int, ...], ...] = ()
    """Layers of each pipeline rank, by index; empty: as even as they come, the first ranks having what is over."""
    share_context: bool = True
    """States are shared out over cp too, as Megatron does; else over dp_shard only, and cp holds copies."""
    attention: str = "gather"
    """Under cp: keys and values of all ranks at once, or rank by rank ('ring')."""
    loss_chunk: bool = False
    """The head's product is put off to the loss, which computes it some tokens at a time."""
    bucket_size: float = 25.0
    """MiB of the buckets that gradients of whole weights travel in."""
    sync_every: int = 1
    """Steps between averages of the weights over dp_replicate; 1: gradients are summed every step."""
    reshard: bool = True
    """ZeRO-3: whole weights are let go after the forward and gathered again for the backward."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.cp * self.tp * self.pp

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharing(self) -> int:
        """Ranks that share out the states of one copy of the weights."""
        return self.dp_shard * (self.cp if self.share_context else 1)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same share, and sum gradients."""
        return self.dp_replicate * (1 if self.share_context else self.cp)


@dataclass(frozen=True)
class Numbers:
    """Bytes of an element of each kind. The defaults are bf16 training with float32 master weights, as Megatron has it."""

    weight: float = 2.0
    """Weights at rest, as `zero` 3 shares them out."""
    gradient: float = 4.0
    state: float = 12.0
    """Optimizer: master weights and two moments."""
    compute: float = 2.0
    """Operands of matrix products."""
    stream: float = 2.0
    """Residual stream."""
    gathered: float = 0.0
    """A second, whole copy of the weights in the type of the products; 0: none."""
    shard_beside: float = 0.0
    """A shared-out copy of the weights beside the whole ones (FSDP2 under ZeRO 1 and 2); 0: none."""
    wire_weight: float = 2.0
    wire_gradient: float = 2.0
    logit: float = 4.0
    """A logit and what the loss keeps of it."""


@dataclass(frozen=True)
class Software:
    """What is assumed of the program that runs the layout."""

    kernel: str = "flash"
    """Attention: 'flash' (FlashAttention-2, SDPA), 'fused' (cuDNN through Transformer Engine), 'triton' (FlashAttention-1),
    'unfused' (scores in memory)."""
    precision: str = "bf16"
    """Type of matrix products: bf16 (fp16 counts as it), fp8, fp32."""
    fused: bool = True
    """Norms, rotations and activations are one kernel each (written so, or compiled)."""
    tensor_exposed: float = 1.0
    """Share of tensor-parallel communication that no product hides."""
    own: bool = False
    """It is disttrain itself, operator by operator (not compiled): every tensor that it holds is known (`own.py`)."""
    scattered: bool = True
    """Pipelines send each tensor rank's part of the stream only (Narayanan et al. 2021, section 4.1)."""


@dataclass(frozen=True)
class Case:
    """One thing to plan."""

    shape: Shape
    layout: Layout
    length: int
    """Tokens a sample."""
    global_batch: int
    """Samples a step."""
    numbers: Numbers = field(default_factory=Numbers)
    software: Software = field(default_factory=Software)

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step on each data rank."""
        return max(1, math.ceil(self.global_batch / (self.layout.micro_batch * self.layout.data)))

    @property
    def tokens(self) -> float:
        """n: tokens of a micro-batch that one rank sees."""
        return self.layout.micro_batch * self.length / self.layout.cp

    @property
    def step_tokens(self) -> int:
        """Tokens a step."""
        return self.global_batch * self.length
