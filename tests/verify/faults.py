"""Faults that people have made in code like ours, each planted inside the ranks of a layout.

A fault changes the product as a careless edit would. It is entered in the layout's ranks only, so the record of one
device stays right, and `verify` must notice: a test says which numbers go wrong, and where.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.models.experts import MixtureOfExperts
from disttrain.parallel import batch_norm, collectives, cut, experts, materialise, pairs, plan, shard, strategy, tensor, unit, vocabulary
from disttrain.parallel.data import Reducer
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.random import Streams, mix
from disttrain.parallel.step import Report
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.unit import Unit
from disttrain.parallel.update import Update
from disttrain.train import assembly
from disttrain.train.batch import Feed, Slice
from disttrain.train.optimizer import parameter_groups
from tests import nets, tiny

LAYOUTS = {
    "ddp": tiny.config(dp=2, micro_batch_size=2, verify={"steps": 2}),
    "tp": tiny.config(tp=2, micro_batch_size=4, verify={"steps": 2}),
    "sp": tiny.config(tp=2, sequence_parallel=True, micro_batch_size=4, verify={"steps": 2}),
    "ddp_tp": tiny.config(dp=2, tp=2, micro_batch_size=2, verify={"steps": 2}),
    "dropout": tiny.config(tp=2, micro_batch_size=4, model=tiny.GPT | {"dropout": 0.1}, verify={"steps": 1}),
    "fsdp": tiny.config(shard=2, micro_batch_size=2, verify={"steps": 2}),
    "fsdp_zero2": tiny.config(shard=2, micro_batch_size=2, strategy={"zero": 2}, verify={"steps": 2}),
    "hsdp": tiny.config(dp=2, shard=2, micro_batch_size=1, verify={"steps": 1}),
    "fsdp_sp": tiny.config(shard=2, tp=2, sequence_parallel=True, micro_batch_size=2, verify={"steps": 1}),
    "experts": tiny.config(shard=2, ep=2, strategy={"zero": 0}, micro_batch_size=2, model=tiny.MOE, verify={"steps": 2}),
    "batch_norm": tiny.config(dp=2, micro_batch_size=2, **nets.BATCH_NORM),
}


@dataclass(frozen=True)
class Fault:
    """What is planted, in which layout, and what the proof must say."""

    plant: Callable[[], AbstractContextManager[Any]]
    layout: str
    first: str
    """Quantity that is off first, in time order."""
    named: tuple[str, ...]
    """Some of the names that must be among those that are off."""
    spared: tuple[str, ...]
    """Gradients that must not be called off."""
    cause: str
    """Part of the likely cause."""
    step: int
    """The first at which it shows."""


FAULTS: dict[str, Fault] = {}

LOST_BACKWARD = "the loss is right but gradients are not"
WRONG_FORWARD = "already the loss is wrong"
START = "weights start different"
SAMPLES = "ranks do not see the samples"
NORM = "gradients are right but their norm is not"
UPDATE = "same gradients, different update"
STATISTICS = "the running statistics of"
MASKS = "dropout masks are shared where they must differ"


def fault(
    layout: str, first: str, cause: str, named: tuple[str, ...] = (), spared: tuple[str, ...] = (), step: int = 0
) -> Callable[..., Any]:
    """Enter a context manager that plants a fault into `FAULTS`, under its name."""

    def enter(plant: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        FAULTS[plant.__name__] = Fault(plant, layout, first, named, spared, cause, step)
        return plant

    return enter


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name` replaced by `change(original, *arguments)`."""
    original = getattr(owner, name)

    def planted(*arguments: Any, **keywords: Any) -> Any:
        return change(original, *arguments, **keywords)

    static = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return patch.object(owner, name, staticmethod(planted) if static else planted)


# --- tensor parallel: forward and backward ---------------------------------------------------------------------------


@fault("tp", "gradient", WRONG_FORWARD, named=("tokens.weight", "blocks.0.mlp.up.weight", "loss"))
def row_output_is_not_summed() -> AbstractContextManager[Any]:
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Any, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    return patch.object(tensor._RowLinear, "forward", staticmethod(forward))


@fault(
    "tp",
    "gradient",
    LOST_BACKWARD,
    named=("tokens.weight", "norm.weight", "blocks.1.attention_norm.bias", "blocks.0.attention.qkv.weight"),
)
def column_input_gradient_is_not_summed() -> AbstractContextManager[Any]:
    return patch.object(collectives, "start_all_reduce", lambda x, axis: collectives.Pending(x, None))


@fault("sp", "gradient", LOST_BACKWARD, named=("blocks.0.attention_norm.weight", "blocks.1.attention_norm.bias"))
def no_gradient_passes_the_gather() -> AbstractContextManager[Any]:
    return wrapped(tensor.ColumnProjections, "forward", lambda original, self, x: original(self, x.detach()))


@fault("tp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.weight"))
def reduced_in_place_under_autograd() -> AbstractContextManager[Any]:
    """exp keeps its result for backward; the sum over ranks is written over it."""

    def cross_entropy(axis: Any, ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
        def row_loss(logits_nv: Tensor, targets_n: Tensor) -> Tensor:
            total_n = torch.logsumexp(logits_nv, 1).exp()
            collectives.all_reduce_(total_n.detach(), axis)
            return (total_n.log() - own_target(logits_nv, targets_n, axis)).masked_fill(targets_n == ignored, 0.0)

        return row_loss

    return patch.object(cut, "vocab_cross_entropy", cross_entropy)


def own_target(logits_nv: Tensor, targets_n: Tensor, axis: Any) -> Tensor:
    """The target's logit, from whichever rank has it."""
    local_n = targets_n - axis.index * logits_nv.shape[1]
    here_n = (local_n >= 0) & (local_n < logits_nv.shape[1])
    picked_n = logits_nv.gather(1, local_n.masked_fill(~here_n, 0)[:, None]).squeeze(1).masked_fill(~here_n, 0.0)
    return pairs.reduce_copy(picked_n, axis)


@fault("tp", "gradient", WRONG_FORWARD, named=("loss", "blocks.0.mlp.down.bias"))
def bias_is_added_by_every_rank() -> AbstractContextManager[Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = tensor._RowLinear.apply(x, self.weight, self.axis, self.sequence)
        return y + self.bias * self.axis.size

    return patch.object(tensor.RowLinear, "forward", forward)


@fault("tp", "gradient", WRONG_FORWARD, named=("blocks.0.mlp.down.bias", "blocks.1.attention.out.bias"))
def bias_on_one_rank_only() -> AbstractContextManager[Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = tensor._RowLinear.apply(x, self.weight, self.axis, self.sequence)
        return y + self.bias if self.axis.index == 0 else y

    return patch.object(tensor.RowLinear, "forward", forward)


@fault("tp", "gradient", WRONG_FORWARD, named=("blocks.0.attention.qkv.weight", "loss"))
def merged_projection_is_cut_in_plain_chunks() -> AbstractContextManager[Any]:
    return patch.object(plan, "Cut", lambda dim, segments=(): Cut(dim))


@fault("tp", "gradient", WRONG_FORWARD, named=("tokens.weight", "loss"))
def embedding_is_not_masked() -> AbstractContextManager[Any]:
    def forward(self: Any, tokens_bt: Tensor) -> Tensor:
        local_bt = (tokens_bt - self.axis.index * self.weight.shape[0]).clamp(0, self.weight.shape[0] - 1)
        return pairs.reduce_copy(F.embedding(local_bt, self.weight), self.axis)

    return patch.object(vocabulary.VocabEmbedding, "forward", forward)


@fault("tp", "gradient", WRONG_FORWARD, named=("tokens.weight", "loss"))
def vocabulary_loss_sums_its_own_part_only() -> AbstractContextManager[Any]:
    def cross_entropy(axis: Any, ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
        def row_loss(logits_nv: Tensor, targets_n: Tensor) -> Tensor:
            own_n = torch.logsumexp(logits_nv, 1) - own_target(logits_nv, targets_n, axis)
            return own_n.masked_fill(targets_n == ignored, 0.0)

        return row_loss

    return patch.object(cut, "vocab_cross_entropy", cross_entropy)


@fault("tp", "gradient", WRONG_FORWARD, named=("tokens.weight", "loss"))
def vocabulary_loss_takes_its_own_maximum() -> AbstractContextManager[Any]:
    def own_maximum(original: Any, x: Tensor, axis: Any, op: str = "sum") -> Tensor:
        return x if op == "max" else original(x, axis, op)

    return wrapped(collectives, "all_reduce", own_maximum)


@fault("sp", "gradient", WRONG_FORWARD, named=("positions.weight", "loss"))
def every_rank_takes_the_first_positions() -> AbstractContextManager[Any]:
    def forward(self: Any, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.axis.size, dim=-1)[0], self.weight)

    return patch.object(tensor.SequencePart, "forward", forward)


@fault(
    "sp",
    "gradient",
    LOST_BACKWARD,
    named=("norm.weight", "blocks.0.attention_norm.weight", "blocks.1.mlp.down.bias", "positions.weight"),
    spared=("tokens.weight", "blocks.0.mlp.up.weight"),
)
def norm_gradients_are_not_summed() -> AbstractContextManager[Any]:
    return patch.object(Strategy, "_complete_gradients", lambda self: None)


@fault("ddp_tp", "gradient", WRONG_FORWARD, named=("loss", "tokens.weight"))
def collectives_run_on_the_whole_world() -> AbstractContextManager[Any]:
    def everywhere(original: Any, x: Tensor, axis: Any, op: str = "sum", **more: Any) -> Tensor:
        return original(x, replace(axis, group=dist.group.WORLD) if axis.name == "tp" else axis, op, **more)

    return wrapped(collectives, "all_reduce_", everywhere)


# --- start ----------------------------------------------------------------------------------------------------------


@fault("tp", "start", START, named=("blocks.0.attention.qkv.weight", "blocks.1.mlp.down.weight", "tokens.weight"))
def all_shards_are_identical() -> AbstractContextManager[Any]:
    def first_shard(original: Any, name: str, whole: Tensor, layout: Layout, at: Any, *rest: Any) -> Tensor:
        return original(name, whole, layout, {**at, "tp": 0}, *rest)

    return wrapped(materialise, "_local_values", first_shard)


@fault("tp", "start", START, named=("blocks.0.attention.out.weight", "blocks.1.mlp.down.weight"))
def row_weights_are_scaled_by_the_shards_fan_in() -> AbstractContextManager[Any]:
    def wider(original: Any, name: str, whole: Tensor, layout: Layout, *rest: Any) -> Tensor:
        cut = layout.placements.get("tp")
        by_columns = isinstance(cut, Cut) and cut.dim == 1
        return original(name, whole, layout, *rest) * (2**0.5 if by_columns else 1.0)

    return wrapped(materialise, "_local_values", wider)


@fault("ddp", "start", START, named=("tokens.weight", "blocks.1.mlp.up.weight"))
def start_depends_on_the_rank() -> AbstractContextManager[Any]:
    def seeded(original: Any, self: Strategy, mesh: Any, options: Any, device: Any, seed: int) -> None:
        original(self, mesh, options, device, seed + mesh.rank)

    return wrapped(Strategy, "__init__", seeded)


# --- data -----------------------------------------------------------------------------------------------------------


@fault("ddp", "batch", SAMPLES, named=("samples",))
def both_data_ranks_take_the_first_slice() -> AbstractContextManager[Any]:
    return patch.object(Slice, "rows", lambda self, indices: indices[: self.local_batch_size])


@fault("tp", "batch", SAMPLES, named=("samples",))
def ranks_of_a_tensor_group_see_different_samples() -> AbstractContextManager[Any]:
    return wrapped(Slice, "rows", lambda original, self, indices: original(self, indices).roll(dist.get_rank()))


# --- means ----------------------------------------------------------------------------------------------------------


@fault("ddp", "gradient", WRONG_FORWARD, named=("loss", "tokens.weight"))
def mean_of_the_ranks_means() -> AbstractContextManager[Any]:
    def own_count(self: Strategy, step: Any) -> None:
        step.counts = self._local_counts(step) * self._data.size

    return patch.object(Strategy, "count", own_count)


@fault("ddp", "gradient", "off by one factor", named=("loss", "tokens.weight"), step=1)
def short_window_is_divided_by_the_full_count() -> AbstractContextManager[Any]:
    """Void samples count as if they were samples."""

    def uncounted(original: Any, self: Feed, asked: Any, inputs: Any, targets: Any, counts: Any) -> Any:
        step = original(self, asked, inputs, targets, counts)
        step.local_counts = {term: float(count.sum()) for term, count in self.task.counts(targets).items()}
        return step

    return wrapped(Feed, "_step", uncounted)


@fault("tp", "gradient", "the number of micro-batches", named=("tokens.weight", "blocks.0.mlp.up.weight"))
def gradients_times_the_number_of_micro_batches() -> AbstractContextManager[Any]:
    def too_often(original: Any, self: Strategy, step: Any) -> Any:
        local = original(self, step)
        for parameter in self.parameters.values():
            parameter.grad.mul_(len(step.micro))
        return local

    return wrapped(Strategy, "forward_backward", too_often)


@fault("ddp_tp", "gradient", "the ranks of axis dp_replicate", named=("tokens.weight", "norm.weight"))
def gradients_are_averaged_over_data_ranks() -> AbstractContextManager[Any]:
    def unweighted(original: Any, self: Strategy, step: Any) -> list[Tensor]:
        return [weight / self._data.size for weight in original(self, step)]

    return wrapped(Strategy, "_loss_weights", unweighted)


@fault("ddp", "loss", "the reported loss is not", named=("loss",))
def each_rank_reports_its_own_loss() -> AbstractContextManager[Any]:
    def own_loss(original: Any, self: Strategy, local: Any, *rest: Any) -> Report:
        report = original(self, local, *rest)
        report.losses = local.losses * self._data.size
        return report

    return wrapped(Strategy, "finish", own_loss)


# --- data parallel --------------------------------------------------------------------------------------------------


@fault("ddp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.bias"))
def gradients_are_not_summed() -> AbstractContextManager[Any]:
    def stay(original: Any, self: Reducer, bucket: Any) -> None:
        self._next += 1

    return wrapped(Reducer, "_send", stay)


@fault("ddp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.bias"))
def half_of_the_others_gradients_arrives() -> AbstractContextManager[Any]:
    def first_only(original: Any, self: Reducer, bucket: Any) -> None:
        own = bucket.flat.clone()
        original(self, bucket)
        bucket.pending.wait()
        bucket.flat.copy_(own + (bucket.flat - own) / 2)

    return wrapped(Reducer, "_send", first_only)


@fault("ddp_tp", "gradient", LOST_BACKWARD, named=("tokens.weight", "blocks.0.attention.qkv.weight"), spared=())
def gradients_are_summed_over_the_whole_world() -> AbstractContextManager[Any]:
    def on_world(original: Any, self: Reducer, parameters: Any, axis: Any, *rest: Any) -> None:
        original(self, parameters, replace(axis, group=dist.group.WORLD), *rest)

    return wrapped(Reducer, "__init__", on_world)


# --- experts --------------------------------------------------------------------------------------------------------


@fault("experts", "gradient", LOST_BACKWARD, named=("blocks.1.mlp.router.weight",), spared=("norm.weight",))
def router_gradient_is_lost() -> AbstractContextManager[Any]:
    def route(original: Any, self: Any, x: Tensor) -> Any:
        weights, chosen, balance = original(self, x)
        return weights.detach() + 0.0 * weights, chosen, balance.detach() + 0.0 * balance

    return wrapped(MixtureOfExperts, "route", route)


@fault("experts", "gradient", LOST_BACKWARD, named=("blocks.1.mlp.experts.up", "blocks.1.mlp.experts.down"), spared=("tokens.weight",))
def gradients_of_experts_are_summed_over_ep() -> AbstractContextManager[Any]:
    """As if each rank held the same experts."""

    def everywhere(original: Any, self: Strategy, roots: Any) -> Any:
        def add(parameter: Any) -> None:
            collectives.all_reduce_(parameter.grad, self.mesh.axis("ep"))

        for name in self._experts:
            self.parameters[name].register_post_accumulate_grad_hook(add)
        return original(self, roots)

    return wrapped(Strategy, "_gradient_syncs", everywhere)


@fault("experts", "gradient", LOST_BACKWARD, named=("blocks.1.mlp.router.weight",), spared=("blocks.1.mlp.experts.down",))
def balance_loss_is_a_mean_of_means() -> AbstractContextManager[Any]:
    """One number a micro-batch, of all its sequences together, void ones among them."""

    def together(original: Any, self: Any, x: Tensor) -> Any:
        weights, chosen, balance = original(self, x)
        _, _, mixed = original(self, x.reshape(1, -1, x.shape[-1]))
        return weights, chosen, balance.detach() + (mixed - mixed.detach())

    return wrapped(MixtureOfExperts, "route", together)


@fault("experts", "gradient", WRONG_FORWARD, named=("blocks.1.mlp.experts.up", "loss"))
def tokens_come_back_in_another_order() -> AbstractContextManager[Any]:
    return patch.object(experts, "inverse", lambda order: order)


@fault("experts", "gradient", LOST_BACKWARD, named=("tokens.weight", "blocks.0.mlp.up.weight"))
def gradients_do_not_travel_back_to_their_tokens() -> AbstractContextManager[Any]:
    def stay(original: Any, ctx: Any, grad: Tensor) -> Any:
        back, *rest = original(ctx, grad)
        return (back * 0.0, *rest) if len(ctx.sent) and sum(ctx.sent) != len(grad) else (back, *rest)

    return wrapped(experts._AllToAll, "backward", stay)


# --- batch statistics -----------------------------------------------------------------------------------------------


@fault("batch_norm", "gradient", WRONG_FORWARD, named=("conv.weight", "loss", "images.running_mean"))
def batch_statistics_are_each_ranks_own() -> AbstractContextManager[Any]:
    return wrapped(strategy, "share_statistics", lambda original, model, axis: original(model, batch_norm.ALONE))


@fault("batch_norm", "gradient", LOST_BACKWARD, named=("conv.weight", "hidden.weight"), spared=("head.weight",))
def batch_norm_sends_back_only_the_own_rows() -> AbstractContextManager[Any]:
    def alone(original: Any, ctx: Any, *grads: Any) -> Any:
        with patch.object(collectives, "all_reduce", lambda x, axis: x * axis.size):
            return original(ctx, *grads)

    return wrapped(batch_norm._Normalise, "backward", alone)


@fault("batch_norm", "gradient", WRONG_FORWARD, named=("conv.weight", "loss"), step=1)
def void_rows_enter_the_statistics() -> AbstractContextManager[Any]:
    return patch.object(batch_norm, "_rows_of", lambda valid, num_rows: None)


@fault("batch_norm", "buffer", STATISTICS, named=("images.running_mean", "plain.num_batches_tracked"))
def running_statistics_move_twice() -> AbstractContextManager[Any]:
    def twice(original: Any, self: Any, *statistics: Any) -> None:
        original(self, *statistics)
        original(self, *statistics)

    return wrapped(batch_norm.SharedBatchNorm, "_follow", twice)


@fault("batch_norm", "gradient", WRONG_FORWARD, named=("conv.weight", "loss"))
def ranks_take_contiguous_rows_of_the_global_batch() -> AbstractContextManager[Any]:
    """Two micro-batches a rank then hold other samples than one device's two."""

    def contiguous(self: Slice, of_batch: Tensor) -> Tensor:
        return of_batch.chunk(self.axis.size)[self.axis.index]

    return patch.object(Slice, "rows", contiguous)


# --- shards ---------------------------------------------------------------------------------------------------------


@fault("fsdp", "gradient", "the ranks of axis dp_shard", named=("tokens.weight", "norm.bias"), spared=("blocks.0.mlp.up.weight",))
def gradients_are_divided_on_the_root_only() -> AbstractContextManager[Any]:
    """FSDP2's divide factor is each unit's own; set on the blocks alone, the root's gradients are a mean."""

    def on_blocks(original: Any, self: Unit, module: nn.Module, *rest: Any) -> None:
        original(self, module, *rest)
        if hasattr(module, "blocks"):
            self.fsdp.set_gradient_divide_factor(dist.get_world_size())

    return wrapped(Unit, "__init__", on_blocks)


@fault("hsdp", "start", START, named=("tokens.weight", "blocks.0.attention.qkv.weight"))
def replicas_of_shards_draw_their_own_start() -> AbstractContextManager[Any]:
    """FSDP2 does not broadcast."""
    return patch.object(materialise, "mix", lambda seed, name, block: mix(seed + dist.get_rank() // 2, name, block))


@fault("ddp", "gradient", LOST_BACKWARD, named=("tokens.weight", "norm.bias"))
def a_shard_degree_of_one_does_not_synchronise() -> AbstractContextManager[Any]:
    """Nothing to share out, so nothing is wrapped."""
    return patch.object(Strategy, "_gradient_syncs", lambda self, roots: [])


@fault("hsdp", "gradient", LOST_BACKWARD, named=("tokens.weight", "blocks.1.mlp.down.weight"))
def replicas_of_shards_are_not_summed() -> AbstractContextManager[Any]:
    def shards_only(mesh: Any, device_type: str) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(mesh.axis("dp_shard").group, device_type)

    return patch.object(shard, "_device_mesh", shards_only)


@fault("fsdp", "norm", NORM, named=("gradient norm",))
def norm_of_the_own_rows() -> AbstractContextManager[Any]:
    def own_norm(original: Any, self: Strategy, *arguments: Any) -> Report:
        report = original(self, *arguments)
        report.grad_norm = self._squares().sqrt()
        return report

    return wrapped(Strategy, "finish", own_norm)


@fault("fsdp_zero2", "gradient", WRONG_FORWARD, named=("tokens.weight", "loss"), step=1)
def whole_weights_outlive_the_update() -> AbstractContextManager[Any]:
    """Kept for the next step too: its forward sees the weights of the one before."""

    def keep(original: Any, self: Any) -> None:
        original(self)
        for one in self._units:
            one.fsdp.set_reshard_after_backward(False, recurse=False)

    return wrapped(shard.Sharder, "arm", keep)


@fault("fsdp_zero2", "gradient", LOST_BACKWARD, named=("tokens.weight", "blocks.0.mlp.up.weight"))
def the_last_micro_batch_replaces_the_others() -> AbstractContextManager[Any]:
    def forget(original: Any, self: Any) -> None:
        original(self)
        for held in self._held.values():
            held.grad = None

    return wrapped(shard.Sharder, "arm", forget)


@fault("fsdp_sp", "gradient", LOST_BACKWARD, named=("norm.weight", "blocks.0.attention_norm.bias"), spared=("blocks.0.mlp.up.weight",))
def rows_of_norms_are_not_summed_over_the_sequence() -> AbstractContextManager[Any]:
    return patch.object(Layout, "reductions", lambda self: [])


@fault("fsdp", "gradient", "", named=("loss", "tokens.weight"))
def weights_are_rounded_on_their_way() -> AbstractContextManager[Any]:
    return patch.dict(unit.GATHERED, {"weights": torch.bfloat16})


# --- norm and update --------------------------------------------------------------------------------------------------


@fault("tp", "norm", NORM, named=("gradient norm",))
def norm_of_the_own_shard() -> AbstractContextManager[Any]:
    def own_norm(original: Any, self: Strategy, *arguments: Any) -> Report:
        report = original(self, *arguments)
        report.grad_norm = self._squares().sqrt()
        return report

    return wrapped(Strategy, "finish", own_norm)


@fault("tp", "norm", NORM, named=("gradient norm", "norm of the reference's gradients"))
def replicated_gradients_count_once_per_rank() -> AbstractContextManager[Any]:
    return patch.object(Layout, "weight", lambda self: 1.0)


@fault("tp", "update", UPDATE, named=("norm.weight", "blocks.0.attention_norm.weight"), spared=("norm.weight",))
def norms_decay_in_the_layout_only() -> AbstractContextManager[Any]:
    def one_group(model: nn.Module, parameters: Any, weight_decay: float) -> list[dict[str, Any]]:
        groups = parameter_groups(model, parameters, weight_decay)
        return [group | {"weight_decay": weight_decay} for group in groups]

    return patch.object(assembly, "parameter_groups", one_group)


@fault("tp", "update", UPDATE, named=("tokens.weight", "norm.weight"), spared=("norm.weight",))
def one_rank_does_not_clip() -> AbstractContextManager[Any]:
    return wrapped(Update, "_divisor", lambda original, self, report: original(self, report) if dist.get_rank() == 0 else None)


# --- random streams -----------------------------------------------------------------------------------------------------


@fault("dropout", "mask", MASKS, named=("blocks.0.attention.core", "blocks.1.attention.core"))
def heads_share_their_masks() -> AbstractContextManager[Any]:
    return patch.object(tensor.OwnRandom, "forward", lambda self, *arguments: self.module(*arguments))


@fault("dropout", "mask", MASKS, named=("dropout", "blocks.0.mlp.dropout", "blocks.1.attention.dropout"))
def residual_masks_differ_in_the_tensor_group() -> AbstractContextManager[Any]:
    def by_rank(original: Any, self: Any, step: int) -> None:
        original(self, step)
        self._generator.manual_seed(mix(step, dist.get_rank()))

    return wrapped(Streams, "begin", by_rank)
