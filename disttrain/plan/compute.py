"""Work of one micro-batch on one rank, counted: matrix products, attention, bytes through memory.

Products are counted as 2 M K N, and the bytes of their operands and result beside them: small products are bound by
memory, so their efficiency falls with 1/M + 1/K + 1/N (an additive roofline, after Williams et al. 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.plan.case import Case

FLASH_BACKWARD = 2.5
"""Backward of attention over its forward: five products for two (Dao et al. 2022, arXiv:2205.14135)."""
ALIGNED = 8
"""Elements of 16 bits that tensor cores want dimensions to be multiples of (NVIDIA, matrix multiplication user's guide)."""
POINTWISE_BACKWARD = 1.6
"""Bytes of the backward of norms, activations, residuals over the forward's."""


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one pass over something."""

    flops: float = 0.0
    """Of matrix products."""
    operand_bytes: float = 0.0
    """Operands and results of those products."""
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    """What norms, activations, residuals, rotations, losses read and write."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.operand_bytes + other.operand_bytes,
            self.attention_flops + other.attention_flops,
            self.memory_bytes + other.memory_bytes,
        )

    def scaled(self, products: float, attention: float, memory: float) -> Work:
        """Each kind times its own factor."""
        return Work(self.flops * products, self.operand_bytes * products, self.attention_flops * attention, self.memory_bytes * memory)


def product(m: float, k: float, n: float, size: float = 2.0) -> Work:
    """[m, k] times [k, n], elements of `size` bytes."""
    return Work(2.0 * m * k * n, size * (m * k + k * n + m * n))


def attention(case: Case) -> Work:
    """Scores and values of one layer: 2 s h n / t for the causal half, or the whole square where scores lie in memory.

    Unfused, they are products; those of heads that are no multiple of `ALIGNED` elements miss the tensor cores and are
    left under attention.
    """
    shape, tp = case.shape, case.layout.tp
    flops = 2.0 * case.length * shape.hidden / tp * case.tokens
    if case.software.kernel != "unfused":
        return Work(attention_flops=flops)
    scores = Work(memory_bytes=10.0 * shape.heads / tp * case.length * case.tokens)
    return scores + (Work(attention_flops=2 * flops) if shape.head_dim % ALIGNED else Work(2 * flops))


def feed_forward(case: Case) -> tuple[Work, float]:
    """(products, width that pointwise work passes over) of one layer; a mean over dense and sparse layers."""
    shape, tp, n, size = case.shape, case.layout.tp, case.tokens, case.numbers.compute
    up = 2 if shape.gated else 1

    def dense(width: float) -> Work:
        return product(n, shape.hidden, up * width / tp, size) + product(n, width / tp, shape.hidden, size)

    if not shape.experts:
        return dense(shape.ffn), shape.ffn
    share = 1 - shape.sparse_share
    local = shape.experts / case.layout.ep
    rows = n * shape.top_k / local  # a balanced router: every expert sees as many tokens
    one = product(rows, shape.hidden, up * shape.ffn / tp, size) + product(rows, shape.ffn / tp, shape.hidden, size)
    sparse = one.scaled(local, 0, 0) + product(n, shape.hidden, shape.experts, size)
    if shape.shared_ffn:
        sparse = sparse + dense(shape.shared_ffn)
    width = share * shape.fed + (1 - share) * (shape.top_k * shape.ffn + shape.shared_ffn)
    if not share:
        return sparse, width
    return sparse.scaled(1 - share, 0, 0) + dense(shape.fed).scaled(share, 0, 0), width


def layer_forward(case: Case) -> Work:
    """Forward of one block."""
    shape, layout, n, size = case.shape, case.layout, case.tokens, case.numbers.compute
    tp = layout.tp
    projections = product(n, shape.hidden, (shape.hidden + 2 * shape.kv_width) / tp, size) + product(
        n, shape.hidden / tp, shape.hidden, size
    )
    fed, width = feed_forward(case)
    norms, turns = (10.0, 6.0) if case.software.fused else (42.0, 16.0)  # passes over the stream, and over queries and keys
    stream = norms * shape.hidden / (tp if layout.sequence_parallel else 1)
    pointwise = stream + turns * (shape.hidden + shape.kv_width) / tp + (6.0 if shape.gated else 5.0) * width / tp
    return projections + fed + attention(case) + Work(memory_bytes=size * n * pointwise)


def layer_backward(case: Case) -> Work:
    """Backward of one block, with what is recomputed in it."""
    forward, again = layer_forward(case), case.layout.recompute
    backward = forward.scaled(2.0, FLASH_BACKWARD, POINTWISE_BACKWARD)
    return backward + forward.scaled(again.gemm, again.attention, again.memory)


def head(case: Case) -> Work:
    """Head and loss of one micro-batch, forward; its backward is twice that. Logits pass through memory about 20 bytes each in all."""
    n, cut = case.tokens, case.shape.vocab / case.layout.tp
    return product(n, case.shape.hidden, cut, case.numbers.compute) + Work(memory_bytes=20.0 / 3 * n * cut)
