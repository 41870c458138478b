"""ResNet-18, torchvision's, for images of any size. Importing this file costs seconds: only `model=resnet18` does it."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from disttrain.models.model import Parts
from disttrain.models.task import Classification, Task
from disttrain.models.transformer import choice


class ResNet18(ResNet):
    """Images [b, channels, h, w] to class scores [b, num_classes] (He et al. 2015, arXiv:1512.03385); names are torchvision's.

    It has no `init_parameter`: its start is torchvision's own, drawn whole under the seed.
    """

    plan: ClassVar[dict[str, str]] = {}
    """Nothing: its matrices are convolutions, which no style of a tensor plan cuts."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        channels: int = 1,
        stem: Literal["small", "imagenet"] = "small",
        image_size: int = 28,
        task: Task | None = None,
    ) -> None:
        """stem: a 3x3 convolution that keeps the size, as for CIFAR (section 4.2), or imagenet's 7x7 and pooling, a quarter of it.

        image_size: height and width, by which operations are counted; the network takes any.
        """
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes)
        choice("stem", stem, ("small", "imagenet"))
        small = stem == "small"
        self.num_classes, self.image_size = num_classes, image_size
        self.task: Task = task or Classification()
        self.conv1 = nn.Conv2d(channels, 64, 3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small:
            self.maxpool = nn.Identity()
        self.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())  # so that a pipeline may cut behind it
        self._windows = [(name, *_window(module)) for name, module in self.named_modules() if isinstance(module, (nn.Conv2d, nn.MaxPool2d))]

    def parts(self) -> Parts:
        """No block repeats: each group halves the image and doubles the channels."""
        groups = ("layer1", "layer2", "layer3", "layer4")
        return Parts(first=("conv1", "bn1", "relu", "maxpool"), repeated=(), last=(*groups, "avgpool", "fc"), cost=self._cost())

    def flops(self, shape: tuple[int, ...] | None = None) -> float:
        """Forward and backward of one image [channels, h, w]: two a weight and output position, three times."""
        return 3.0 * sum(self._cost(shape).values())

    def _cost(self, shape: tuple[int, ...] | None = None) -> dict[str, float]:
        """Floating-point operations of the forward, by module; a block's second path has its first's output size."""
        height, width = shape[1:] if shape else (self.image_size, self.image_size)
        cost = {"fc": 2.0 * 512 * self.num_classes}
        for name, stride, num_weights in self._windows:  # as they were built: of a pipeline's stage the others are gone
            if "downsample" not in name:
                height, width = -(-height // stride), -(-width // stride)
            if num_weights:
                cost[name] = 2.0 * num_weights * height * width
        return cost


def _window(module: nn.Conv2d | nn.MaxPool2d) -> tuple[int, int]:
    """(stride, number of weights)."""
    stride = module.stride[0] if isinstance(module.stride, tuple) else module.stride
    return stride, module.weight.numel() if isinstance(module, nn.Conv2d) else 0
