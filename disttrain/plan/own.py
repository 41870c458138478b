"""What a rank of disttrain's own holds at its fullest, tensor by tensor, as torch runs it operator by operator.

A program of others is reckoned by the papers' counts (`memory.py`); of this one every tensor is known, and a dry run counts the
same (tests/plan/test_dry.py says where not to the byte). Per token n, with `w` bytes of the stream and `c` of the products:
"""

from __future__ import annotations

from disttrain.plan import pipeline, tensors
from disttrain.plan.case import V_SHAPED, Case

FLOAT = 4.0
"""Bytes of what is kept in float32 whatever computes: statistics of norms, log-sums of attention, angles of rotary positions."""


def norm_bytes(case: Case, readers: int) -> float:
    """A norm: its input, the normalised input where it runs in steps (RMSNorm), its output once for each product that reads it, statistics.

    Autocast rounds an output anew for every product of its own; one merged matrix, or the tensor axis, takes it once.
    """
    shape, numbers = case.shape, case.numbers
    outputs = readers if numbers.compute != numbers.stream and case.layout.tp == 1 and not shape.merged else 1
    inside = numbers.stream if shape.rms else 0.0
    statistics = FLOAT if shape.rms else 2 * FLOAT
    cut = case.layout.tp if case.layout.sequence_parallel else 1
    return case.tokens * (shape.hidden * (numbers.stream + inside + outputs * numbers.compute) + statistics) / cut


def attention_bytes(case: Case) -> float:
    """Queries, keys, values, the output, a log-sum a head; the output once more where heads lie apart; under cp whole keys and values."""
    shape, layout, c, tp = case.shape, case.layout, case.numbers.compute, case.layout.tp
    rotates, gathers = shape.positions == 0, layout.cp > 1
    own = shape.hidden + 2 * shape.kv_width
    kept = own if not gathers else shape.hidden + 2 * shape.kv_width * layout.cp
    if shape.merged:  # one matrix's result stays while a part of it is needed
        kept += (shape.hidden + shape.kv_width if rotates else 0) if not gathers else (0 if rotates else 2 * shape.kv_width)
    kept += shape.hidden * (2 if rotates or gathers else 1)
    length = case.length / layout.cp
    angles = FLOAT * length * shape.head_dim if rotates else 0.0
    masks = c * (length / 2) ** 2 * (2 * layout.cp + 1) if gathers else 0.0
    return case.tokens * (c * kept + FLOAT * shape.heads) / tp + angles + masks


def feed_forward_bytes(case: Case, is_sparse: bool) -> float:
    """Every product's result, and what the activation makes of it: gate, silu(gate), up, their product; or up and gelu(up)."""
    shape, c = case.shape, case.numbers.compute
    widths = 4 if shape.gated else 2
    if not is_sparse:
        return case.tokens * widths * shape.fed / case.layout.tp * c
    fed = widths * (shape.top_k * shape.ffn + shape.shared_ffn) / case.layout.tp * c
    return case.tokens * (fed + 2 * shape.top_k * shape.hidden * c + 4.0 * shape.experts)


def layer_bytes(case: Case, is_sparse: bool) -> float:
    """What one layer, with experts or without, keeps of one micro-batch."""
    norms = norm_bytes(case, 3) + norm_bytes(case, 2 if case.shape.gated else 1)
    return norms + attention_bytes(case) + feed_forward_bytes(case, is_sparse)


def layer_backward_bytes(case: Case, is_sparse: bool) -> float:
    """Gradients under way in one layer at the widest place, the activation of its feed-forward, and of the stream."""
    shape, layout = case.shape, case.layout
    cut = layout.tp if layout.sequence_parallel else 1
    wide = 2.0 * (shape.ffn * shape.top_k if is_sparse else shape.fed) / layout.tp * case.numbers.compute
    return case.tokens * (wide + 2 * shape.hidden * case.numbers.stream / cut)


def recomputed_bytes(case: Case, is_sparse: bool) -> float:
    """A layer computed again, of which nothing is let go until its backward has begun: its largest matrix has a gradient by then."""
    cut = case.layout.tp if case.layout.sequence_parallel else 1
    largest = max(one.size for one in tensors.block(case, is_sparse))
    return layer_bytes(case, is_sparse) + case.numbers.gradient * largest + 2 * case.tokens * case.shape.hidden * case.numbers.stream / cut


def head_bytes(case: Case) -> float:
    """The last norm, and of the logits what is there at once: with the loss, or with the gradient of the head's matrix."""
    shape, layout, numbers, n = case.shape, case.layout, case.numbers, case.tokens
    vocab, wide = shape.vocab / layout.tp, max(FLOAT, numbers.compute)
    half = numbers.compute < FLOAT
    with_loss = 3 * wide if layout.tp == 1 else 2 * wide + (numbers.compute if half else 0.0)
    stream = numbers.compute * n * shape.hidden * ((3 + 1 / layout.tp) if layout.sequence_parallel else 1.0)
    of_matrix = (numbers.compute * n + (numbers.compute + (numbers.gradient if half else 0.0)) * shape.hidden) * vocab + stream
    if layout.loss_chunk:
        return norm_bytes(case, 1) + of_matrix - numbers.compute * n * vocab
    return norm_bytes(case, 1) + max(with_loss * n * vocab, of_matrix)


def flying(case: Case, stage: int) -> float:
    """Micro-batches in flight on a rank at its fullest."""
    layout = case.layout
    return pipeline.in_flight(layout.schedule, layout.pp, layout.virtual, case.micro_batches, stage)


def rounded_bytes(case: Case, stage: int) -> float:
    """Matrices rounded for products (autocast), anew for each micro-batch in flight; under recomputation of the block that runs."""
    layout, held = case.layout, tensors.of_rank(case, stage)
    matrices = {kind: sum(one.size for one in block if len(one.shape) > 1) for kind, block in held.kinds.items()}
    in_blocks = sum(held.sparse.count(kind) * size for kind, size in matrices.items())
    head = case.shape.head_parameters / layout.tp if held.last else 0.0
    kept = layout.kept
    rounded = flying(case, stage) * kept * in_blocks + (1.0 - kept) * max(matrices.values(), default=0)
    return case.numbers.gathered * (rounded + head)


def waiting_bytes(case: Case, stage: int) -> float:
    """Tokens and targets of the whole step; a pipeline's buffer for every micro-batch and border, less what of them is an input in use."""
    layout, m = case.layout, case.micro_batches
    tokens = 2 * 8.0 * layout.micro_batch * case.length * m * (1.0 + (1.0 / layout.cp if layout.cp > 1 else 0.0))
    if layout.pp == 1:
        return tokens
    chunks = 2 if layout.schedule in V_SHAPED else layout.virtual
    cut = layout.tp if layout.sequence_parallel else 1
    stream = case.tokens * case.shape.hidden * case.numbers.stream / cut
    borders = 2 * chunks - (stage == 0) - pipeline.holds_head(case, stage)
    return tokens + stream * (m * borders - flying(case, stage) * (stage > 0))


def gradients_there(case: Case, stage: int, gradients: float, freed: float) -> float:
    """Of `gradients`, what is there at the fullest moment. `freed`: bytes that one micro-batch's backward lets go.

    All, where a forward follows the first backward, or buckets hold them from the start. Else they come while activations go.
    """
    layout = case.layout
    shares = layout.dp_shard > 1 and layout.zero > 0
    in_buckets = not shares and layout.sync_every == 1 and layout.data * layout.cp > 1
    if in_buckets or case.micro_batches > flying(case, stage):
        return gradients
    return max(0.0, gradients - freed)
