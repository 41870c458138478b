"""Muon in any layout: an optimizer whose step is made on whole matrices, of which each rank keeps its part.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): the momentum of each matrix inside the blocks is made nearly
orthogonal by five Newton-Schulz steps, then scaled as in Liu et al. 2025 (arXiv:2502.16982, eq. 4), so that one rate
serves all. Embeddings, heads, norms and biases are AdamW's.

What is cut: weights and momentum, as their layouts say. What moves: each cut matrix's update, put together once a step
over the axes that cut it, 2(n-1)/n of its bytes on each. Every rank that holds a part computes the whole step alike.

Shape suffixes: n rows, m columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.parallel import collectives
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose repeated use takes singular values to about one."""
NUM_STEPS = 5
SMALLEST_NORM = 1e-7


class WholeMatrices:
    """Puts the parts of a matrix together, and takes a rank's own out of it."""

    def __init__(self, blocks: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], mesh: Mesh):
        """`parameters` are this rank's parts; those of `blocks` with two dimensions are matrices to whoever asks."""
        self.mesh = mesh
        self._at = mesh.coordinate()
        self._layouts = {
            id(parameter): layouts[name]
            for name, parameter in parameters.items()
            if len(layouts[name].shape) == 2 and any(name.startswith(f"{block}.") for block in blocks)
        }

    def is_matrix(self, parameter: Tensor) -> bool:
        """Whether this is (a part of) a matrix inside a block."""
        return id(parameter) in self._layouts

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Of the whole matrix."""
        return self._layouts[id(parameter)].shape

    def gather(self, parameter: Tensor, part: Tensor) -> Tensor:
        """The whole of a tensor that lies as `parameter` does: every rank adds its part to zeros."""
        layout = self._layouts[id(parameter)]
        axes = [axis for axis, placement in layout.placements.items() if isinstance(placement, Cut)]
        if not axes:
            return part
        whole = torch.zeros(layout.shape, dtype=part.dtype, device=part.device)
        for there, here in layout.pieces(self._at):
            whole[there] = part[here]
        for axis in axes:
            collectives.all_reduce_(whole, self.mesh.axis(axis))
        return whole

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        layout = self._layouts[id(parameter)]
        found = torch.empty_like(parameter, dtype=whole.dtype)
        for there, here in layout.pieces(self._at):
            found[here] = whole[there]
        return found


class Muon(torch.optim.Optimizer):
    """Muon for matrices inside the blocks, AdamW for the rest."""

    def __init__(
        self,
        params: Any,
        whole: WholeMatrices,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """`whole` knows the layouts. `betas` and `eps` are AdamW's; one rate `lr` serves both."""
        self._whole = whole
        groups = []
        for group in params:
            for muon in (True, False):
                members = [parameter for parameter in group["params"] if whole.is_matrix(parameter) is muon]
                if members:
                    groups.append(group | {"params": members, "muon": muon})
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "betas": tuple(betas), "eps": eps}
        super().__init__(groups, defaults)
        others = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW(others, lr=lr, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.param_groups = others  # the same groups and the same state: a rate set here is set there
            self._adamw.state = self.state
            for group in others:
                for key, value in self._adamw.defaults.items():
                    group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients as they are. Every rank that holds a part calls it."""
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        if self._adamw is not None:
            self._adamw.step()

    def _update(self, parameter: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, momentum, rate = state["momentum_buffer"], group["momentum"], float(group["lr"])
        buffer.lerp_(grad, 1 - momentum)
        wanted = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        direction_nm = orthogonal(self._whole.gather(parameter, wanted))
        scale = 0.2 * math.sqrt(max(self._whole.shape(parameter)))
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(self._whole.part(parameter, direction_nm).to(parameter.dtype), alpha=-rate * scale)


def orthogonal(x_nm: Tensor) -> Tensor:
    """The matrix with singular values near one. Products in bfloat16 on a GPU; in the matrix's own type on a CPU: halves are slow there."""
    a, b, c = COEFFICIENTS
    y = x_nm.bfloat16() if x_nm.device.type == "cuda" and x_nm.dtype == torch.float32 else x_nm
    tall = y.shape[0] > y.shape[1]
    y = y.T if tall else y
    y = y / y.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NUM_STEPS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y
