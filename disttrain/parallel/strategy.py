"""One step in any layout: what is applied to a model, in which order, and how the ranks agree on its numbers.

Order of application, and why:
  1. tensor plan     changes what a layer is; whatever wraps a layer must see its parallel form
  2. materialise     once shapes are local, so that no rank ever holds a whole model that it will cut
  3. reducer         last: it hooks the parameters that exist by then

A step, on every rank: `count` the valid targets of the whole global batch (they ride on the step before);
`forward_backward` every micro-batch; `finish`: sum what gradients are still in parts, then one vector over the
world with losses, squares, verdicts and the next step's counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.models.task import IGNORED, Classification, Task
from disttrain.parallel import collectives
from disttrain.parallel.data import LossModule, Reducer
from disttrain.parallel.layout import Copy, Layout, Placement, Sum
from disttrain.parallel.materialise import materialise
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.pairs import gather_slice
from disttrain.parallel.plan import apply_tensor_plan, vocabulary_stays_cut
from disttrain.parallel.random import Streams
from disttrain.parallel.step import Local, Report, Step, Verdict
from disttrain.parallel.tensor import OwnRandom
from disttrain.parallel.update import LossScale
from disttrain.parallel.vocabulary import vocab_cross_entropy


@dataclass(frozen=True)
class Options:
    """The strategies' own knobs (config group `strategy`)."""

    sequence_parallel: bool = False
    plan: Mapping[str, str] = field(default_factory=dict)
    bucket_size: float = 25.0
    find_unused_parameters: bool = False


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
        self._world, self._data, self._tp = mesh.axis("world"), mesh.axis("data"), mesh.axis("tp")
        self.streams = Streams(seed, device, self._data.index, self._tp.index)
        self._speaks = 1.0 if self._tp.index == 0 else 0.0
        self._go_or_skip = torch.zeros((), device=device), torch.ones((), device=device)

    # --- before the first step ---------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, task: Task, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        """Lay `model` (on the meta device, or whole; rank 0's start then holds) out on the mesh; it is changed in place."""
        self.model, self.task, self.dtype, self.loss_scale = model, task, dtype, loss_scale
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(f"{type(model).__name__} has no parameter to train: all are frozen, or there are none")
        self._start_alike()
        placements = self._cut_tensors()
        degrees = {"data": self._data.size, "tp": self._tp.size}
        names = [name for name, _ in model.named_parameters()]
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name in names:
            by_axis: dict[str, Placement] = {}
            if self._tp.size > 1:
                by_axis["tp"] = placements.get(name, Copy())
            if self._data.size > 1:
                by_axis["data"] = Sum(done=True)
            self.layouts[name] = Layout(shapes[name], by_axis, {axis: degrees[axis] for axis in by_axis})
        materialise(model, self.layouts, self.mesh.coordinate(), self.seed, self.device, dtype)
        self.parameters = dict(model.named_parameters())
        self._plan_reduction()
        self.module = LossModule(model, task)
        self.reducer = None
        if self._data.group is not None and self._trained:
            trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
            self.reducer = Reducer(trained, self._data, self.options.bucket_size, self.options.find_unused_parameters)

    def _start_alike(self) -> None:
        """Give every rank rank 0's values of what was built whole: two processes need not have built the same."""
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if not tensor.is_meta and self._world.group is not None:
                    tensor.copy_(collectives.broadcast(tensor.detach().to(self.device), self._world))

    def share_buffers(self) -> None:
        """One set of buffers for all data ranks, the first one's: batch statistics are each rank's own between."""
        for buffer in self.model.buffers():
            if self._data.group is not None and buffer.is_floating_point():
                buffer.copy_(collectives.broadcast(buffer, self._data))

    def _cut_tensors(self) -> dict[str, Placement]:
        """Apply the tensor plan: the config's patterns over the model's own."""
        self._vocab_cut = False
        if self._tp.size == 1:
            return {}
        own_loss = getattr(type(self.task), "losses", None)
        plan, self._vocab_cut = vocabulary_stays_cut(
            self.model, dict(getattr(self.model, "plan", {})) | dict(self.options.plan), own_loss is Classification.losses
        )
        if self._vocab_cut:
            self.task.row_loss = vocab_cross_entropy(self._tp, IGNORED)  # type: ignore[attr-defined]
        return apply_tensor_plan(self.model, plan, self._tp, self.options.sequence_parallel, self.streams)

    def _plan_reduction(self) -> None:
        """What `finish` does to gradients: which are still in parts over which axis, and each one's weight in the norm."""
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._trained = list(trained.values())
        weights = [self.layouts[name].weight() for name in trained]
        self._norm_weights = torch.tensor(weights, dtype=torch.float64, device=self.device)
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
        sums: list[Tensor] = []
        for index, batch in enumerate(step.micro):
            if self.reducer is not None and index == len(step.micro) - 1:
                self.reducer.arm()
            terms = list(self.module(batch.inputs, batch.targets).values())
            parts = [torch.dot(term, _valid(_each(weight, term), batch.valid)) for term, weight in zip(terms, weights, strict=True)]
            sum(parts[1:], parts[0]).backward()
            sums.extend(_valid(term.detach(), batch.valid).sum(dtype=torch.float64) for term in terms)
        return Local(sums, len(weights))

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
        """Complete the gradients of `step`, then agree on everything else in one sum over the world.

        `verdicts`: counters [4] of this rank's policies; `flags`: its host requests; `measured`: its values of this
        step (as many on every rank); `following`: the next step, whose counts ride along.
        """
        self._complete_gradients()
        vector = self._pack(local, self._squares(), verdicts, flags, measured, following)
        collectives.all_reduce_(vector, self._world)
        return self._unpack(vector, local, len(measured), step, following)

    def _complete_gradients(self) -> None:
        """Sum gradients that are in parts over an axis: the reducer's buckets; then norms and row biases under sequence parallelism."""
        if self.reducer is not None:
            self.reducer.finish()
        for name, parameters in self._in_parts.items():
            axis = self.mesh.axis(name)
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not grads:
                continue
            buffer = collectives.all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]), axis)
            for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _squares(self) -> Tensor:
        """Float64 sum of squares of this rank's gradients, each element weighted by 1 / replicas."""
        held = [index for index, parameter in enumerate(self._trained) if parameter.grad is not None]
        if not held:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        weights = self._norm_weights if len(held) == len(self._trained) else self._norm_weights[held]
        norms = torch._foreach_norm([cast(Tensor, self._trained[index].grad) for index in held], 2)  # float64 here: eight times slower
        norm = torch.stack(norms).double()
        return torch.dot(norm * norm, weights)

    def grad_norm(self) -> Tensor:
        """True global norm of the gradients as they are, unscaled; a sum over the world of its own."""
        norm = collectives.all_reduce_(self._squares()[None], self._world)[0].sqrt()
        return norm if self.loss_scale is None else norm / self.loss_scale.value

    def _local_counts(self, step: Step) -> Tensor:
        return self._vector(list(step.local_counts.values()))

    def _vector(self, numbers: list[float]) -> Tensor:
        """Host numbers on the device, float64, without waiting."""
        vector = torch.tensor(numbers, dtype=torch.float64)
        return vector if self.device.type == "cpu" else vector.to(self.device, non_blocking=True)

    def _pack(
        self,
        local: Local,
        squares: Tensor,
        verdicts: Sequence[Tensor],
        flags: Sequence[float] | None,
        measured: Sequence[float],
        following: Step | None,
    ) -> Tensor:
        """[losses, squares, next counts, verdicts, measured by rank]; float64. Ranks with the same samples speak once."""
        sums = local.sums if self._speaks else [value * 0.0 for value in local.sums]  # not zeros: a NaN must be seen wherever it is
        counts = [0.0] * local.num_terms if following is None else [n * self._speaks for n in following.local_counts.values()]
        slots = [0.0] * (len(measured) * self._world.size)
        slots[self._world.index * len(measured) : (self._world.index + 1) * len(measured)] = measured
        host = self._vector([*counts, *(flags or _NO_FLAGS), *slots])
        vector = torch.cat([torch.stack([*sums, squares]), host])
        for verdict in verdicts:
            vector[len(sums) + 1 + len(counts) :][: len(Verdict)] += verdict
        return vector

    def _unpack(self, vector: Tensor, local: Local, num_measured: int, step: Step, following: Step | None) -> Report:
        counts = step.counted()
        losses, squares, next_counts, verdict, measured = vector.split(
            [len(local.sums), 1, local.num_terms, len(Verdict), num_measured * self._world.size]
        )
        if following is not None:
            following.counts = next_counts
        norm = squares[0].sqrt()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.value
        skip = torch.where(norm.isfinite() & counts.any() & (verdict[_SKIP] == 0), *self._go_or_skip)
        by_rank = measured.view(self._world.size, num_measured)
        return Report(losses.view(-1, local.num_terms), counts, norm, verdict, skip, by_rank)

    def weights(self) -> dict[str, tuple[Tensor, Layout]]:
        """This rank's part of every parameter, and the buffers, which are whole on every rank."""
        held = {name: (parameter.detach(), self.layouts[name]) for name, parameter in self.parameters.items()}
        return held | {name: (buffer, Layout(tuple(buffer.shape))) for name, buffer in self.model.named_buffers()}

    def own_random_modules(self) -> set[str]:
        """Modules that draw from the rank's own stream, by plain name."""
        return {name for name, module in self.model.named_modules() if isinstance(module, OwnRandom)}

    # --- beside training ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, step: Step) -> tuple[Tensor, list[tuple[Any, Any, Tensor | None]]]:
        """Loss sums and counts of one step [2, terms], and (outputs, targets, valid) of each micro-batch for metrics.

        A rank that repeats another's samples adds nothing to the sums.
        """
        sums = torch.zeros(2, len(step.local_counts), dtype=torch.float64, device=self.device)
        seen = []
        for batch in step.micro:
            outputs = self.module.outputs(batch.inputs)
            terms = self.task.losses(outputs, batch.targets)
            sums[0] += torch.stack([_valid(per_sample, batch.valid).sum().double() for per_sample in terms.values()])
            seen.append((outputs, batch.targets, batch.valid))
        sums[1] += self._local_counts(step)
        return sums * self._speaks, seen

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Any:
        """Whole outputs of the model, the same on every rank of a tensor group; all of the group must call."""
        return self.whole_outputs(self.module.outputs(inputs))

    def whole_outputs(self, outputs: Any) -> Any:
        """Outputs with a vocabulary that is cut made whole."""
        return gather_slice(outputs, self._tp, -1) if self._vocab_cut else outputs


_NO_FLAGS = (0.0,) * len(Verdict)
_SKIP = int(Verdict.SKIP)


def _each(weight: Tensor | float, term: Tensor) -> Tensor:
    """The weight for each sample of a term."""
    return torch.full_like(term, weight) if isinstance(weight, float) else weight.to(term.dtype).expand(len(term))


def _valid(per_sample: Tensor, valid: Tensor | None) -> Tensor:
    """Per-sample sums with void samples at zero, even where theirs is not finite."""
    return per_sample if valid is None else per_sample.masked_fill(~valid, 0.0)
