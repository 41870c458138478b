"""The same start in every layout: each rank draws, or cuts out, just the pieces that it keeps.

A model that offers `init_parameter` is built on the meta device. Its whole start is defined as fixed blocks of
rows, each drawn on the CPU in float32 from a generator keyed by (seed, name, block), so that no rank draws a
whole 70-billion-parameter model. Any other model was built whole, under the seed, and is cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from disttrain.parallel import collectives
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Axis
from disttrain.parallel.random import mix

BLOCK_ELEMENTS = 1 << 18
"""About how many numbers one generator draws."""

InitParameter = Callable[[str, tuple[int, ...], range, torch.Generator], Tensor]


class ShapesOnly(TorchFunctionMode):
    """Modules built inside leave out their random start, which on the meta device would only import torch's compiler (a second)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Functions of torch.nn.init return their tensor as it is."""
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def start_alike(model: nn.Module, world: Axis, device: torch.device) -> None:
    """Give every rank rank 0's values of what was built whole: two processes need not have built the same."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and world.group is not None:
                tensor.copy_(collectives.broadcast(tensor.detach().to(device), world))


def share_buffers(model: nn.Module, data: Axis) -> None:
    """One set of buffers for all data ranks, the first one's: those that no layer shares are each rank's own between."""
    for buffer in model.buffers():
        if data.group is not None and buffer.is_floating_point():
            buffer.copy_(collectives.broadcast(buffer, data))


def materialise(
    model: nn.Module, layouts: Mapping[str, Layout], at: Mapping[str, int], seed: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Give every parameter its local values, in place of the whole (or meta) ones; tied parameters stay one object.

    Without a `seed` memory is allocated and left as it is.
    """
    init: InitParameter | None = getattr(model, "init_parameter", None)
    made: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                name = names[id(parameter)]
                local = _local_values(name, parameter.detach(), layouts[name], at, init, seed, dtype).to(device)
                if parameter.is_meta:
                    made[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
                else:  # the object stays: the model may hold it elsewhere too
                    parameter.data = local
                    made[id(parameter)] = parameter
            module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                assert not buffer.is_meta, f"buffer '{key}' has no values: a model with init_parameter can't have buffers"
                module._buffers[key] = buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype)


def _local_values(
    name: str, whole: Tensor, layout: Layout, at: Mapping[str, int], init: InitParameter | None, seed: int | None, dtype: torch.dtype
) -> Tensor:
    local = torch.empty(layout.local_shape(at), dtype=dtype)
    if seed is None:
        return local
    for source, target in layout.pieces(at):
        if whole.is_meta:
            assert init is not None, f"'{name}' is on the meta device and the model has no init_parameter"
            local[target] = _draw(name, layout.shape, source, init, seed).to(dtype)
        else:
            local[target] = whole[source].to(dtype)
    return local


def _draw(name: str, shape: tuple[int, ...], wanted: tuple[slice, ...], init: InitParameter, seed: int) -> Tensor:
    """The block `wanted` of the whole start of one parameter, float32."""
    row_elements = max(1, torch.Size(shape[1:]).numel())
    rows_per_block = max(1, BLOCK_ELEMENTS // row_elements)
    parts = []
    for block in range(wanted[0].start // rows_per_block, -(-wanted[0].stop // rows_per_block)):
        first, last = block * rows_per_block, min((block + 1) * rows_per_block, shape[0])
        generator = torch.Generator().manual_seed(mix(seed, zlib.crc32(name.encode()), block))
        rows = init(name, shape, range(first, last), generator)
        assert rows.shape == (last - first, *shape[1:]), f"init_parameter('{name}') returned {tuple(rows.shape)}"
        low, high = max(first, wanted[0].start), min(last, wanted[0].stop)
        parts.append(rows[(slice(low - first, high - first), *wanted[1:])])
    return torch.cat(parts)
