"""One step in any layout: what is applied to a model, in which order, and how the ranks agree on its numbers.

Order of application, and why:
  1. plan, BatchNorm change what a layer is (tp, then cp); whatever wraps a layer must see its parallel form
  2. stages          what other ranks of a pipeline hold leaves the model, once placements of all of it are known
  3. compile         what a block computes, between its collectives
  4. recompute       around that: what runs again is the compiled block
  5. materialise     once shapes are local, so that no rank ever holds a whole model that it will cut
  6. gradient syncs  last: they hook the parameters that exist by then

A step, on every rank: `count` the valid targets of the whole global batch (they ride on the step before);
`forward_backward` every micro-batch; `finish`: sum what gradients are still in parts, then one vector over the
world with losses, squares, verdicts and the next step's counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.models.task import Task
from disttrain.parallel import collectives
from disttrain.parallel.agreement import explain
from disttrain.parallel.batch_norm import ALONE, share_statistics
from disttrain.parallel.blocks import change_blocks
from disttrain.parallel.compress import Compressor, make_compressor, stacked
from disttrain.parallel.context import head_tail
from disttrain.parallel.cut import cut_modules
from disttrain.parallel.data import GradientSync, Reducer
from disttrain.parallel.experts import BESIDE_EP
from disttrain.parallel.layout import Copy, Cut, Layout, Own, Placement, Sum
from disttrain.parallel.loop import Loop, LossModule, Runner, Seen
from disttrain.parallel.materialise import materialise, start_alike
from disttrain.parallel.mesh import VIEWS, Mesh
from disttrain.parallel.options import Options
from disttrain.parallel.pairs import gather_slice
from disttrain.parallel.pipeline import Pipeline
from disttrain.parallel.random import Streams
from disttrain.parallel.shard import is_sharded, repeated_blocks, shard_all
from disttrain.parallel.stages import cut_stages, stage_modules
from disttrain.parallel.step import Local, Report, Step, Verdict, map_tensors
from disttrain.parallel.unit import REPLICATE, SHARD
from disttrain.parallel.update import Gate, LossScale


class Strategy:
    """One model laid out on one mesh. The only class for every product of axes."""

    def __init__(self, mesh: Mesh, options: Options, device: torch.device, seed: int) -> None:
        """`seed` fixes the start and the random streams."""
        self.mesh = mesh
        self.options = options
        self.device = device
        self.seed = seed
        self.loss_scale: LossScale | None = None
        self.layouts: dict[str, Layout] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.compressors: list[Compressor] = []
        self._world, self._data, self._tp, self._pp, self._shard = (mesh.axis(name) for name in ("world", "data", "tp", "pp", SHARD))
        self.shares_rows = self._shard.size > 1 and options.zero > 0
        self.update_device = torch.device("cpu") if options.offload and self.shares_rows else device
        self.streams = Streams(seed, device, mesh.axis("grad").index, self._tp.index)
        # local SGD: replicas neither count, nor sum gradients, nor report together; `Synced` brings them together
        self.apart = mesh.axis("dp_replicate") if options.sync_every > 1 else ALONE
        self._data, self._agreeing = (self._data, self._world) if self.apart.size == 1 else (ALONE, self._tp)
        self.context = head_tail(mesh.axis("cp"), self._tp.size if options.sequence_parallel else 1)
        # of ranks that hold the same loss sums, or read the same samples, one speaks
        self._speaks = 1.0 if self._tp.index == 0 else 0.0
        self._counts_speak = self._speaks if mesh.axis("cp").index == mesh.axis("pp").index == 0 else 0.0
        self._gate = Gate(device)
        self._host: tuple[list[float], Tensor] = [], torch.empty(0)

    # --- before the first step ---------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, task: Task, dtype: torch.dtype, loss_scale: LossScale | None = None, draws: bool = True) -> None:
        """Lay `model` (on meta, or whole: rank 0's start then holds) out in place. Unless it `draws`, weights are memory without values."""
        self.model, self.task, self.dtype, self.loss_scale = model, task, dtype, loss_scale
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(f"{type(model).__name__} has no parameter to train: all are frozen, or there are none")
        start_alike(model, self._world, self.device)
        cuts = cut_modules(model, task, self.options, self._tp, self.context, self.mesh.axis("ep"), self.streams)
        self._vocab_cut, self._experts, self._head = cuts.vocabulary, cuts.experts, cuts.head
        self.unshared = share_statistics(model, self._data if self.options.sync_batch_norm else ALONE)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.stages, held = cut_stages(model, self._pp, self.options)
        self.layouts = {name: self._layout(name, shape, cuts.placements.get(name), held.get(name)) for name, shape in shapes.items()}
        change_blocks(model, self.options, self.streams)
        materialise(model, self.layouts, self.mesh.coordinate(), self.seed if draws else None, self.device, dtype)
        self.parameters = dict(model.named_parameters())
        self.module = LossModule(model, task)
        own = {} if self.stages is None else stage_modules(self.module, self.stages, self._pp.index)
        self.syncs = self._gradient_syncs([*own.values()] or [model])
        self._plan_reduction()
        self.runner: Runner = Loop(self.module, self.syncs)
        if self.stages is not None:
            self.runner = Pipeline(
                self.module, self.stages, own, self.options.schedule, self._pp, self.syncs, self.streams, device=self.device
            )

    def _layout(self, name: str, shape: tuple[int, ...], on_tp: Placement | None, on_pp: Placement | None) -> Layout:
        """How one parameter lies on every axis of more than one rank; its gradient is summed over the axis `grad` by a reducer."""
        placements: dict[str, Placement] = {"pp": on_pp or Copy(), "tp": on_tp or Copy()}
        if self.shares_rows and name not in self._experts and shape and all(shape):  # a scalar has no rows to share out
            placements |= {SHARD: Cut(0, ragged=True)} | dict.fromkeys(VIEWS[REPLICATE], Sum(done=True))
        else:
            summed = Sum(done=True) if self.apart.size == 1 else Own()
            placements |= dict.fromkeys(VIEWS["grad"], summed) | ({"ep": Cut(0)} if name in self._experts else {})
        degrees = {axis: self.mesh.axis(axis).size for axis in placements if self.mesh.axis(axis).size > 1}
        return Layout(shape, {axis: placements[axis] for axis in degrees}, degrees)

    def _gradient_syncs(self, roots: Sequence[nn.Module]) -> list[GradientSync]:
        """What sums gradients over the ranks that see different samples. Parameters whose rows are shared out become handles.

        `roots`: the model, or this rank's stages of it.
        """
        syncs, options = list[GradientSync](), self.options
        if self.shares_rows:
            sharders = shard_all(roots, repeated_blocks(self.model), self.parameters, self.layouts, self.mesh, self.options)
            for sharder in sharders:
                self.parameters |= sharder.parameters
            syncs.extend(sharders)
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad and not is_sharded(self.layouts[name])}
        for axis in map(self.mesh.axis, ("grad", BESIDE_EP) if self.apart.size == 1 else ()):
            summed = {name: p for name, p in trained.items() if (name in self._experts) == (axis.name == BESIDE_EP)}
            if summed and axis.group is not None:
                compressor = make_compressor(options.compression, options.compression_rank, axis, summed, self.seed, self.loss_scale)
                syncs.append(Reducer(summed, axis, options.bucket_size, options.find_unused_parameters, compressor))
                self.compressors += [] if compressor is None else [compressor]
        return syncs

    def _plan_reduction(self) -> None:
        """What `finish` does to gradients: which are still in parts over which axis, and each one's weight in the norm."""
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._trained = list(trained.values())
        weights = [self.layouts[name].weight() for name in trained]
        self._norm_weights = torch.tensor(weights, dtype=torch.float64, device=self.update_device)
        self._in_parts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            for axis in self.layouts[name].reductions():
                self._in_parts.setdefault(axis, []).append(parameter)

    # --- the step, in time order ---------------------------------------------------------------------------------

    def count(self, step: Step) -> None:
        """Sum the valid targets of the first step over data ranks; later steps' counts ride on the report before."""
        step.counts = collectives.all_reduce_(self._local_counts(step), self._data)

    def forward_backward(self, step: Step) -> Local:
        """Run every micro-batch in both directions. Gradients come out as sums over the global batch, scaled."""
        weights = self._loss_weights(step)
        self.streams.begin(step.number)
        try:
            with self._head.put_off() if self._head else nullcontext():
                return self.runner.train(self.context.cut(step), weights)
        except RuntimeError as error:
            explain(error, self.model, self._tp, step.number)
            raise

    def _loss_weights(self, step: Step) -> Sequence[Tensor | float]:
        """loss scale / count, by term."""
        if self._data.size == 1 and self.loss_scale is None:  # nobody else holds samples, so the host knows the counts
            return [1.0 / max(count, 1.0) for count in step.local_counts.values()]
        weights = step.counted().clamp(min=1.0).reciprocal()
        if self.loss_scale is not None:
            weights *= self.loss_scale.value
        return list(weights.to(self.dtype).unbind())

    def finish(
        self,
        local: Local,
        step: Step,
        verdicts: Sequence[Tensor] = (),
        flags: Sequence[float] | None = None,
        measured: Sequence[float] = (),
        following: Step | None = None,
    ) -> Report:
        """Complete the gradients of `step`, then agree on everything else in one sum over the world (local SGD: over this replica).

        `verdicts`: counters [5] of this rank's policies; `flags`: its host requests; `measured`: its values of this
        step (as many on every rank); `following`: the next step, whose counts ride along.
        """
        self._complete_gradients()
        vector = self._pack(local, self._squares(), verdicts, flags, measured, following)
        ride_along = len(measured) * self._world.size * vector.element_size()  # at log points alone, so not a step's
        collectives.all_reduce_(vector, self._agreeing, uncounted=ride_along)
        return self._unpack(vector, local, len(measured), step, following)

    def _complete_gradients(self) -> None:
        """Sum gradients that are in parts over an axis: the data axes'; then norms and row biases under sequence parallelism."""
        for sync in self.syncs:
            sync.finish()
        for name, parameters in self._in_parts.items():
            axis = self.mesh.axis(name)
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not grads:
                continue
            buffer = collectives.all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]).to(self.device), axis)
            for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _squares(self) -> Tensor:
        """Float64 sum of squares of this rank's gradients, each element weighted by 1 / replicas."""
        held = [index for index, parameter in enumerate(self._trained) if parameter.grad is not None]
        if not held:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        weights = self._norm_weights if len(held) == len(self._trained) else self._norm_weights[held]
        norms = torch._foreach_norm([cast(Tensor, self._trained[index].grad) for index in held], 2)  # float64 here: eight times slower
        norm = torch.stack([norm.to(self.update_device) for norm in norms] if self.options.offload else norms).double()
        return torch.dot(norm * norm, weights).to(self.device)

    def grad_norm(self) -> Tensor:
        """True global norm of the gradients as they are, unscaled; a sum over the world of its own."""
        norm = collectives.all_reduce_(self._squares()[None], self._agreeing)[0].sqrt()
        return norm if self.loss_scale is None else norm / self.loss_scale.value

    def _local_counts(self, step: Step) -> Tensor:
        return self._vector(list(step.local_counts.values()))

    def _vector(self, numbers: list[float]) -> Tensor:
        """Host numbers on the device, float64, without waiting."""
        return torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)

    def _pack(
        self,
        local: Local,
        squares: Tensor,
        verdicts: Sequence[Tensor],
        flags: Sequence[float] | None,
        measured: Sequence[float],
        following: Step | None,
    ) -> Tensor:
        """[losses, squares, verdicts, next counts, measured by rank]; float64. Ranks with the same samples speak once."""
        sums = local.sums if self._speaks else [value * 0.0 for value in local.sums]  # not zeros: a NaN must be seen wherever it is
        counts = [0.0] * local.num_terms if following is None else [n * self._counts_speak for n in following.local_counts.values()]
        slots = [0.0] * (len(measured) * self._world.size)
        slots[self._world.index * len(measured) : (self._world.index + 1) * len(measured)] = measured
        numbers = [*(flags or _NO_FLAGS), *counts, *slots]
        if numbers != self._host[0]:  # between log points they are mostly those of the step before
            self._host = numbers, self._vector(numbers)
        vector = torch.cat([torch.stack([*sums, squares]), self._host[1]])
        for verdict in verdicts:
            vector[len(sums) + 1 :][: len(Verdict)] += verdict
        return vector

    def _unpack(self, vector: Tensor, local: Local, num_measured: int, step: Step, following: Step | None) -> Report:
        num_sums, num_agreed = len(local.sums), 1 + len(Verdict)
        losses, agreed, rest = vector.split([num_sums, num_agreed, len(vector) - num_sums - num_agreed])
        if following is not None:
            following.counts = rest[: local.num_terms]
        norm = agreed[0].sqrt()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.value
        # where nobody else holds samples the host knows the counts
        has_targets = step.counted().any() if self._data.size > 1 else any(step.local_counts.values())
        by_rank = rest[local.num_terms :].view(self._world.size, num_measured)
        skip = self._gate(agreed, has_targets)
        return Report(losses.view(-1, local.num_terms), step.counted(), norm, agreed[1:], skip, by_rank, step.number + 1)

    def weights(self) -> dict[str, tuple[Tensor, Layout]]:
        """This rank's part of every parameter, and the buffers, which are whole on every rank."""
        held = {name: (parameter.detach(), self.layouts[name]) for name, parameter in self.parameters.items()}
        return held | {name: (buffer, Layout(tuple(buffer.shape))) for name, buffer in self.model.named_buffers()}

    def kept(self) -> dict[str, tuple[Tensor, Layout]]:
        """What compression keeps from step to step; see `stacked`."""
        return stacked({name: x for compressor in self.compressors for name, x in compressor.state().items()}, self.mesh)

    # --- beside training ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, step: Step) -> tuple[Tensor, Seen]:
        """Loss sums and counts of one step [2, terms], none where a rank repeats another's samples; and what metrics are fed with."""
        with self._head.put_off() if self._head else nullcontext():
            sums, seen = self.runner.evaluate(self.context.cut(step))
        seen = [(outputs, batch.targets, valid) for (outputs, _, valid), batch in zip(seen, step.micro, strict=False)]  # whole targets
        return torch.stack([sums * self._speaks, self._local_counts(step) * self._counts_speak]), seen

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Any:
        """Whole outputs of the model, the same on every rank of a tensor group; all of the group must call."""
        return self._whole(self.runner.outputs(map_tensors(self.context.part, inputs)))

    @torch.no_grad()
    def whole_outputs(self, seen: Any) -> Any:
        """Outputs that `evaluate` has seen made whole."""
        return self._whole(self.module.within(self._head.logits, seen) if self._head else seen)

    def _whole(self, outputs: Any) -> Any:
        """Outputs whose vocabulary or sequence is cut made whole."""
        outputs = gather_slice(outputs, self._tp, -1) if self._vocab_cut else outputs
        return map_tensors(self.context.whole, outputs)


_NO_FLAGS = (0.0,) * len(Verdict)
