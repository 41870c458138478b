"""The parameters of a decoder one by one, as a rank of the tensor axis holds them: what padding, buckets and units depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from disttrain.plan import pipeline
from disttrain.plan.case import Case

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter on a rank, before the data axes cut it."""

    shape: tuple[int, ...]
    in_parts: bool = False
    """Under sequence parallelism its gradient is a sum over the tensor axis: it works on a part of the tokens."""
    is_expert: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def rows_of(self, ranks: int, index: int = 0) -> int:
        """Elements that rank `index` of `ranks` holds of its rows: a ceil(n-th) while there are any."""
        each = -(-self.shape[0] // ranks)
        return max(0, min(each, self.shape[0] - index * each)) * math.prod(self.shape[1:])

    def low_rank(self, rank: int) -> tuple[int, int]:
        """Elements of P and of Q, by which PowerSGD approximates a matrix; none where it would not shrink (`parallel/compress.py`)."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        columns = self.size // rows if len(self.shape) > 1 else 1
        return (rank * rows, rank * columns) if rank * (rows + columns) < rows * columns else (0, 0)

    def padded(self, ranks: int) -> int:
        """Elements, rows filled up to a multiple of `ranks`."""
        return -(-self.shape[0] // ranks) * ranks * math.prod(self.shape[1:])


def first(case: Case) -> list[Held]:
    """Tables of tokens and positions."""
    shape = case.shape
    found = [Held((shape.vocab // case.layout.tp, shape.hidden))]
    return found + ([Held((shape.positions, shape.hidden), in_parts=True)] if shape.positions else [])


def last(case: Case) -> list[Held]:
    """The last norm, and a head of its own."""
    shape = case.shape
    return _norm(case) + ([] if shape.tied else [Held((shape.vocab // case.layout.tp, shape.hidden))])


def block(case: Case, is_sparse: bool) -> list[Held]:
    """One block, with experts or without, in the order in which a model names its parameters."""
    shape, tp = case.shape, case.layout.tp
    qkv = (shape.hidden // tp, shape.kv_width // tp, shape.kv_width // tp)
    attention = _columns(case, qkv) + _row(case, shape.hidden // tp)
    return _norm(case) + attention + _norm(case) + (_experts(case) if is_sparse else _feed_forward(case, shape.fed))


@dataclass(frozen=True)
class OfRank:
    """What one pipeline rank holds, in the order of the model."""

    first: list[Held]
    sparse: list[bool]
    """Of each block, whether it has experts."""
    kinds: Mapping[bool, list[Held]]
    """One block of each kind that there is: with experts and without."""
    last: list[Held]

    @property
    def blocks(self) -> list[list[Held]]:
        """Each block."""
        return [self.kinds[is_sparse] for is_sparse in self.sparse]

    @property
    def all(self) -> list[Held]:
        """Every parameter."""
        return [*self.first, *(one for block in self.blocks for one in block), *self.last]

    def total(self, of: Callable[[Held], int]) -> int:
        """`of` summed over every parameter; one block of each kind is asked: a search does so thousands of times."""
        in_blocks = sum(self.sparse.count(is_sparse) * sum(map(of, block)) for is_sparse, block in self.kinds.items())
        return sum(map(of, (*self.first, *self.last))) + in_blocks

    @property
    def units(self) -> list[list[Held]]:
        """What travels as one buffer where weights are shared out: each block, and behind them all that is in none."""
        return [*self.blocks, [*self.first, *self.last]]


def of_rank(case: Case, stage: int) -> OfRank:
    """What pipeline rank `stage` holds."""
    is_last = pipeline.holds_head(case, stage)
    table = first(case) if stage == 0 else first(case)[:1] if is_last and case.shape.tied else []
    sparse = [case.shape.has_experts(layer) for layer in pipeline.blocks_of(case)[stage]]
    return OfRank(table, sparse, {kind: block(case, kind) for kind in sorted(set(sparse))}, last(case) if is_last else [])


def sent_share(case: Case) -> float:
    """Elements of the gradients' sums over those of the gradients, on the first rank."""
    if case.layout.compression != "powersgd":
        return 1.0
    held = of_rank(case, 0)
    return held.total(lambda one: sum(one.low_rank(case.layout.compression_rank)) or one.size) / held.total(lambda one: one.size)


def buckets(parameters: Sequence[Held], num_bytes: float, bucket_size: float) -> list[list[Held]]:
    """Buckets of `bucket_size` MiB that gradients of `num_bytes` an element travel in: as `parallel.data` groups them, from the last on."""
    found: list[list[Held]] = []
    room = 0.0
    for one in reversed(parameters):
        if one.size * num_bytes > room:
            found.append([])
            room = min(MEBIBYTE, bucket_size * MEBIBYTE) if len(found) == 1 else bucket_size * MEBIBYTE
        found[-1].append(one)
        room -= one.size * num_bytes
    return found


def _norm(case: Case) -> list[Held]:
    weight = Held((case.shape.hidden,), in_parts=True)
    return [weight, weight] if case.shape.norm_bias else [weight]


def _columns(case: Case, widths: tuple[int, ...]) -> list[Held]:
    """Projections of one input: merged, one matrix; each with its bias."""
    found = []
    for width in (sum(widths),) if case.shape.merged else widths:
        found += [Held((width, case.shape.hidden)), *([Held((width,))] if case.shape.bias else [])]
    return found


def _row(case: Case, width: int) -> list[Held]:
    """A map back to the residual stream, its bias whole."""
    bias = [Held((case.shape.hidden,), in_parts=True)] if case.shape.bias else []
    return [Held((case.shape.hidden, width)), *bias]


def _feed_forward(case: Case, width: int) -> list[Held]:
    cut = width // case.layout.tp
    return _columns(case, (cut, cut) if case.shape.gated else (cut,)) + _row(case, cut)


def _experts(case: Case) -> list[Held]:
    shape, layout = case.shape, case.layout
    count, width = shape.experts // layout.ep, shape.ffn // layout.tp
    up = Held((count, (2 if shape.gated else 1) * width, shape.hidden), is_expert=True)
    down = Held((count, shape.hidden, width), is_expert=True)
    shared = [replace(one, in_parts=False) for one in _feed_forward(case, shape.shared_ffn)] if shape.shared_ffn else []
    return [Held((shape.experts, shape.hidden)), up, down, *shared]
