"""What is planned: a model's shape, how it lies on the ranks, what a step is. Plain numbers, no torch, no config.

Letters in the formulas of this room: L layers, h hidden size, a heads, g key-value heads, f feed-forward width,
V vocabulary, s tokens a sample, b samples a micro-batch, m micro-batches, n = s b / cp tokens a rank sees of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from disttrain.plan.shape import Shape

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev", "zero_bubble", "zero_bubble_2p")
"""Schedules that compute the gradients of inputs and of weights at different times."""
V_SHAPED = ("zbv", "dualpipev")
"""Each rank holds one chunk of the way there and one of the way back: the first rank has embedding and head."""


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
    compression: str = "none"
    """How gradients of whole weights are made smaller on their way; 'powersgd': to `compression_rank` columns."""
    compression_rank: int = 4
    offload: bool = False
    """Shares of weights, gradients and states rest in host memory."""
    offload_activations: bool = False
    """What blocks keep for backward waits in host memory."""
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
    def shares_rows(self) -> bool:
        """Whether data ranks share out rows of weights."""
        return self.dp_shard > 1 and self.zero > 0

    @property
    def kept(self) -> float:
        """Share of a layer's activations that stay on the device, the block's input left out."""
        return 0.0 if self.offload_activations else self.recompute.kept

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
