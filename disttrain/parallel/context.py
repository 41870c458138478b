"""Context parallelism: the sequence is cut over the axis `cp`, attention stays exact.

What is cut: inputs, targets and every activation along tokens, t into t/cp; weights are whole. A step's samples are
the same on all ranks of the axis; each sample's valid targets are counted whole, and loss sums add up over ranks.
The sequence is cut into 2 cp chunks of c tokens, of which rank i holds chunk i and chunk 2cp-1-i (head and tail;
Llama 3, arXiv:2407.21783, section 3.3.2; "zigzag"): under a causal mask chunk j attends to j + 1 chunks, so each rank
does (i+1) + (2cp-i) = 2cp+1 chunks' work. With contiguous parts the last rank would do nearly twice the mean.

What moves, only inside attention, once a layer, and only keys and values, so grouped queries pay for their few
key-value heads. With S = 2 b (t/cp) g e elements of a rank's own keys and values:
  gather   keys and values of all ranks come at once; backward sends their gradients home: an all-gather and a
           reduce-scatter of cp S, of each (cp-1) S on a rank's wire. Memory: keys and values of the whole sequence.
  ring     they travel from rank to rank while each computes with what it has (`ring.py`; Ring Attention,
           arXiv:2310.01889): (cp-1) S forward, twice that backward. Memory: two ranks' keys and values.
Gathering moves less and computes in few large kernels: it is the default, as in Llama 3. The ring is for sequences
whose gathered keys and values do not fit. Weights' gradients are summed over the view `grad` (data axes x cp).

Positions (rotary, learned) and the mask are those of the whole sequence. Dropout: each rank of the axis draws its
own masks, for its own tokens.

Shape suffixes: b samples, t tokens (of this rank), c tokens of a chunk, h query heads, g key-value heads, e size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.config.sequence import tokens_multiple_of
from disttrain.errors import ConfigError
from disttrain.models.task import Task
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.pairs import gather_reduce_scatter
from disttrain.parallel.plan import match_plan
from disttrain.parallel.ring import ring_attention
from disttrain.parallel.step import Batch, Step, map_tensors
from disttrain.parallel.tensor import SEQUENCE_DIM

MIXES_TOKENS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.modules.batchnorm._BatchNorm)
"""Modules that would see a rank's tokens only, and know nothing of the others'."""


@dataclass(frozen=True)
class HeadTail:
    """Which tokens of a sequence this rank holds: chunk i and chunk 2n-1-i of 2n, n the ranks of `axis`."""

    axis: Axis
    unit: int
    """What the number of tokens must be a multiple of."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions in the whole sequence [t] of this rank's `length` tokens."""
        chunk, n, i = length // 2, self.axis.size, self.axis.index
        offsets = torch.arange(chunk, device=device)
        return torch.cat([offsets + i * chunk, offsets + (2 * n - 1 - i) * chunk])

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole x [b, t, ...]; ConfigError where there are none to cut, or they do not divide."""
        n, i = self.axis.size, self.axis.index
        if n == 1:
            return x
        if x.dim() <= SEQUENCE_DIM:
            raise ConfigError(
                f"context parallel cuts [batch, tokens, ...], but the batch holds a tensor of shape {tuple(x.shape)}, which has no tokens",
                "strategy=ddp",
            )
        if x.shape[SEQUENCE_DIM] % self.unit:
            tokens = x.shape[SEQUENCE_DIM]
            raise ConfigError(
                f"context parallel: {tokens} tokens are not divisible by {self.unit}, as strategy.cp={n} needs",
                f"dataset.context={max(1, round(tokens / self.unit)) * self.unit}",
            )
        chunks = x.chunk(2 * n, SEQUENCE_DIM)
        return torch.cat([chunks[i], chunks[-1 - i]], SEQUENCE_DIM)

    def whole(self, x: Tensor) -> Tensor:
        """Every rank's x [b, t, ...] as one sequence in its order, on each rank. No gradient passes."""
        if self.axis.size == 1:
            return x
        chunks = collectives.all_gather(x, self.axis, SEQUENCE_DIM).chunk(2 * self.axis.size, SEQUENCE_DIM)
        return torch.cat([*chunks[::2], *chunks[1::2][::-1]], SEQUENCE_DIM)

    def cut(self, step: Step) -> Step:
        """The step with this rank's tokens of every micro-batch. Its counts stay those of whole sequences."""
        return step if self.axis.size == 1 else replace(step, micro=[self._cut(batch) for batch in step.micro])

    def _cut(self, batch: Batch) -> Batch:
        return replace(batch, inputs=map_tensors(self.part, batch.inputs), targets=map_tensors(self.part, batch.targets))


def head_tail(axis: Axis, tokens_cut_by_tp: int) -> HeadTail:
    """How `cp` cuts sequences of which `tp` cuts each rank's tokens once more under sequence parallelism."""
    return HeadTail(axis, tokens_multiple_of(axis.size, tokens_cut_by_tp))


# --- attention ---------------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]
"""(q [b, h, t, e], k and v [b, g, t, e] of this rank's tokens, causal, dropout rate) to [b, h, t, e]."""


def gathered_attention(axis: Axis) -> Attend:
    """Attention of this rank's queries to every rank's keys and values, which come in one all-gather.

    Causal: the head chunk sees the sequence up to its own end, so does the tail chunk. Two calls, whose masks are
    plain triangles at the lower right, which fused kernels know: nothing masked is computed but half a chunk, and no
    mask is kept. One call with a mask [t, cp t] would compute all of it, without flash attention on CUDA.
    """

    def attend(q_bhte: Tensor, k_bgte: Tensor, v_bgte: Tensor, causal: bool, dropout: float) -> Tensor:
        kv = gather_reduce_scatter(torch.stack([k_bgte, v_bgte])[None], axis, 0)  # [cp, 2, b, g, t, e]
        heads, tails = kv.chunk(2, dim=4)
        k_bgse, v_bgse = torch.cat([heads, tails.flip(0)]).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        if not causal:
            return _sdpa(q_bhte, k_bgse, v_bgse, None, dropout)
        chunk, last = q_bhte.shape[2] // 2, 2 * axis.size - 1
        ys = []
        for q_bhce, j in zip(q_bhte.chunk(2, dim=2), (axis.index, last - axis.index), strict=True):
            seen = (j + 1) * chunk
            ys.append(_sdpa(q_bhce, k_bgse[:, :, :seen], v_bgse[:, :, :seen], _lower_right(chunk, seen, q_bhce.device), dropout))
        return torch.cat(ys, dim=2)

    return attend


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1])


def _lower_right(rows: int, columns: int, device: torch.device) -> Tensor:
    """The mask of the last `rows` of `columns` tokens: on CUDA torch's name for it, by which kernels need no mask in memory."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(rows, columns)
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


ATTENTION: Mapping[str, Callable[[Axis], Attend]] = {"gather": gathered_attention, "ring": ring_attention}
"""Choices of `strategy.attention`."""


class ContextCore(nn.Module):
    """A module of style `heads`, told where its tokens stand and how to attend to the others'."""

    def __init__(self, module: nn.Module, context: HeadTail, attend: Attend) -> None:
        super().__init__()
        self.module = module
        self.context = context
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, t, h e], k and v [b, t, g e] of this rank's tokens to [b, t, h e]."""
        y: Tensor = self.module(q, k, v, positions=self.context.positions(q.shape[SEQUENCE_DIM], q.device), attend=self.attend)
        return y


# --- the plan ------------------------------------------------------------------------------------------------------------


def apply_context_plan(model: nn.Module, task: Task, plan: Mapping[str, str], context: HeadTail, attention: str) -> None:
    """Give the modules of styles `heads` and `position_embedding` their global positions, after the tensor plan.

    ConfigError for a model or a task that does not work token by token around them.
    """
    styles = match_plan(model, plan)
    _must_be_by_token(task)
    _must_state_where_tokens_meet(model, styles)
    attend = ATTENTION[attention](context.axis)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == "heads":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ContextCore(module, context, attend))
        elif style == "whole_sequence":
            _count_together(name, module, context.axis)
        elif style == "position_embedding":  # a hook and no wrapper, so that its parameter keeps its name

            def globally(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
                (local,) = inputs
                return context.positions(local.shape[-1], local.device)[local]

            module.register_forward_pre_hook(globally)


def _count_together(name: str, module: nn.Module, axis: Axis) -> None:
    """Let a module that counts over whole sequences add what the other ranks of the axis have counted. ConfigError if it can't."""
    reason = None
    if not hasattr(module, "over_sequence"):
        reason = f"is a {type(module).__name__} without `over_sequence`, as disttrain.models.experts.MixtureOfExperts has it"
    elif getattr(getattr(module, "shape", None), "capacity_factor", None) is not None:
        reason = "gives a capacity to the first tokens of each sequence (model.experts.capacity_factor), which lie on other ranks"
    if reason is not None:
        raise ConfigError(f"context parallel: '{name}' (style whole_sequence) {reason}", "strategy.cp=1")
    module.over_sequence = _Together(axis)  # type: ignore[assignment]


class _Together:
    """Sums what each rank of the axis has counted of its tokens; no gradient."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, counted: Tensor) -> Tensor:
        return collectives.all_reduce(counted.detach(), self.axis)


def _must_be_by_token(task: Task) -> None:
    """Whoever writes `losses` says beside it whether a part of the sequence has a part of the sums."""
    owner = next((kind for kind in type(task).__mro__ if "losses" in vars(kind)), type(task))
    if not vars(owner).get("by_token", False):
        raise ConfigError(
            f"context parallel adds up each rank's losses of its own tokens, and {owner.__name__}.losses may need whole sequences; "
            "if it is a sum over tokens, set by_token = True in that class",
            "strategy=ddp",
        )


def _must_state_where_tokens_meet(model: nn.Module, styles: Mapping[str, str]) -> None:
    cores = [name for name, style in styles.items() if style == "heads"]
    kind = type(model).__name__
    if not cores:
        reason = f"the plan of {kind} names no attention (style heads), where tokens of different ranks would meet"
        raise ConfigError(f"context parallel: {reason}", "strategy=ddp, or 'strategy.plan={<name of the module on q, k, v>: heads}'")
    for name in cores:
        module = model.get_submodule(name)
        takes = inspect.signature(_innermost(module).forward).parameters
        if not {"positions", "attend"} <= takes.keys():
            raise ConfigError(
                f"context parallel: '{name}' (style heads) is a {type(_innermost(module)).__name__}, whose forward takes no `positions` "
                "and `attend` as disttrain.models.transformer.Core's does",
                "strategy=ddp",
            )
    for name, module in model.named_modules():
        if isinstance(module, MIXES_TOKENS):
            raise ConfigError(
                f"context parallel: '{name}' is a {type(module).__name__} and would see one rank's tokens only", "strategy=ddp"
            )
        if isinstance(module, nn.Embedding) and name not in styles:
            raise ConfigError(
                f"context parallel: the plan does not say whether '{name}', an Embedding, is of positions",
                f"'strategy.plan={{{name}: position_embedding}}' or vocab_embedding",
            )


def _innermost(module: nn.Module) -> nn.Module:
    """The module inside the tensor plan's wrapper, which passes on what it is given."""
    inner = getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) else module
