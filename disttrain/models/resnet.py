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
        self.image_size = image_size
        self.task: Task = task or Classification()
        self.conv1 = nn.Conv2d(channels, 64, 3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small:
            self.maxpool = nn.Identity()

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
        cost = {}
        for name, module in self.named_modules():
            if isinstance(module, (nn.Conv2d, nn.MaxPool2d)) and "downsample" not in name:
                stride = module.stride[0] if isinstance(module.stride, tuple) else module.stride
                height, width = -(-height // stride), -(-width // stride)
            if isinstance(module, nn.Conv2d):
                cost[name] = 2.0 * module.weight.numel() * height * width
        return cost | {"fc": 2.0 * self.fc.weight.numel()}
