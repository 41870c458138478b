"""The models and the data of the comparison: ordinary PyTorch, with what disttrain reads beside it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from disttrain.data.module import DataModule
from disttrain.models.task import Classification, Regression


class MLP(nn.Module):
    """Two layers, [b, width] to [b, outputs]; `classes` says whether the outputs are logits or numbers to match."""

    plan: ClassVar[dict[str, str]] = {"up": "column", "down": "row"}

    def __init__(self, width: int, hidden: int, outputs: int, classes: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, outputs)
        self.task = Classification(accuracy=False) if classes else Regression()

    def forward(self, x: Tensor) -> Tensor:
        """[b, width] to [b, outputs]."""
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Table:
    """Rows of two tensors in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets
        self.fingerprint = f"table-{tuple(inputs.shape)}"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.inputs)

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Any]:
        """The rows `indices`."""
        return self.inputs[indices], self.targets[indices]


class RandomRows(DataModule):
    """Random rows [length, width], with random classes or random targets [length, outputs]; there is no validation split."""

    def __init__(self, width: int, outputs: int, length: int = 8192, classes: bool = True, shuffle: bool = True) -> None:
        self.width = width
        self.outputs = outputs
        self.length = length
        self.classes = classes
        self.shuffle = shuffle

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets), the same on every call."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.length, self.width, generator=generator)
        if self.classes:
            return inputs, torch.randint(self.outputs, (self.length,), generator=generator)
        return inputs, torch.randn(self.length, self.outputs, generator=generator)

    def train(self) -> Table:
        """All rows."""
        return Table(*self.tensors())
