"""What the rest of the program may ask of a model beside its forward. None of it speaks of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from disttrain.models.task import Task


@dataclass(frozen=True)
class Parts:
    """A model as a sequence of modules, by name: for pipeline stages, FSDP units, recompute, compile."""

    first: tuple[str, ...]
    """Modules that see the inputs."""
    repeated: tuple[str, ...]
    """Blocks of one kind, in order; each takes and returns the residual stream."""
    last: tuple[str, ...]
    """Modules after the blocks, up to the outputs."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names of one and the same parameter."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations of one sample's forward, by module; absent is zero."""
    begin: Callable[[Any], Any] | None = None
    """What `first` computes from the inputs, where that is more than one module after the other."""
    end: Callable[[Any], Any] | None = None
    """What `last` computes from the last block's output, likewise. A model's forward is begin, the blocks, end."""


@runtime_checkable
class Model(Protocol):
    """What the shipped models offer. A user's model needs `forward` and `task` only."""

    task: Task

    @property
    def plan(self) -> Mapping[str, str]:
        """Tensor plan: {module name pattern (fnmatch): style}, and 'loss': style of the loss."""

    def forward(self, inputs: Any) -> Any:
        """Outputs for the task's losses."""

    def parts(self) -> Parts:
        """First, repeated and last modules."""

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Floating-point operations of one sample's forward and backward; `shape` of the sample's inputs, the largest by default."""


@runtime_checkable
class Initialised(Protocol):
    """A model whose start can be drawn in pieces. Others are built whole under the seed."""

    def init_parameter(self, name: str, shape: tuple[int, ...], rows: range, generator: torch.Generator) -> Tensor:
        """Rows `rows` of the start of the parameter `name` of whole shape `shape`: float32, on the CPU."""
