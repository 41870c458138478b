"""ResNet-18: torchvision's own where it can be, and a stem for small images."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from disttrain.models.resnet import ResNet18


def test_names_shapes_and_outputs_are_torchvisions_with_its_stem() -> None:
    theirs = resnet18(num_classes=4).eval()
    ours = ResNet18(num_classes=4, channels=3, stem="imagenet").eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 40, 40)
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=0)


def test_the_small_stem_keeps_the_size() -> None:
    model = ResNet18()
    sizes: list[tuple[int, ...]] = []
    model.layer1.register_forward_hook(lambda _, inputs, output: sizes.append(tuple(output.shape)))
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sizes == [(2, 64, 28, 28)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_172_810


@pytest.mark.parametrize(("stem", "channels", "size"), [("small", 1, 28), ("imagenet", 3, 56)])
def test_operations_are_those_that_torch_counts(stem: str, channels: int, size: int) -> None:
    model = ResNet18(channels=channels, stem=stem, image_size=size)  # type: ignore[arg-type]
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, channels, size, size))
    assert model.flops() == 3 * counter.get_total_flops() / 2
    assert model.flops((channels, size, size)) == model.flops()
