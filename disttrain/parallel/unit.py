"""A unit of a sharded model: parameters that travel as one flat buffer. FSDP2's collectives for it go through ours.

So its bytes are counted like all others, strided memory can't slip in, and gradients of different parameters are
never added up: a buffer that is shorter than the unit's is refused before it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.parallel.options import Options

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

SHARD, REPLICATE = "dp_shard", "replicate"
"""The axis that cuts, and the one over which shards are the same."""

GATHERED: Mapping[str, torch.dtype | None] = {"weights": None, "bf16": torch.bfloat16}
"""What `strategy.gather_dtype` names; None is the weights' own type."""

Place = tuple[nn.Module, str]
"""A module and the name under which a parameter stands in it."""


def places_of(module: nn.Module) -> Iterator[tuple[nn.Parameter, Place]]:
    """Every parameter with every place where it stands."""
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield parameter, (owner, key)


def at(place: Place) -> nn.Parameter:
    """The parameter that stands there now: this rank's shard, or the whole one while its unit is gathered."""
    owner, key = place
    parameter = owner._parameters[key]
    assert parameter is not None
    return parameter


class Unit:
    """Parameters that travel as one flat buffer: FSDP2's collectives for them go through ours, counted and checked."""

    def __init__(self, module: nn.Module, places: Mapping[str, Place], mesh: Mesh, options: Options) -> None:
        self.fsdp: FSDPModule = module  # type: ignore[assignment]
        self.heard: set[str] = set()
        """Parameters whose gradients have come in this step."""
        self._places = {name: place for name, place in places.items() if at(place).requires_grad}
        shard, replicate = mesh.axis(SHARD), mesh.axis(REPLICATE)
        wanted = sum(_padded(at(place).shape, shard.size) for place in self._places.values())
        self.fsdp.set_gradient_divide_factor(1.0)
        self.fsdp.set_force_sum_reduction_for_comms(True)
        self.fsdp.set_custom_all_gather(_Gather(shard, GATHERED[options.gather_dtype]))  # type: ignore[arg-type]
        self.fsdp.set_custom_reduce_scatter(_Scatter(shard, wanted, self.unheard))  # type: ignore[arg-type]
        if options.find_unused_parameters:
            _scatter_zeros(self.fsdp)
        if replicate.size > 1:  # FSDP2 makes this sum itself, on a stream of its own
            self.fsdp.set_all_reduce_hook(lambda reduced: replicate.count("all_reduce", reduced.nbytes))
        self._first_forward = module.register_forward_pre_hook(self._listen)

    def _listen(self, module: nn.Module, inputs: Any) -> None:
        """At the first forward, when whole weights exist, ask to be told of their gradients."""
        self._first_forward.remove()
        for name, place in self._places.items():
            at(place).register_post_accumulate_grad_hook(partial(self._hear, name))

    def _hear(self, name: str, parameter: Tensor) -> None:
        self.heard.add(name)

    def unheard(self) -> list[str]:
        """Parameters without a gradient of this rank's in this step."""
        return [name for name in self._places if name not in self.heard]


class _Traffic:
    """What FSDP2 asks of a collective that it is given: memory, and the call."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Traffic):
    """A unit's weights, made whole; rounded to `wire` on the way, if that is asked for, and in their own type again."""

    def __init__(self, axis: Axis, wire: torch.dtype | None) -> None:
        super().__init__(axis)
        self.wire = wire

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        if self.wire is None or not input_tensor.is_floating_point():  # weights of several types come as bytes
            return collectives.all_gather_into(output_tensor, input_tensor, self.axis, async_op)
        rounded = output_tensor.new_empty(output_tensor.shape, dtype=self.wire)
        collectives.all_gather_into(rounded, input_tensor.to(self.wire), self.axis)
        output_tensor.copy_(rounded)
        return None


class _Scatter(_Traffic):
    """A unit's gradients, summed and shared out; ConfigError where some are missing, because ranks would add up different ones."""

    def __init__(self, axis: Axis, wanted: int, unheard: Callable[[], list[str]]) -> None:
        """`wanted`: elements of a whole buffer; `unheard`: who is missing."""
        super().__init__(axis)
        self.wanted = wanted
        self.unheard = unheard

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> None:
        assert op == dist.ReduceOp.SUM, "gradients are sums"
        if input_tensor.numel() != self.wanted:
            raise took_no_part(self.unheard())
        collectives.reduce_scatter_into(output_tensor, input_tensor, self.axis)


def _scatter_zeros(unit: FSDPModule) -> None:
    """Let parameters that this rank's backward left out take part with zeros. ConfigError where torch can't."""
    if not hasattr(unit, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"strategy.find_unused_parameters=true with strategy.dp_shard needs torch 2.13 or later, and this is {torch.__version__}",
            "strategy=ddp, or pip install 'torch>=2.13'",
        )
    unit.set_reduce_scatter_unused_params(True, recurse=False)


def took_no_part(names: Sequence[str]) -> ConfigError:
    """The mistake of parameters that a backward left out."""
    return ConfigError(
        f"these parameters took no part in the loss of a step, so ranks would add up different gradients: {', '.join(sorted(names))}",
        "strategy.find_unused_parameters=true, or freeze them with requires_grad_(False)",
    )


def _padded(shape: torch.Size, size: int) -> int:
    """Elements of a tensor whose rows are filled up to a multiple of `size`."""
    return -(-shape[0] // size) * size * shape[1:].numel()
