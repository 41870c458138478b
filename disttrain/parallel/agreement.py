"""One look at the first step under a tensor plan: do ranks that hold the same parameter have the same gradient for it?

A parameter that a tensor plan does not name is whole on every rank of a tensor group, and its gradient must be the
same on each. If it works on activations that the plan has cut (a learned slope between a column and a row layer, a
norm of heads), each rank sees a part only, and training would go on with wrong gradients and without an error.
What moves: one all-gather over `tp` of a number a parameter, once a run. `verify` proves the whole of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.batch_norm import SharedBatchNorm
from disttrain.parallel.layout import Copy, Layout
from disttrain.parallel.mesh import Axis
from disttrain.parallel.tensor import ColumnLinear

SPREAD, FLOOR = 1e-4, 1e-6
"""Largest difference of norms over their size, and of the largest norm, below which a gradient is rounding noise."""


class SameGradients:
    """Called before the first update by every rank of the tensor group; later calls do nothing."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], axis: Axis) -> None:
        self.axis = axis
        whole = {name for name, layout in layouts.items() if isinstance(layout.placements.get(axis.name), Copy)}
        self._parameters = {name: one for name, one in parameters.items() if name in whole and one.requires_grad}

    def __call__(self, *_: Any) -> None:
        """ConfigError, on all ranks alike, for a gradient that differs."""
        parameters, self._parameters = self._parameters, {}
        if not parameters:
            return
        norms = [torch.zeros(()) if one.grad is None else one.grad.norm().double().cpu() for one in parameters.values()]
        device = next(iter(parameters.values())).device
        by_rank = collectives.all_gather(torch.stack([norm.double() for norm in norms]).to(device)[None], self.axis).cpu()
        largest, smallest = by_rank.amax(0), by_rank.amin(0)
        is_off = (largest - smallest > SPREAD * largest) & (largest > FLOOR * largest.nan_to_num(0.0, 0.0, 0.0).max())
        for name, off in zip(parameters, (is_off & by_rank.isfinite().all(0)).tolist(), strict=True):
            if off:
                owner = name.rpartition(".")[0]
                raise ConfigError(
                    f"tensor plan: ranks have different gradients for '{name}', which each holds whole: it works on activations that "
                    "the plan cuts, and each rank sees a part of them",
                    f"'strategy.plan={{{owner}: summed}}'"
                    if owner
                    else "give the parameter a module of its own, and that the style summed",
                )


def first_looks(parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], axis: Axis) -> list[SameGradients]:
    """What is to be called when the first gradients are whole."""
    return [SameGradients(parameters, layouts, axis)] if axis.size > 1 else []


def explain(error: RuntimeError, model: nn.Module, axis: Axis, step: int) -> None:
    """ConfigError if the plan explains a first step that raised `error`: it failed in a module as wide as a layer that is cut."""
    if step or axis.size == 1:
        return
    names = {id(module): name for name, module in model.named_modules()}
    failed, frame = "", error.__traceback__
    while frame is not None:
        failed = names.get(id(frame.tb_frame.f_locals.get("self")), failed)
        frame = frame.tb_next
    module = model.get_submodule(failed)
    width = _width(module)
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnLinear) and not layer.gather and layer.weight.shape[0] * axis.size == width:
            kind = module.plain if isinstance(module, SharedBatchNorm) else type(module)
            what = f"'{failed}', a {kind.__name__} of {width}, was fed {width // axis.size}: it follows '{name}' or its like"
            remedy = "leave the layers around it out of the plan (strategy.plan), or strategy=ddp"
            raise ConfigError(f"tensor plan: {what}, which the plan cuts ({str(error).splitlines()[0]})", remedy) from error


def _width(module: nn.Module) -> int:
    """How many features a module wants; 0 if it does not say."""
    for attribute in ("num_features", "num_channels", "in_features", "num_parameters", "normalized_shape"):
        found = getattr(module, attribute, None)
        if isinstance(found, (int, tuple)):
            return found if isinstance(found, int) else int(found[-1])
    return 0
