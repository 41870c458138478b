"""Several linear maps of one input, so that one exchange over ranks can serve them all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projections(nn.Module):
    """Named linear maps of one input: q, k and v of attention, gate and up of a gated feed-forward.

    `merged`: one `weight` [sum of sizes, in_features] and `bias`, whose rows lie one projection after the other;
    `segments` holds the sizes. Otherwise one child `nn.Linear` a projection, named by its key.
    """

    def __init__(self, in_features: int, sizes: Mapping[str, int], bias: bool, merged: bool) -> None:
        """`sizes`: output features of each projection, in the order that `forward` returns them."""
        super().__init__()
        self.names = tuple(sizes)
        self.segments = tuple(sizes.values())
        self.merged = merged
        if merged:
            whole = nn.Linear(in_features, sum(self.segments), bias)  # for its start and its meta-device support
            self.weight, self.bias = whole.weight, whole.bias
        else:
            for name, size in sizes.items():
                self.add_module(name, nn.Linear(in_features, size, bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in_features] to one [..., size] a projection."""
        if self.merged:
            return self.split(F.linear(x, self.weight, self.bias))
        return tuple(self.get_submodule(name)(x) for name in self.names)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The merged output's parts. In the ratio of `segments`, since `y` may be as narrow as one rank's rows."""
        total = sum(self.segments)
        return torch.split(y, [y.shape[-1] * size // total for size in self.segments], -1)
