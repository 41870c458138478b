"""torchmetrics for our outputs. Importing this file costs seconds, so tasks do it when an evaluation first asks."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from disttrain.models.task import IGNORED


class Accuracy(MulticlassAccuracy):
    """Share of valid targets whose class has the largest output; any shape [..., classes] and [...]."""

    def __init__(self) -> None:
        """Counts over all targets alike (torchmetrics' 'micro' average), which needs no number of classes."""
        super().__init__(num_classes=None, average="micro", ignore_index=IGNORED, validate_args=False)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs [..., classes] and targets [...]."""
        super().update(outputs.flatten(0, -2).argmax(-1), targets.flatten())
