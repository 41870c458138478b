"""Data parallelism: every rank holds the whole model (or its tensor shard) and sees its slice of the global batch.

What is cut: the batch. What moves: the gradients, all-reduced once a step, after the last micro-batch's
backward, in buckets that travel while backward goes on: 2(n-1)/n of the parameters' bytes (Li et al. 2020,
arXiv:2006.15704). torch's DistributedDataParallel divides by n; every loss weight here is multiplied by n
first, so gradients come out as sums over the global batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from disttrain.models.task import Task
from disttrain.parallel.mesh import Axis


class LossModule(nn.Module):
    """Model and task in one forward: what a strategy wraps, so that every layout computes the loss in the same place."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.contexts: list[Any] = []
        self._double = any(parameter.dtype == torch.float64 for parameter in model.parameters())

    def forward(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """Per-sample loss sums [micro], by term."""
        return dict(self.task.losses(self.outputs(inputs), targets))

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs under the policies' contexts. Data is float32; a proof's weights are float64, and so are then its inputs."""
        if self._double:
            inputs = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, inputs)
        contexts = [make() for make in self.contexts]
        for context in contexts:
            context.__enter__()
        try:
            return self.model(inputs)
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)


def wrap(
    module: LossModule, axis: Axis, device: torch.device, *, bucket_size: float, static_graph: bool, find_unused_parameters: bool
) -> nn.Module:
    """The module with its gradients summed over the axis (divided by its size) in backward."""
    if axis.group is None or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=axis.group,
        bucket_cap_mb=bucket_size,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        init_sync=False,
    )


def last_only(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around the forward and backward of a micro-batch: gradients travel with the step's last one only."""
    if last or not isinstance(module, DistributedDataParallel):
        return nullcontext()
    return module.no_sync()
