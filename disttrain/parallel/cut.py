"""A model's plan, applied on every axis: `tp` cuts modules, `cp` tells some where their tokens stand, `ep` shares out experts.

In this order: what a rank computes with its experts, it computes together with its tensor group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from disttrain.models.task import IGNORED, Classification, Task
from disttrain.parallel.chunked import ChunkedHead, chunk_loss
from disttrain.parallel.context import HeadTail, apply_context_plan
from disttrain.parallel.experts import share_experts
from disttrain.parallel.layout import Placement
from disttrain.parallel.mesh import Axis
from disttrain.parallel.options import Options
from disttrain.parallel.plan import apply_tensor_plan, match_plan, vocabulary_stays_cut
from disttrain.parallel.random import Streams
from disttrain.parallel.vocabulary import vocab_cross_entropy


@dataclass(frozen=True)
class Cuts:
    """What applying a plan has done."""

    placements: dict[str, Placement]
    """On `tp`, of parameters that are not Copy there."""
    vocabulary: bool
    """Whether outputs stay cut by vocabulary."""
    experts: set[str]
    """Parameters that are cut by expert over `ep`."""
    head: ChunkedHead | None
    """What can put off its logits, where the loss is computed in chunks."""


def cut_modules(model: nn.Module, task: Task, options: Options, tp: Axis, context: HeadTail, ep: Axis, streams: Streams) -> Cuts:
    """Apply the config's patterns over the model's own; model and task are changed."""
    plan = dict(getattr(model, "plan", {})) | dict(options.plan)
    placements: dict[str, Placement] = {}
    vocabulary_is_cut = False
    if tp.size > 1:
        own_loss = getattr(type(task), "losses", None)
        plan, vocabulary_is_cut = vocabulary_stays_cut(model, plan, own_loss is Classification.losses)
        if vocabulary_is_cut:
            task.row_loss = vocab_cross_entropy(tp, IGNORED)  # type: ignore[attr-defined]
        placements = apply_tensor_plan(model, plan, tp, options.sequence_parallel, streams)
    with_experts = [name for name, style in match_plan(model, plan).items() if style == "experts"]
    if context.axis.size > 1:
        apply_context_plan(model, task, plan, context, options.attention)
    shared = share_experts(model, with_experts, ep) if ep.size > 1 else set()
    head = None if options.loss_chunk is None else chunk_loss(model, task, plan, tp, options.loss_chunk)
    return Cuts(placements, vocabulary_is_cut, shared, head)
