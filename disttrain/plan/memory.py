"""Bytes of each kind on each pipeline rank at its fullest.

States follow ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), activations Korthikanti et al. 2022 (arXiv:2205.05198),
counted from what a block keeps for its backward, with grouped queries, gated feed-forwards and fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from disttrain.plan import own, pipeline, tensors
from disttrain.plan.case import Case
from disttrain.plan.closed import layer_share, rank_parameters

GIB = 2.0**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at its fullest, by kind."""

    weights: float
    gradients: float
    """Those that are there then: of a step of one micro-batch they come as activations go."""
    optimizer: float
    activations: float
    """What all layers keep of the micro-batches in flight."""
    head: float
    """Logits, and the head's weight gradient before it is added."""
    workspace: float
    """Gathered weights, gradients before they are scattered, what a recomputed layer holds meanwhile."""

    @property
    def total(self) -> float:
        """All kinds."""
        return float(sum(vars(self).values()))


def layer_bytes(case: Case, is_sparse: bool = False) -> float:
    """What one layer, with experts or without, keeps of one micro-batch.

    Norms' inputs and outputs, q, k, v, attention's output, the feed-forward's widths.
    """
    if case.software.own:
        return own.layer_bytes(case, is_sparse)
    shape, layout, numbers, tp = case.shape, case.layout, case.numbers, case.layout.tp
    size, cut = numbers.compute, (tp if layout.sequence_parallel else 1)
    norms = 2 * shape.hidden * (numbers.stream + size) / cut
    attention = size * (2 * shape.hidden + 2 * shape.kv_width) / tp + 4.0 * shape.heads / tp  # and a float32 log-sum a head
    if case.software.kernel == "unfused":
        attention += 5.0 * shape.heads * case.length / tp
    wide = 3 if shape.gated else 2
    if is_sparse:
        fed = wide * (shape.top_k * shape.ffn + shape.shared_ffn) / tp * size + 2 * shape.top_k * shape.hidden * size + 4.0 * shape.experts
    else:
        fed = wide * shape.fed / tp * size
    return case.tokens * (norms + attention + fed)


def input_bytes(case: Case) -> float:
    """The stream at a block's entry, all that full recomputation keeps."""
    cut = case.layout.tp if case.layout.sequence_parallel else 1
    return case.tokens * case.shape.hidden * case.numbers.stream / cut


def activation_bytes(case: Case, stage: int) -> float:
    """What the layers of pipeline rank `stage` keep of every micro-batch in flight."""
    layout, kept = case.layout, case.layout.kept
    sparse = [case.shape.has_experts(layer) for layer in pipeline.blocks_of(case)[stage]]
    whole = sum(sparse.count(kind) * layer_bytes(case, kind) for kind in set(sparse))
    flying = pipeline.in_flight(layout.schedule, layout.pp, layout.virtual, case.micro_batches, stage)
    return flying * (kept * whole + (1.0 - kept) * len(sparse) * input_bytes(case))


def memory(case: Case, stage: int) -> Memory:
    """Bytes on pipeline rank `stage`."""
    layout, numbers, shape = case.layout, case.numbers, case.shape
    counters = 0.0
    if case.software.own:
        held = tensors.of_rank(case, stage)
        parameters = float(held.total(lambda one: one.size))
        beside = layout.ep > 1  # experts are shared out by ep already
        shared = float(held.total(lambda one: one.size if beside and one.is_expert else one.rows_of(layout.sharing)))
        counters = own.FLOAT * held.total(lambda one: 1) if numbers.state else 0.0  # how often each parameter was updated
        head, workspace = _own_peak(case, stage, shared)
    else:
        parameters = rank_parameters(case, stage)
        experts = pipeline.layers_of(case)[stage] * shape.expert_parameters / (layout.tp * layout.ep)
        shared = (parameters - experts) / layout.sharing + experts / max(1.0, layout.sharing / layout.ep)
        head, workspace = _peak(case, stage, parameters, shared)
    gradients = numbers.gradient * (shared if layout.zero >= 2 else parameters)
    weights = numbers.weight * (shared if layout.zero == 3 else parameters)
    states = numbers.state * (shared if layout.zero >= 1 else parameters) + counters
    if layout.offload:  # shares rest in host memory
        weights, states = 0.0 if layout.zero == 3 else weights, 0.0
        gradients = 0.0 if layout.zero >= 2 else gradients
    if case.software.own:
        each = (activation_bytes(case, stage) + own.rounded_bytes(case, stage)) / max(1.0, own.flying(case, stage))
        gradients = own.gradients_there(case, stage, gradients, each + head)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=activation_bytes(case, stage),
        head=head,
        workspace=workspace,
    )


def _peak(case: Case, stage: int, parameters: float, shared: float) -> tuple[float, float]:
    """(head, workspace) of a program of others."""
    layout, numbers, shape = case.layout, case.numbers, case.shape
    ends = parameters - pipeline.layers_of(case)[stage] * layer_share(case)
    copies = ends + (parameters - ends) * (layout.kept or 1.0 / max(1, pipeline.layers_of(case)[stage]))
    head, workspace = 0.0, numbers.gathered * copies
    if pipeline.holds_head(case, stage):
        vocab = shape.vocab / layout.tp
        head = numbers.logit * case.tokens * vocab + numbers.gradient * vocab * shape.hidden
    if layout.zero == 3 and layout.sharing > 1:  # two layers' weights and one's gradients at a time; the ends' weights all along
        workspace += layer_share(case) * (2 * numbers.wire_weight + numbers.wire_gradient) + ends * numbers.wire_weight
    if layout.kept < 1.0:
        workspace += layer_bytes(case, shape.experts > 0)
    return head, workspace


def _own_peak(case: Case, stage: int, shared: float) -> tuple[float, float]:
    """(head, workspace) of disttrain: the head's and a block's backward come one after the other, so the larger counts."""
    numbers = case.numbers
    held = tensors.of_rank(case, stage)
    head = own.head_bytes(case) if held.last and pipeline.holds_head(case, stage) else 0.0
    at_block = max((_block_backward(case, kind, block) for kind, block in held.kinds.items()), default=0.0)
    gathered = max((_gathered(case, block) for block in held.kinds.values()), default=0.0)
    ends = numbers.weight * _gathered(case, [*held.first, *held.last])
    always = own.rounded_bytes(case, stage) + own.waiting_bytes(case, stage)
    if case.layout.compression == "powersgd" and case.layout.data * case.layout.cp > 1:
        always += numbers.gradient * held.total(partial(_remembered, rank=case.layout.compression_rank))
    if case.layout.shares_rows and case.layout.zero < 3 and not case.layout.offload:  # beside whole weights, the shares
        always += numbers.weight * shared
    larger = ends + max(head + numbers.weight * gathered, at_block)
    return min(head, larger), always + larger - min(head, larger)


def _remembered(one: tensors.Held, rank: int) -> int:
    """Elements that PowerSGD keeps of a parameter from step to step: what it lost, and Q."""
    _, columns = one.low_rank(rank)
    return one.size + columns if columns else 0


def _block_backward(case: Case, is_sparse: bool, block: list[tensors.Held]) -> float:
    """What the backward of a block with experts or without holds; gathered, two blocks' weights and its gradients besides."""
    numbers, kept, gathered = case.numbers, case.layout.kept, _gathered(case, block)
    found = own.layer_backward_bytes(case, is_sparse) + (own.recomputed_bytes(case, is_sparse) if kept < 1.0 else 0.0)
    summed = numbers.gradient * gathered - kept * own.layer_bytes(case, is_sparse)  # by then what the block kept is gone
    return found + 2 * numbers.weight * gathered + max(0.0, summed)


def _gathered(case: Case, unit: list[tensors.Held]) -> int:
    """Elements of a unit that ZeRO-3 makes whole when it computes."""
    if case.layout.zero < 3 or case.layout.dp_shard == 1:
        return 0
    return sum(one.size for one in unit if not (case.layout.ep > 1 and one.is_expert))


def fullest(case: Case) -> tuple[int, Memory]:
    """The pipeline rank that needs most, and its bytes. The first or the last: what lies between has no ends and less in flight."""
    candidates = {stage: memory(case, stage) for stage in sorted({0, case.layout.pp - 1})}
    stage = max(candidates, key=lambda one: candidates[one].total)
    return stage, candidates[stage]
