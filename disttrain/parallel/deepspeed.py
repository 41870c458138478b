"""The step handed to DeepSpeed's engine: it runs forward and backward, sums gradients, clips and updates (strategy.deepspeed).

ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054), stages 1 and 2 in its section 5.

What is cut: the batch; under stage 1 the optimizer's moments, under 2 gradients too. The engine lays the weights of an
optimizer group into one flat buffer, padded to n equal parts, of which rank r updates the r-th, in a float32 copy of its
own. What each rank holds: whole weights and gradients, and 1/n of moments and master weights. What moves, P bytes of
weights, m micro-batches, of which a rank sends (n-1)/n: stage 0 all-reduces gradients once a step, 2 P; stage 1 all-reduces
them once and all-gathers weights, 3 P; stage 2 all-reduces every micro-batch's, (2 m + 1) P. That is what DeepSpeed 0.19
does by itself; with `use_multi_rank_bucket_allreduce: false` in its JSON it reduces each part to its owner, in half the
bytes: 2 P and (m + 1) P. The engine does this on a group of its own, and the ledger counts it on the axis `grad`.

What is ours: the loss. Its weights are 1 / (valid targets of the global batch), so gradients must be sums over ranks; the
engine takes means, so weights are multiplied by the number of ranks. Ours too are the norm in the log (from each rank's
part, before the update, so that a skip is agreed on as everywhere), the rate, evaluation, and checkpoints, whose moments
are whole again: any layout reads them, and this one reads any layout's.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.config.deepspeed import Batch, filled_in, fp16
from disttrain.errors import CheckpointError, ConfigError
from disttrain.models.micro_batch import MicroBatch, running
from disttrain.models.task import Task
from disttrain.parallel.flat import FlatGroups
from disttrain.parallel.layout import Layout
from disttrain.parallel.loop import Loop, LossModule, weighted
from disttrain.parallel.mesh import Axis
from disttrain.parallel.step import Local, Report, Step
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.update import LossScale, Update

SENT = {"all_reduce": "tensor", "reduce": "tensor", "all_gather_into_tensor": "output_tensor"}
"""Collectives that its stages 0 to 2 are made of, and the argument of each that is the whole tensor."""
MOST_IN_A_BUCKET = 500_000_000
"""DeepSpeed's own `reduce_bucket_size`, elements: it allocates as many, so a smaller model asks for its own number."""


class DeepSpeedStrategy(Strategy):
    """A model that every rank holds whole, whose gradients and update are the engine's affair."""

    def prepare(self, model: nn.Module, task: Task, dtype: torch.dtype, loss_scale: LossScale | None = None, draws: bool = True) -> None:
        """As any strategy; the engine itself starts with the optimizer, in `EngineUpdate`."""
        if loss_scale is not None:
            raise fp16("callbacks.amp.precision")
        replicas = self.mesh.axis("dp_replicate").size
        if replicas < 2 or replicas != self.mesh.size:
            raise ConfigError("DeepSpeed's engine takes the axis dp_replicate, of two or more ranks, and no other", "strategy=deepspeed")
        if dtype != torch.float32:
            raise ConfigError(f"DeepSpeed's engine keeps its master weights in float32, and weights are {dtype}", "train.dtype=float32")
        super().prepare(model, task, dtype, draws=draws)
        self.runner: EngineLoop = EngineLoop(self.module, self._data.size, self.parameters)

    def _gradient_syncs(self, roots: Sequence[nn.Module]) -> list[Any]:
        """None: the engine sums gradients."""
        return []

    def _squares(self) -> Tensor:
        flat = self.runner.flat
        if flat is None or any(parameter.grad is not None for parameter in self._trained):
            return super()._squares()
        return flat.squares()


class EngineLoop(Loop):
    """One micro-batch after the other, forward and backward by the engine."""

    engine: Any
    """DeepSpeed's; see `EngineUpdate`."""
    flat: FlatGroups | None = None
    """How ZeRO lays parameters out; None under stage 0."""

    def __init__(self, module: LossModule, num_ranks: int, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(module, ())
        self._num_ranks = num_ranks
        self._unused = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._trained = frozenset(self._unused)
        for name in self._trained:
            parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._unused.discard(name))

    def train(self, step: Step, weights: Sequence[Tensor | float]) -> Local:
        """See `Runner`. The engine takes means over ranks of what are sums here."""
        self._unused |= self._trained
        sums: list[Tensor] = []
        by_term = {term: weight * self._num_ranks for term, weight in zip(step.local_counts, weights, strict=True)}
        last = len(step.micro) - 1
        for index, batch in enumerate(step.micro):
            self.engine.set_gradient_accumulation_boundary(index == last)
            with running(MicroBatch(batch.valid, by_term)) as micro:
                terms = self.engine(batch.inputs, batch.targets)
                loss = weighted(list(terms.values()), [by_term[term] for term in terms], batch.valid)
                self.engine.backward(loss, scale_wrt_gas=False)
            sums.extend(micro.sums_with(terms, by_term))
        if self._unused:
            raise ConfigError(
                "these parameters took no part in the loss of a step, and the engine would update them as if their gradient were zero: "
                + ", ".join(sorted(self._unused)),
                "strategy=ddp strategy.find_unused_parameters=true, or freeze them with requires_grad_(False)",
            )
        return Local(sums, len(weights))


class EngineUpdate(Update):
    """The engine clips and steps. A skip, and weights or gradients that others have written to, are brought to it first."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factors: Tensor, clip_norm: float | None, strategy: DeepSpeedStrategy, batch: Batch
    ) -> None:
        """Start the engine around `optimizer`, for a prepared strategy and steps of this `batch`."""
        assert strategy.options.deepspeed is not None
        super().__init__(optimizer, factors, clip_norm, None)
        zero = strategy.options.zero
        said = filled_in(strategy.options.deepspeed, "strategy.deepspeed", batch, clip_norm, zero)
        said["zero_optimization"].setdefault("reduce_bucket_size", min(MOST_IN_A_BUCKET, sum(one.numel() for one in self._parameters)))
        self._loop = strategy.runner
        self._engine = self._loop.engine = _start(strategy.module, optimizer, said, strategy.device, strategy.mesh.axis("grad"))
        self._flat = None
        if zero:
            optimizer.state.clear()  # what was kept for parameters that are now parts of a flat one
            names = {parameter: name for name, parameter in strategy.parameters.items()}
            self._flat = self._loop.flat = FlatGroups(self._engine.optimizer, names, strategy.mesh.axis("data"))
            self.sharing = strategy.mesh.axis("data").size

    @property
    def honours_skip(self) -> bool:
        """The engine reads from the device every step."""
        return False

    def __call__(self, report: Report) -> None:
        """The engine's step, or its way of leaving one out."""
        self._set_rates()
        skip = bool(report.skip)
        if self._flat is not None:
            self._engine.optimizer.refresh_fp32_params()  # a load writes to weights, and the engine updates a copy
            given = {name: one.grad for group in self._flat.groups for name, one in group.items() if one.grad is not None}
            if given:
                self._flat.set_gradients(given)
            if skip:
                self._flat.spoil_gradients()
            self._forget()
        if self._flat is not None or not skip:
            self._engine.step()
        self._forget()
        self.num_calls += 1
        self.updates += report.skip.logical_not()

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def show_gradients(self) -> None:
        """Whole gradients in `.grad`, where the engine has shared them out."""
        if self._flat is not None:
            for name, gradient in self._flat.gradients():
                next(group[name] for group in self._flat.groups if name in group).grad = gradient.clone()

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state_tensors(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]) -> dict[str, tuple[Tensor, Layout]]:
        """Moments made whole, as the parameters lie; scalars once for each parameter. Every rank calls it."""
        if self._flat is None:
            return super().state_tensors(parameters, layouts)
        found: dict[str, tuple[Tensor, Layout]] = {}
        for index, part in enumerate(self._flat.parts):
            for key, value in self.optimizer.state.get(part, {}).items():
                if isinstance(value, Tensor) and value.shape == part.shape:
                    found |= {f"{name}/{key}": (whole, layouts[name]) for name, whole in self._flat.whole(index, value)}
                elif isinstance(value, Tensor):
                    found |= {f"{name}/{key}": (value.clone(), Layout(tuple(value.shape))) for name in self._flat.groups[index]}
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's part of each moment. CheckpointError for counts that differ within a group, which has one here."""
        if self._flat is None:
            return
        for index, part in enumerate(self._flat.parts):
            for key, value in self.optimizer.state.get(part, {}).items():
                if isinstance(value, Tensor):
                    loaded = {name: tensors[f"{name}/{key}"] for name in self._flat.groups[index]}
                    value.copy_(self._flat.part(index, loaded) if value.shape == part.shape else _same(key, list(loaded.values())))

    def make_state(self, parameters: Sequence[nn.Parameter]) -> None:
        """Moments of every group, before a load fills them: an update with gradients of zero, of weights that are then read anew."""
        if self._flat is None:
            super().make_state(parameters)
            self.optimizer.found_inf = None  # type: ignore[attr-defined]  # it stays on the optimizer, which the engine only calls
            return
        if not parameters:
            return
        for part in self._flat.parts:
            part.grad = torch.zeros_like(part)
        self.optimizer.step()
        for part in self._flat.parts:
            part.grad = None

    def state_by_name(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
        """As the base's, a flat group's numbers once for each of its parameters."""
        if self._flat is None:
            return super().state_by_name(parameters)
        groups = zip(self._flat.groups, self._flat.parts, strict=True)
        return {name: kept for group, part in groups if (kept := self._plain_state(part)) for name in group}

    def load_by_name(self, parameters: Mapping[str, nn.Parameter], state: Mapping[str, dict[str, Any]]) -> None:
        """Take up `state_by_name`."""
        if self._flat is None:
            super().load_by_name(parameters, state)
            return
        for group, part in zip(self._flat.groups, self._flat.parts, strict=True):
            for name in group:
                self.optimizer.state[part].update(state.get(name, {}))


def _same(key: str, values: Sequence[Tensor]) -> Tensor:
    """The one value of a group's parameters."""
    if any(not torch.equal(one, values[0]) for one in values):
        found = f"parameters of one group have made different numbers of updates ({key}), and DeepSpeed's engine counts one for all"
        raise CheckpointError(found, "strategy=ddp, or init_from=<it> to start anew from its weights")
    return values[0]


def _start(module: LossModule, optimizer: torch.optim.Optimizer, said: dict[str, Any], device: torch.device, axis: Axis) -> Any:
    """DeepSpeed's engine, on the process group that is there. ConfigError, in one message, where it can't run.

    What it sends from now on is counted on `axis`.
    """
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # it calls torch's collectives by names that newer versions have others for
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed
        from deepspeed import ops

        if device.type == "cpu":
            ops.__compatible_ops__ = {}  # none is compiled: the only one that it would load serves inference
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=said)
        for name, whole in SENT.items():
            setattr(deepspeed.comm.comm.cdb, name, _counted(deepspeed.comm.comm.cdb, name, whole, axis))
    except Exception as error:
        says = str(error).strip().splitlines() or [type(error).__name__]
        found = f"DeepSpeed's engine can't run here: {type(error).__name__}: {says[0]}"
        raise ConfigError(found, "strategy=fsdp strategy.zero=1, which needs nothing but torch") from error
    return engine


def _counted(backend: Any, name: str, whole: str, axis: Axis) -> Callable[..., Any]:
    """The collective `name` of DeepSpeed's `backend`, in the ledger; `whole`: the argument that is the whole tensor."""
    own = getattr(type(backend), name).__get__(backend)

    def collective(*args: Any, **kwargs: Any) -> Any:
        axis.count(name.removesuffix("_into_tensor"), (kwargs[whole] if whole in kwargs else args[0]).nbytes)
        return own(*args, **kwargs)

    return collective
