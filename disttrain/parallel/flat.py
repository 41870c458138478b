"""How DeepSpeed's ZeRO, stages 1 and 2, lays out what it shares: what `deepspeed.py` reads and writes there.

The parameters of an optimizer group lie behind each other in one flat buffer, padded to a multiple of the n ranks; each
parameter's memory is a view of it. Rank r owns the r-th of n equal parts, and has master weights, moments and gradients of
that part only: flat tensors, that begin and end in the middle of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis


class FlatGroups:
    """Where ZeRO (stages 1 and 2) keeps what: the parameters of a group in one flat buffer, of which each rank has a part."""

    def __init__(self, zero: Any, names: Mapping[nn.Parameter, str], axis: Axis) -> None:
        """`zero`: DeepSpeed's optimizer around the basic one. `names` of the parameters; `axis`: the ranks, in their order."""
        self._zero, self._axis = zero, axis
        self.groups: list[dict[str, nn.Parameter]] = [{names[one]: one for one in group} for group in zero.bit16_groups]
        self._starts = [
            {name: one.storage_offset() - flat.storage_offset() for name, one in group.items()}
            for group, flat in zip(self.groups, zero.bit16_groups_flat, strict=True)
        ]

    @property
    def parts(self) -> list[Tensor]:
        """This rank's part of each group's weights: what the basic optimizer updates."""
        return list(self._zero.single_partition_of_fp32_groups)

    def whole(self, index: int, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """By name, what the ranks' `part`s of group `index` are together, in a parameter's shape. Every rank calls it."""
        flat = collectives.all_gather(part.detach(), self._axis)
        for name, parameter in self.groups[index].items():
            yield name, flat.narrow(0, self._starts[index][name], parameter.numel()).view(parameter.shape)

    def part(self, index: int, values: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of a group whose parameters have these `values`."""
        size = self.parts[index].numel()
        flat = torch.zeros(size * self._axis.size, dtype=self.parts[index].dtype, device=self.parts[index].device)
        for name, value in values.items():
            flat.narrow(0, self._starts[index][name], value.numel()).copy_(value.detach().reshape(-1))
        return flat.narrow(0, size * self._axis.index, size)

    def squares(self) -> Tensor:
        """Float64 sum of squares of this rank's parts of the gradients."""
        norms = torch._foreach_norm([piece for pieces in self._gradients() for piece in pieces], 2)
        return torch.stack(norms).double().square().sum()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole gradients, between a step's last backward and its update."""
        for index, pieces in enumerate(self._gradients()):
            yield from self.whole(index, torch.cat([piece.reshape(-1) for piece in pieces]))

    @torch.no_grad()
    def set_gradients(self, values: Mapping[str, Tensor]) -> None:
        """Put these in the place of the gradients."""
        for index, (group, pieces) in enumerate(zip(self.groups, self._gradients(), strict=True)):
            part = self.part(index, {name: values[name] for name in group})
            for piece, value in zip(pieces, part.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(value.view_as(piece))

    @torch.no_grad()
    def spoil_gradients(self) -> None:
        """Make the norm infinite: the engine then leaves the update out and clears what it has gathered."""
        for pieces in self._gradients():
            pieces[0].fill_(torch.inf)

    def _gradients(self) -> list[list[Tensor]]:
        """This rank's part of each group's gradient, piece by piece."""
        return [self._zero.averaged_gradients[index] for index in range(len(self.groups))]
