"""The ledger's closed form: every collective that a rank calls in a step of disttrain's own, by axis and kind, to the byte.

Axes are the ledger's (`parallel.mesh`): `tp`, `cp`, `pp`; `grad` sums gradients of whole weights, `dp_shard` gathers weights
and scatters gradients of shared-out ones, `replicate` sums those over copies of the shards, `ends` a tied embedding over a
pipeline's ends, `world` agrees on the step. Bytes are those of the whole tensor (`network.WIRE` says what a rank sends of them).
The formulas stand in the files of `parallel/`; a dry run, and a run, count the same (tests/plan/test_dry.py, test_measured.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from disttrain.config.schedules import SCHEDULES, holders
from disttrain.plan import pipeline, tensors
from disttrain.plan.case import SPLIT_BACKWARD, V_SHAPED, Case, Layout
from disttrain.plan.tensors import Held

Traffic = dict[str, dict[str, tuple[float, float]]]
"""{axis: {collective: (calls, bytes of the whole tensors)}} of one rank and step."""
VERDICTS = 5
AGREED = 1 + VERDICTS
"""Numbers of the vector that ends a step beside losses and counts: the sum of squares and the verdicts."""


class Book:
    """A ledger that formulas write to."""

    def __init__(self) -> None:
        self.traffic: Traffic = {}

    def add(self, axis: str, kind: str, calls: float, num_bytes: float) -> None:
        """`calls` collectives, of `num_bytes` each in the mean."""
        if calls <= 0:
            return
        before, moved = self.traffic.setdefault(axis, {}).get(kind, (0.0, 0.0))
        self.traffic[axis][kind] = before + calls, moved + calls * num_bytes


def traffic(case: Case, stage: int) -> Traffic:
    """What rank 0 of pipeline rank `stage` calls in one step, evaluations and log points left out."""
    book, layout = Book(), case.layout
    if layout.tp > 1:
        _tensor(book, case, stage)
    if layout.cp > 1:
        _context(book, case, stage)
    if layout.ep > 1 and case.shape.experts:
        _experts(book, case, stage)
    if layout.pp > 1:
        _stages(book, case, stage)
    _data(book, case, stage)
    terms = 1 + case.shape.balanced
    apart = layout.sync_every > 1
    if (layout.tp if apart else layout.world) > 1:  # local SGD: each replica agrees with itself
        num_bytes = 8 * (terms * case.micro_batches + AGREED + terms)
        book.add("tp" if apart else "world", "all_reduce", 1, num_bytes)
    return book.traffic


def _blocks(case: Case, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of a rank, and those of them that run forward a second time."""
    layers, again = pipeline.blocks_of(case)[stage], case.layout.recompute
    return layers, layers[:: round(1 / (again.gemm or 1.0))] if again.gemm or again.memory else ()


def _sparse(case: Case, stage: int) -> tuple[int, int]:
    """How many of each of `_blocks` have experts."""
    layers, again = (sum(map(case.shape.has_experts, blocks)) for blocks in _blocks(case, stage))
    return layers, again


def _tensor(book: Book, case: Case, stage: int) -> None:
    """Two exchanges a block each way (Megatron-LM; Korthikanti et al. 2022), one at either end, and the loss's numbers."""
    shape, layout, m = case.shape, case.layout, case.micro_batches
    layers, again = map(len, _blocks(case, stage))
    sparse, sparse_again = _sparse(case, stage)
    stream, products = (size * case.tokens * shape.hidden for size in (case.numbers.stream, case.numbers.compute))
    is_first, is_last = stage == 0, pipeline.holds_head(case, stage)
    sums = 2 if layout.recompute.gemm else 1  # under selective recomputation a block's last one is not needed again
    exchanges = 4 * layers - 2 * sparse + sums * again - (sums - 1) * sparse_again + is_last
    if not layout.sequence_parallel:
        book.add("tp", "all_reduce", m * is_first, stream)
        book.add("tp", "all_reduce", m * exchanges, products)
    else:
        gathers_again = 0 if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD else 1  # else what was gathered is kept
        book.add("tp", "reduce_scatter", m * is_first, stream)
        book.add("tp", "all_gather", m * is_first, stream)
        book.add("tp", "reduce_scatter", m * exchanges, products)
        gathers = (2 + gathers_again) * (2 * layers - sparse) + 2 * again - sparse_again
        gathers += is_last * (1 + (gathers_again if not layout.loss_chunk else 0))
        book.add("tp", "all_gather", m * gathers, products)
        book.add("tp", "all_gather", m * (2 * sparse + sparse_again), stream)  # into a mixture, and its gradients
        ranks = layout.dp_shard if layout.zero else 1
        parts = sum(one.rows_of(ranks) for one in tensors.of_rank(case, stage).all if one.in_parts)
        book.add("tp", "all_reduce", 1, case.numbers.gradient * parts)
    if sparse:  # rows of the chosen experts: results, gradients; and of those that all share
        book.add("tp", "all_reduce", m * (sparse + sparse_again), shape.top_k * products)
        book.add("tp", "all_reduce", m * sparse, shape.top_k * stream)
        if shape.shared_ffn:
            book.add("tp", "all_reduce", m * (2 * sparse + (sums - 1) * sparse_again), products)
    wide = max(4.0, case.numbers.compute) * case.tokens
    book.add("tp", "all_reduce", m * is_last, wide)
    book.add("tp", "all_reduce", m * is_last, 2 * wide)


def _context(book: Book, case: Case, stage: int) -> None:
    """Keys and values: gathered, and their gradients scattered; or sent round, gradients behind them. Choices of experts, counted."""
    layout, m = case.layout, case.micro_batches
    book.add("cp", "all_reduce", m * sum(_sparse(case, stage)), max(4.0, case.numbers.compute) * layout.micro_batch * case.shape.experts)
    layers, again = map(len, _blocks(case, stage))
    own = 2 * case.numbers.compute * case.tokens * case.shape.kv_width / layout.tp
    if layout.attention == "ring":
        book.add("cp", "shift", m * (layout.cp - 1) * (2 * layers + again), own)
        book.add("cp", "shift", m * (layout.cp - 1) * layers, own * max(4.0, case.numbers.compute) / case.numbers.compute)  # gradients
        return
    book.add("cp", "all_gather", m * (layers + again), layout.cp * own)
    book.add("cp", "reduce_scatter", m * layers, layout.cp * own)


def _experts(book: Book, case: Case, stage: int) -> None:
    """Rows to whoever holds their expert and back, both ways, as many as an even router sends; and how many they are."""
    shape, m = case.shape, case.micro_batches
    layers, again = _sparse(case, stage)
    rows = case.tokens * shape.hidden * shape.top_k
    for size in (case.numbers.stream, case.numbers.compute):  # there, and back
        book.add("ep", "all_to_all", m * (2 * layers + again), size * rows)
    book.add("ep", "all_to_all", m * (layers + again), 8.0 * shape.experts)


def _stages(book: Book, case: Case, stage: int) -> None:
    """The stream forward and its gradient back, over each border between two ranks; a tied table's gradient once."""
    shape, layout, m = case.shape, case.layout, case.micro_batches
    chunks = 2 if layout.schedule in V_SHAPED else layout.virtual
    where = holders(layout.schedule, layout.pp, layout.pp * chunks) if layout.schedule in SCHEDULES else tuple(range(layout.pp))
    borders = [(here, there) for here, there in pairwise(where) if here != there]
    leaving, coming = sum(here == stage for here, _ in borders), sum(there == stage for _, there in borders)
    cut = layout.tp if (layout.sequence_parallel or case.software.scattered) else 1
    stream = case.numbers.stream * case.tokens * shape.hidden / cut
    book.add("pp", "send", m * (leaving + coming), stream)
    book.add("pp", "receive", m * (leaving + coming), stream)
    if shape.tied and layout.schedule not in V_SHAPED and (stage == 0 or pipeline.holds_head(case, stage)):
        table = tensors.first(case)[0]
        book.add("ends", "all_reduce", 1, case.numbers.gradient * table.rows_of(layout.dp_shard if layout.zero else 1))


def _data(book: Book, case: Case, stage: int) -> None:
    """Gradients over ranks that see different samples, and weights where those share them out (`parallel/data.py`, `shard.py`)."""
    layout, numbers = case.layout, case.numbers
    held = tensors.of_rank(case, stage)
    if layout.sync_every > 1:
        book.add("dp_replicate", "all_reduce", 1 / layout.sync_every, numbers.gradient * sum(one.size for one in held.all))
        book.add("dp_replicate", "all_reduce", 1 / layout.sync_every, 8.0 * VERDICTS)
        return
    beside = layout.ep > 1  # experts are another axis'
    shares = layout.dp_shard > 1 and layout.zero > 0
    whole = [] if shares else [one for one in held.all if not (beside and one.is_expert)]
    experts = [one for one in held.all if beside and one.is_expert]
    for axis, ranks, summed in (
        ("grad", layout.data * layout.cp, whole),
        ("grad_beside_ep", layout.data * layout.cp // layout.ep, experts),
    ):
        if ranks > 1:
            for bucket in tensors.buckets(summed, numbers.gradient, layout.bucket_size):
                for elements in sums_of(bucket, layout):
                    book.add(axis, "all_reduce", 1, numbers.wire_gradient * elements)
    if shares:
        units = [[one for one in unit if not (beside and one.is_expert)] for unit in held.units]
        _shards(book, case, [sum(one.padded(layout.dp_shard) for one in unit) for unit in units])


def sums_of(bucket: Sequence[Held], layout: Layout) -> list[int]:
    """Elements of each sum that a bucket takes: one of all; by PowerSGD one of every P and what stays whole, and one of every Q."""
    if layout.compression != "powersgd":
        return [sum(one.size for one in bucket)]
    low = [one.low_rank(layout.compression_rank) for one in bucket]
    first = sum(p or one.size for one, (p, _) in zip(bucket, low, strict=True))
    return [first, *([second] if (second := sum(q for _, q in low)) else [])]


def _shards(book: Book, case: Case, sizes: list[int]) -> None:
    """What units of so many elements, the root's last, say over the axis that shares them out, and over its copies."""
    layout, numbers, m = case.layout, case.numbers, case.micro_batches
    *blocks, root = sizes
    roots = 1 if root else 0
    each, count = sum(sizes), len(blocks) + roots
    if layout.zero == 3:
        twice = 2 if layout.reshard else 1
        book.add("dp_shard", "all_gather", m * twice * len(blocks), numbers.wire_weight * sum(blocks) / max(1, len(blocks)))
        book.add("dp_shard", "all_gather", m * roots, numbers.wire_weight * root)
    else:
        book.add("dp_shard", "all_gather", count, numbers.wire_weight * each / count)
    scatters = m if layout.zero >= 2 else 1
    book.add("dp_shard", "reduce_scatter", scatters * count, numbers.gradient * each / count)
    if layout.dp_replicate * layout.cp > 1:
        book.add("replicate", "all_reduce", count, numbers.gradient * each / layout.dp_shard / count)


def totals(found: Traffic) -> Mapping[tuple[str, str], tuple[float, float]]:
    """One flat table: {(axis, collective): (calls, bytes)}."""
    return {(axis, kind): entry for axis, kinds in found.items() for kind, entry in kinds.items()}
