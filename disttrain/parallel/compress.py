"""Fewer bytes for gradients over the data ranks, at a price in accuracy: another training, by design.

bf16, fp16  each rank's part is rounded, and the sum made in that type: half the bytes. What was lost is lost.
powersgd    Vogels et al. 2019 (arXiv:1905.13727), algorithms 1 and 2. Each rank adds to its matrix M [n, m] what it
            lost in the step before; the sum of all M is approximated by P Q^T of r columns: P = M Q is summed and made
            orthonormal, then Q = M^T P is summed, and serves as the next step's start. On the wire are r (n + m)
            elements instead of n m. A rank keeps what it lost, M - P (M^T P)^T: one more gradient of memory. Vectors,
            and matrices that would not shrink, travel whole.

A step whose gradients are not finite leaves no trace in what is kept.

Shape suffixes: n rows of a matrix, m its other dimensions, r columns of the approximation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.parallel.random import mix


class Sending(Protocol):
    """Gradients on their way."""

    def wait(self) -> object:
        """Return when they are sums."""


class Compressor(Protocol):
    """How the gradients of a bucket are summed over the data ranks."""

    def start(self, flat: Tensor, views: Mapping[str, Tensor]) -> Sending:
        """Begin to sum `flat` in place; `views` into it are the gradients by name."""

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps from step to step, by name."""


class Half:
    """Sums in a half type."""

    def __init__(self, axis: Axis, dtype: torch.dtype) -> None:
        self.axis, self.dtype = axis, dtype

    def start(self, flat: Tensor, views: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`."""
        return _HalfSending(flat, collectives.start_all_reduce(flat.to(self.dtype), self.axis))

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


class _HalfSending:
    def __init__(self, flat: Tensor, pending: collectives.Pending) -> None:
        self.flat, self.pending = flat, pending

    def wait(self) -> None:
        self.flat.copy_(self.pending.wait())


class PowerSGD:
    """Low-rank sums with error feedback and a warm start."""

    def __init__(self, axis: Axis, rank: int, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        """`rank` r; `parameters` are this rank's parts, by name; the first Q is drawn from `seed`, alike on every data rank."""
        self.axis = axis
        self.errors: dict[str, Tensor] = {}
        self.starts: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            n, m = _matrix(parameter).shape if parameter.dim() > 1 else (1, 1)
            if rank * (n + m) < n * m:
                generator = torch.Generator().manual_seed(mix(seed, number))
                self.errors[name] = torch.zeros_like(parameter, requires_grad=False)
                self.starts[name] = torch.randn(m, rank, generator=generator).to(parameter)

    def start(self, flat: Tensor, views: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`. Both sums wait for each other, so the second leaves in `wait`."""
        return _LowRankSending(self, views)

    def state(self) -> dict[str, Tensor]:
        """What this rank lost, and Q."""
        errors = {f"{name}/error": error for name, error in self.errors.items()}
        return errors | {f"{name}/q": q_mr for name, q_mr in self.starts.items()}


class _LowRankSending:
    """P leaves at once, with what is not compressed."""

    def __init__(self, owner: PowerSGD, views: Mapping[str, Tensor]) -> None:
        self.owner = owner
        self.low = {name: view for name, view in views.items() if name in owner.errors}
        self.whole = [view for name, view in views.items() if name not in owner.errors]
        self.matrices = {name: _matrix(view + owner.errors[name]) for name, view in self.low.items()}
        products = [matrix @ owner.starts[name] for name, matrix in self.matrices.items()]
        self.shapes = [product.shape for product in (*products, *self.whole)]
        self.pending = collectives.start_all_reduce(torch.cat([x.reshape(-1) for x in (*products, *self.whole)]), owner.axis)

    def wait(self) -> None:
        summed = _split(self.pending.wait(), self.shapes)
        for view, total in zip(self.whole, summed[len(self.low) :], strict=True):
            view.copy_(total)
        if not self.low:
            return
        p_nr = {name: torch.linalg.qr(total).Q for name, total in zip(self.low, summed, strict=False)}
        own_mr = {name: matrix.t() @ p_nr[name] for name, matrix in self.matrices.items()}
        buffer = torch.cat([q.reshape(-1) for q in own_mr.values()])
        totals = _split(collectives.all_reduce_(buffer, self.owner.axis), [q.shape for q in own_mr.values()])
        for (name, view), q_mr in zip(self.low.items(), totals, strict=True):
            approximated = p_nr[name] @ q_mr.t()
            view.copy_(approximated.view_as(view))
            finite = approximated.sum().isfinite()  # the same on every rank: P and Q are sums
            lost = (self.matrices[name] - p_nr[name] @ own_mr[name].t()).view_as(view)
            self.owner.errors[name].copy_(torch.where(finite, lost, 0.0))
            self.owner.starts[name].copy_(torch.where(finite, q_mr, self.owner.starts[name]))


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def _split(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]


def make_compressor(
    kind: str, rank: int, axis: Axis, parameters: Mapping[str, nn.Parameter], seed: int, loss_scale: object | None
) -> Compressor | None:
    """The compressor that `strategy.compression` names; None for 'none'. ConfigError for powersgd under a moving loss scale."""
    if kind == "powersgd" and loss_scale is not None:
        raise ConfigError(
            "strategy.compression=powersgd keeps what it lost for the next step, when fp16's loss scale may be another",
            "callbacks.amp.precision=bf16",
        )
    if kind == "powersgd":
        return PowerSGD(axis, rank, parameters, seed)
    return None if kind == "none" else Half(axis, {"bf16": torch.bfloat16, "fp16": torch.float16}[kind])


def stacked(state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, tuple[Tensor, Layout]]:
    """Each rank's own tensors, stacked over the world for a checkpoint; named by the mesh, since they are of use in no other."""
    degrees = "-".join(f"{axis}{degree}" for axis, degree in mesh.degrees.items() if degree > 1)
    world = {"world": mesh.size}
    return {f"{degrees}/{name}": (x[None], Layout((mesh.size, *x.shape), {"world": Cut(0)}, world)) for name, x in state.items()}
