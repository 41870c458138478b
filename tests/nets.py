"""Small networks of a user's own, for tests."""

from __future__ import annotations

from torch import Tensor, nn

from disttrain.models.task import Classification
from tests import tiny

IMAGES = {
    "_target_": "disttrain.data.synthetic.Synthetic",
    "kind": "images",
    "shape": [1, 8, 8],
    "num_classes": 4,
    "num_samples": 64,
    "num_validation": 21,
}
NORMALISED = {"_target_": "tests.nets.Normalised"}
RESNET = {"_target_": "disttrain.models.resnet.ResNet18", "num_classes": 4, "image_size": 8}
BATCH_NORM = {"model": NORMALISED, "dataset": IMAGES, "optimizer": tiny.SGD}


class Normalised(nn.Module):
    """BatchNorm of two, one and flattened dimensions, with each of its options."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Classification(accuracy=False)
        self.conv = nn.Conv2d(1, 6, 3)
        self.images = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6, 8)
        self.plain = nn.BatchNorm1d(8, affine=False, momentum=None)
        self.untracked = nn.BatchNorm1d(36, track_running_stats=False)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.images(self.conv(images)).relu()  # [b, 6, 6, 6]
        x = self.untracked(x.flatten(2).transpose(1, 2).contiguous())  # [b, 36 positions, 6]
        x = self.plain(self.hidden(x).tanh().flatten(0, 1)).view(len(images), -1, 8)
        scores: Tensor = self.head(x.mean(1))
        return scores
