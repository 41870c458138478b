"""Tensor parallelism: each layer's matrices are shared out over the axis `tp` (Megatron-LM, arXiv:1909.08053).

What is cut: the first matrix of a pair by output features (column), the second by input features (row), the
embedding and the head by vocabulary. What each rank holds: 1/tp of those, whole norms. What moves: with x the
input of a block half, [b, t, d], one all-reduce of b*t*d forward (after the row matrix) and one backward (of
the column matrices' input gradient), so four a block, each 2(n-1)/n of b*t*d elements on the wire. With
sequence parallelism (arXiv:2205.05198) activations between the pairs are cut along t, and each all-reduce is
an all-gather and a reduce-scatter: the same bytes, 1/tp of the memory of norms and residuals.

The conjugate pairs, named for what they do forward and backward:

    copy -> reduce            enters a column matrix           reduce -> copy            leaves a row matrix
    gather -> reduce_scatter  the same, sequence parallel      reduce_scatter -> gather  the same

A model holds none of this: it states `plan`, {module name pattern: style}, and `apply_tensor_plan` swaps the
modules that the plan names, keeping every parameter's name.

Shape suffixes: b batch, t tokens, d hidden, n rows (b*t), v vocabulary; a local part has the same letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.projections import Projections
from disttrain.parallel import collectives
from disttrain.parallel.layout import Cut, Placement, Sum
from disttrain.parallel.mesh import Axis
from disttrain.parallel.random import Streams

SEQUENCE_DIM = 1
"""Dimension of tokens in activations [b, t, d]."""


class _CopyReduce(torch.autograd.Function):
    """Forward: identity. Backward: sum of the gradients over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.axis), None


class _ReduceCopy(torch.autograd.Function):
    """Forward: sum over the axis, into a tensor of its own. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherReduceScatter(torch.autograd.Function):
    """Forward: concatenate along `dim`. Backward: sum, and keep this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatterGather(torch.autograd.Function):
    """Forward: sum, and keep this rank's part along `dim`. Backward: concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collectives.reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


class _GatherSlice(torch.autograd.Function):
    """Forward: concatenate along `dim`. Backward: this rank's slice.

    Right only where every rank goes on with the whole tensor in the same way (a loss that is the same on all
    ranks): each then holds the whole gradient already, and a sum would count it once per rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return collectives.all_gather(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.axis.index * ctx.size, ctx.size), None, None


class _SliceGather(torch.autograd.Function):
    """Forward: this rank's slice along `dim` of a tensor that is whole on every rank. Backward: concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


def copy_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Same `x` on every rank, used in parts by each: identity forward, sum backward."""
    return _CopyReduce.apply(x, axis)  # type: ignore[no-any-return]


def reduce_copy(x: Tensor, axis: Axis) -> Tensor:
    """Sum of every rank's `x`, the same on each: sum forward, identity backward."""
    return _ReduceCopy.apply(x, axis)  # type: ignore[no-any-return]


def gather_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Whole tensor from parts along `dim`, used in parts by each rank: gather forward, reduce-scatter backward."""
    return _GatherReduceScatter.apply(x, axis, dim)  # type: ignore[no-any-return]


def reduce_scatter_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum: reduce-scatter forward, gather backward."""
    return _ReduceScatterGather.apply(x, axis, dim)  # type: ignore[no-any-return]


def gather_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Whole tensor from parts along `dim`, used alike by all ranks: gather forward, slice backward."""
    return _GatherSlice.apply(x, axis, dim)  # type: ignore[no-any-return]


def slice_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of a whole tensor: slice forward, gather backward."""
    return _SliceGather.apply(x, axis, dim)  # type: ignore[no-any-return]


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's type, where it is on: what is saved is then what backward multiplies with."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.dtype != torch.float64 else x for x in tensors]


class _ColumnLinears(torch.autograd.Function):
    """Several column matrices of one input: y_i = x w_i^T.

    Backward sends the input's gradient on its way as soon as it is whole, and computes the weights' gradients
    while it travels. Under sequence parallelism x is this rank's tokens: it is gathered, and gathered again
    in backward rather than kept whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sequence = axis, sequence
        x, *cast = _autocast(x, *weights)
        ctx.save_for_backward(x, *cast)
        whole = collectives.all_gather(x, axis, SEQUENCE_DIM) if sequence else x
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(whole, weight) for weight in cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        whole = collectives.all_gather(x, ctx.axis, SEQUENCE_DIM) if ctx.sequence else x
        input_grad, pending = None, None
        if ctx.needs_input_grad[0]:
            input_grad = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                input_grad += grad @ weight
            if not ctx.sequence:
                pending = collectives.start_all_reduce(input_grad.contiguous(), ctx.axis)
        rows_nd = whole.reshape(-1, whole.shape[-1])
        weight_grads = [
            grad.reshape(-1, grad.shape[-1]).t() @ rows_nd if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[3:], strict=True)
        ]
        if pending is not None:
            input_grad = pending.wait()
        elif input_grad is not None:
            input_grad = collectives.reduce_scatter(input_grad, ctx.axis, SEQUENCE_DIM)
        return input_grad, None, None, *weight_grads


class _RowLinear(torch.autograd.Function):
    """y = sum over ranks of x w^T, x cut along its last dimension; reduced in the product's own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        x, weight = _autocast(x, weight)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            partial = F.linear(x, weight)
        return collectives.reduce_scatter(partial, axis, SEQUENCE_DIM) if sequence else collectives.all_reduce_(partial, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            grad = collectives.all_gather(grad, ctx.axis, SEQUENCE_DIM)
        input_grad = grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return input_grad, weight_grad, None, None


class ColumnLinear(nn.Module):
    """`nn.Linear` cut by output features; `gather` makes its output whole again, for a model that goes on alike everywhere."""

    def __init__(self, linear: nn.Linear, axis: Axis, sequence: bool, gather: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence, self.gather = axis, sequence, gather
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to this rank's [..., out/tp], or all of it if gathered."""
        (y,) = _ColumnLinears.apply(x, self.axis, self.sequence, self.weight)
        if self.bias is not None:
            y = y + self.bias
        return gather_slice(y, self.axis, -1) if self.gather else y


class ColumnProjections(nn.Module):
    """`Projections` cut by heads: one input, several outputs, one all-reduce backward."""

    def __init__(self, projections: Projections, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.segments = [size // axis.size for size in projections.segments]
        self.merged = projections.merged
        if self.merged:
            self.weight, self.bias = projections.weight, projections.bias
        else:
            for name, linear in projections.named_children():
                self.add_module(name, linear)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in] to this rank's part of each projection."""
        if self.merged:
            (y,) = _ColumnLinears.apply(x, self.axis, self.sequence, self.weight)
            y = y if self.bias is None else y + self.bias
            return y.split(self.segments, dim=-1)  # type: ignore[no-any-return]
        linears: list[nn.Linear] = list(self.children())  # type: ignore[arg-type]
        ys = _ColumnLinears.apply(x, self.axis, self.sequence, *(linear.weight for linear in linears))
        return tuple(y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears, strict=True))


class RowLinear(nn.Module):
    """`nn.Linear` cut by input features; the bias is whole on every rank and added once, after the sum."""

    def __init__(self, linear: nn.Linear, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """This rank's [..., in/tp] to whole [..., out]; ValueError for an input of another width."""
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"a row-parallel layer takes this rank's {self.weight.shape[1]} input features, but was fed {x.shape[-1]}: "
                "the layer before it must be column-parallel without gathering"
            )
        y: Tensor = _RowLinear.apply(x, self.weight, self.axis, self.sequence)
        if self.bias is not None:
            y = y + self.bias
        return y


class VocabEmbedding(nn.Module):
    """`nn.Embedding` cut by rows: each rank looks up its own tokens, the sum over ranks has them all."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight = embedding.weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Token numbers to [b, t, d], whole or this rank's tokens."""
        num_rows = self.weight.shape[0]
        local_bt = tokens_bt - self.axis.index * num_rows
        elsewhere_bt = (local_bt < 0) | (local_bt >= num_rows)
        x_btd = F.embedding(local_bt.masked_fill(elsewhere_bt, 0), self.weight)
        x_btd = x_btd.masked_fill(elsewhere_bt[..., None], 0.0)
        return reduce_scatter_gather(x_btd, self.axis, SEQUENCE_DIM) if self.sequence else reduce_copy(x_btd, self.axis)


class SequencePart(nn.Module):
    """A module whose output [.., t, d] is cut to this rank's tokens (learned positions under sequence parallelism)."""

    def __init__(self, embedding: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [.., t] to this rank's [.., t/tp, d]."""
        mine: Tensor = positions.chunk(self.axis.size, dim=-1)[self.axis.index]
        return F.embedding(mine, self.weight)


class OwnRandom(nn.Module):
    """Runs a module on this rank's own random stream: what it draws for differs over the tensor group."""

    def __init__(self, module: nn.Module, streams: Streams) -> None:
        super().__init__()
        self.module = module
        self.streams = streams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module."""
        if not self.training:
            return self.module(*args, **kwargs)
        with self.streams.own():
            return self.module(*args, **kwargs)


class SequenceSplit(nn.Module):
    """An identity at which whole activations [b, t, d] are cut to this rank's tokens; the gradient is made whole again."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t/tp, d]; ConfigError if t does not divide."""
        if x_btd.shape[SEQUENCE_DIM] % self.axis.size:
            raise ConfigError(
                f"sequence parallel: {x_btd.shape[SEQUENCE_DIM]} tokens are not divisible by strategy.tp={self.axis.size}",
                "strategy.sequence_parallel=false",
            )
        return slice_gather(x_btd, self.axis, SEQUENCE_DIM)


class SequenceGather(nn.Module):
    """An identity at which this rank's tokens are made whole again, for a model that goes on alike everywhere."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t/tp, d] to [b, t, d]."""
        return gather_slice(x_btd, self.axis, SEQUENCE_DIM)


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits cut by vocabulary; whole logits never exist. Two small all-reduces: maximum; sum and target."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor, axis: Axis, ignored: int) -> Tensor:
        num_rows = logits_nv.shape[1]
        peak_n = collectives.all_reduce(logits_nv.max(dim=1).values, axis, "max")
        shifted_nv = logits_nv - peak_n[:, None]
        local_n = targets_n - axis.index * num_rows
        here_n = (local_n >= 0) & (local_n < num_rows)
        local_n = local_n.masked_fill(~here_n, 0)
        picked_n = shifted_nv.gather(1, local_n[:, None]).squeeze(1).masked_fill(~here_n, 0.0)
        exp_nv = shifted_nv.exp_()
        total_n, target_n = collectives.all_reduce_(torch.stack([exp_nv.sum(1), picked_n]), axis)
        valid_n = targets_n != ignored
        ctx.save_for_backward(exp_nv.div_(total_n[:, None]), local_n, here_n, valid_n)
        losses_n: Tensor = (total_n.log() - target_n).masked_fill(~valid_n, 0.0)
        return losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_nv, local_n, here_n, valid_n = ctx.saved_tensors
        grad_nv = softmax_nv.clone()
        grad_nv.scatter_add_(1, local_n[:, None], -here_n.to(grad_nv.dtype)[:, None])
        return grad_nv.mul_((grad_n * valid_n)[:, None]), None, None, None


def vocab_cross_entropy(axis: Axis, ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A row loss for logits [n, v/tp] and targets [n]: losses [n], zero where `ignored`; float32 at least."""

    def row_loss(logits_nv: Tensor, targets_n: Tensor) -> Tensor:
        wide = logits_nv.float() if logits_nv.dtype in (torch.float16, torch.bfloat16) else logits_nv
        return _VocabCrossEntropy.apply(wide, targets_n, axis, ignored)  # type: ignore[no-any-return]

    return row_loss


STYLES: Mapping[str, str] = {
    "column": "output features cut, input the same on all ranks (Linear, Projections)",
    "column_gather": "as column, output made whole again (Linear)",
    "row": "input features cut, output summed (Linear)",
    "vocab_embedding": "rows cut by vocabulary (Embedding)",
    "vocab_head": "rows cut by vocabulary, output stays cut (Linear)",
    "sequence_norm": "whole weights; input cut along tokens under sequence parallelism",
    "position_embedding": "whole weights; output cut along tokens under sequence parallelism (Embedding)",
    "sequence_split": "an Identity at which whole activations are cut along tokens under sequence parallelism",
    "sequence_gather": "an Identity at which activations cut along tokens are made whole again",
    "heads": "works on this rank's heads: random draws are its own",
    "residual_dropout": "one mask per tensor group; its own under sequence parallelism",
}
"""Styles that a plan may name, and what each means."""

LOSS_KEY = "loss"
"""The plan's key that names no module: 'vocab_parallel' for a loss over cut logits."""


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """{module name: style} of a plan; a later pattern wins over an earlier one. ConfigError for what fits nothing."""
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if pattern == LOSS_KEY:
            continue
        if style not in STYLES:
            raise ConfigError(
                f"tensor plan: style '{style}' of '{pattern}' is unknown; styles are {', '.join(STYLES)}",
                f"strategy.plan.'{pattern}'=column",
            )
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"tensor plan: no module is named '{pattern}'; modules are {', '.join(filter(None, names[:20]))}, ...")
        styles.update(dict.fromkeys(matched, style))
    return styles


def apply_tensor_plan(model: nn.Module, plan: Mapping[str, str], axis: Axis, sequence: bool, streams: Streams) -> dict[str, Placement]:
    """Swap the modules that `plan` names for their parallel forms; return the placement on `tp` of parameters that are not Copy.

    Parameters are still whole here (on the meta device, or as the user built them): who materialises cuts them.
    """
    placements: dict[str, Placement] = {}
    for name, style in match_plan(model, plan).items():
        module = model.get_submodule(name)
        swapped, by_parameter = _restyle(name, module, style, axis, sequence, streams)
        if swapped is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped)
        placements.update({f"{name}.{parameter}": placement for parameter, placement in by_parameter.items()})
    return placements


def _restyle(
    name: str, module: nn.Module, style: str, axis: Axis, sequence: bool, streams: Streams
) -> tuple[nn.Module, dict[str, Placement]]:
    """The parallel form of one module, and its parameters' placements."""
    own = dict(module.named_parameters())
    if style in ("column", "vocab_head", "column_gather") and isinstance(module, nn.Linear):
        _must_divide(name, "output features", module.out_features, axis)
        return ColumnLinear(module, axis, sequence, style == "column_gather"), {parameter: Cut(0) for parameter in own}
    if style == "column" and isinstance(module, Projections):
        for size in module.segments:
            _must_divide(name, "output features", size, axis)
        cut = Cut(0, module.segments if module.merged else ())
        return ColumnProjections(module, axis, sequence), dict.fromkeys(own, cut)
    if style == "row" and isinstance(module, nn.Linear):
        _must_divide(name, "input features", module.in_features, axis)
        placements: dict[str, Placement] = {"weight": Cut(1)}
        return RowLinear(module, axis, sequence), placements | ({"bias": Sum()} if sequence and module.bias is not None else {})
    if style == "vocab_embedding" and isinstance(module, nn.Embedding):
        _must_divide(name, "rows", module.num_embeddings, axis)
        return VocabEmbedding(module, axis, sequence), {"weight": Cut(0)}
    if style == "sequence_norm":
        return module, dict.fromkeys(own, Sum()) if sequence else {}
    if style == "position_embedding" and isinstance(module, nn.Embedding):
        return (SequencePart(module, axis), {"weight": Sum()}) if sequence else (module, {})
    if style in ("sequence_split", "sequence_gather") and isinstance(module, nn.Identity):
        made = SequenceSplit(axis) if style == "sequence_split" else SequenceGather(axis)
        return (made if sequence else module), {}
    if style in ("heads", "residual_dropout") and not own:
        own_draws = draws(module) and (style == "heads" or sequence)
        return (OwnRandom(module, streams) if own_draws else module), {}
    raise ConfigError(f"tensor plan: style '{style}' does not fit '{name}', a {type(module).__name__}; {style}: {STYLES[style]}")


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: it has dropout, as a module or as a rate."""
    rates = [getattr(part, "p", 0.0) for part in module.modules()] + [getattr(module, "dropout", 0.0)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _must_divide(name: str, what: str, size: int, axis: Axis) -> None:
    if size % axis.size:
        raise ConfigError(
            f"tensor parallel: the {size} {what} of '{name}' are not divisible by strategy.tp={axis.size}",
            f"strategy.tp={max(d for d in range(1, axis.size) if size % d == 0)}",
        )
