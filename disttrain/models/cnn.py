"""A small convolutional network for 28 x 28 images."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.models.model import Parts
from disttrain.models.task import Classification, Task


class SimpleCNN(nn.Module):
    """Grey images [b, 1, 28, 28] to class scores [b, num_classes]; 225,034 parameters for ten classes.

    It has no `init_parameter`: its start is torch's own, drawn whole under the seed.
    """

    plan: ClassVar[dict[str, str]] = {"hidden": "column", "head": "row"}

    def __init__(self, *, num_classes: int = 10, task: Task | None = None) -> None:
        """Two 3x3 convolutions of 32 and 64 channels, each followed by ReLU and 2x2 max-pooling, then two linear maps."""
        super().__init__()
        self.num_classes = num_classes
        self.task: Task = task or Classification()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.hidden = nn.Linear(64 * 5 * 5, 128)  # 28 - 2 = 26, / 2 = 13, - 2 = 11, / 2 = 5
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores [b, num_classes]."""
        return self.end(self.begin(images))

    def begin(self, images: Tensor) -> Tensor:
        """Features [b, 64, 5, 5]."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        return F.max_pool2d(F.relu(self.conv2(x)), 2)

    def end(self, x: Tensor) -> Tensor:
        """Scores [b, num_classes] from features."""
        scores: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return scores

    def parts(self) -> Parts:
        """No block repeats."""
        return Parts(first=("conv1", "conv2"), repeated=(), last=("hidden", "head"), cost=self._cost(), begin=self.begin, end=self.end)

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Forward and backward of one image: two a weight and output position, three times (inputs have one size)."""
        return 3.0 * sum(self._cost().values())

    def _cost(self) -> dict[str, float]:
        positions = {"conv1": 26 * 26, "conv2": 11 * 11, "hidden": 1, "head": 1}
        weights = {"conv1": 32 * 9, "conv2": 64 * 32 * 9, "hidden": 1600 * 128, "head": 128 * self.num_classes}
        return {name: 2.0 * weights[name] * positions[name] for name in positions}
