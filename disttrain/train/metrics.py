"""torchmetrics in evaluation, made whole over ranks by one exchange of our own.

torchmetrics' own synchronisation gathers state by state: list states of unequal length crash it, and ranks that
updated a different number of times issue different numbers of collectives and hang. Here every rank sends all
its states as bytes, once, however many there are, and a rank that saw nothing sends defaults that count for nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from disttrain.models.task import Task
from disttrain.parallel.collectives import gather_json, gather_tensors
from disttrain.parallel.mesh import Axis

if TYPE_CHECKING:
    from torchmetrics import Metric


class MetricSet:
    """A task's metrics and the config's own, fed with valid samples only."""

    def __init__(self, task: Task, own: Mapping[str, Any], axis: Axis, device: torch.device) -> None:
        """`own`: torchmetrics by name, over the task's of the same name; `axis`: ranks that see different samples.

        The task's metrics, and torchmetrics with them, are imported at the first evaluation.
        """
        self.task = task
        self.own = own
        self.axis = axis
        self.device = device
        self._metrics: dict[str, Metric] | None = None
        self._samples = 0

    @property
    def metrics(self) -> dict[str, Metric]:
        """Every metric by name; a collection is taken apart."""
        if self._metrics is None:
            given = {**self.task.metrics(), **self.own}
            self._metrics = {}
            for name, metric in given.items():
                parts = {f"{name}_{part}": one for part, one in metric.items()} if hasattr(metric, "items") else {name: metric}
                for part, one in parts.items():
                    for inner in _parts(one):
                        inner.distributed_available_fn = lambda: False  # the exchange is ours
                    self._metrics[part] = one.to(self.device)
        return self._metrics

    def update(self, outputs: Any, targets: Any, valid: Tensor | None) -> None:
        """Add the samples of one batch for which `valid` [micro] holds (None: all)."""
        metrics = self.metrics
        if not metrics:
            return
        if valid is not None:
            outputs, targets = pytree.tree_map(lambda x: x[valid], (outputs, targets))
        samples = int(pytree.tree_leaves(targets)[0].shape[0])
        if samples:
            self._samples += samples
            for metric in metrics.values():
                metric.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """Values over the whole axis, the same on every rank, as a single process would find them; then all begin anew."""
        metrics = self.metrics
        if not metrics:
            return {}
        synchronise([part for metric in metrics.values() for part in _parts(metric)], self._samples, self.axis, self.device)
        found: dict[str, float] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            for name, metric in metrics.items():
                found |= _floats(name, metric.compute())
                metric.reset()
        self._samples = 0
        return found


def synchronise(metrics: list[Metric], samples: int, axis: Axis, device: torch.device) -> None:
    """Give every rank of the axis the state that one process with all samples would have. Two gathers in all.

    `samples`: how many this rank has put in; every rank calls, with the same metrics in the same order.
    """
    if axis.size == 1:
        return
    mine = [(index, name, getattr(metric, name)) for index, metric in enumerate(metrics) for name in sorted(metric._defaults)]
    sent = [state if isinstance(state, list) else [state] for _, _, state in mine]
    parts = [(count, states) for count, states in _exchange(samples, sent, axis, device) if count]
    for number, (index, name, state) in enumerate(mine):
        by_rank = [(count, states[number]) for count, states in parts]
        if isinstance(state, list):
            setattr(metrics[index], name, [element for _, elements in by_rank for element in elements])
        elif by_rank:
            reduction = metrics[index]._reductions[name]
            setattr(metrics[index], name, _reduce([(count, elements[0]) for count, elements in by_rank], reduction))
    for metric in metrics:
        metric._update_count = max(metric._update_count, len(parts))


def _exchange(samples: int, sent: list[list[Tensor]], axis: Axis, device: torch.device) -> list[tuple[int, list[list[Tensor]]]]:
    """(samples, states) of every rank: shapes and types as JSON, then all numbers as one string of bytes."""
    shapes = [[(list(x.shape), str(x.dtype).removeprefix("torch.")) for x in elements] for elements in sent]
    flat = [
        x.detach().to(device).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for elements in sent
        for x in elements
    ]
    given = gather_json({"samples": samples, "shapes": shapes}, axis, device)
    texts = gather_tensors(torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *flat]), axis)
    return [(one["samples"], _unpack(one["shapes"], text)) for one, text in zip(given, texts, strict=True)]


def _unpack(shapes: list[list[tuple[list[int], str]]], text: Tensor) -> list[list[Tensor]]:
    start, states = 0, []
    for elements in shapes:
        state = []
        for shape, dtype_name in elements:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            # A copy of its own, because a view of another type must begin at a multiple of its size.
            state.append(text[start : start + size].clone().view(dtype).reshape(shape))
            start += size
        states.append(state)
    return states


def _reduce(by_rank: list[tuple[int, Tensor]], reduction: Any) -> Tensor:
    """States of the ranks that saw samples as one. A mean weighs each by its samples; without a reduction they are stacked."""
    from torchmetrics.utilities.data import dim_zero_mean

    states = torch.stack([state for _, state in by_rank])
    if len(by_rank) == 1:
        return states[0]
    if reduction is dim_zero_mean:
        weights = torch.tensor([float(count) for count, _ in by_rank], dtype=states.dtype, device=states.device)
        reduction = functools.partial(torch.tensordot, weights / weights.sum(), dims=1)
    reduced: Tensor = states if reduction is None else reduction(states)
    return reduced


def _parts(metric: Metric) -> list[Metric]:
    """The metric and those inside it (wrappers and sums of metrics keep their states in children)."""
    from torchmetrics import Metric as Base

    return [module for module in metric.modules() if isinstance(module, Base)]


def _floats(name: str, value: Any) -> dict[str, float]:
    """A metric's value as numbers: a mapping by its keys, a vector by index."""
    if isinstance(value, Mapping):
        return {key: number for part, one in value.items() for key, number in _floats(f"{name}_{part}", one).items()}
    numbers = torch.as_tensor(value).reshape(-1).tolist()
    return {name: float(numbers[0])} if len(numbers) == 1 else {f"{name}_{index}": float(one) for index, one in enumerate(numbers)}
