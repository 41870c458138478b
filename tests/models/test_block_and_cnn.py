"""The two models that are no language models."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from disttrain.models.block import TransformerBlock
from disttrain.models.cnn import SimpleCNN
from disttrain.models.model import Initialised, Model
from disttrain.parallel.plan import match_plan


def test_cnn_has_the_articles_size():
    model = SimpleCNN()
    assert sum(p.numel() for p in model.parameters()) == 225_034
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_cnn_is_the_sequence_of_its_layers():
    model = SimpleCNN()
    plain = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), model.hidden, nn.ReLU(), model.head
    )  # fmt: skip
    images = torch.randn(3, 1, 28, 28)
    torch.testing.assert_close(model(images), plain(images), rtol=0, atol=0)


def test_cnn_flops_are_what_torch_counts():
    with FlopCounterMode(display=False) as counted:
        SimpleCNN()(torch.zeros(4, 1, 28, 28))
    assert counted.get_total_flops() * 3 == 4 * SimpleCNN().flops()


def test_block_is_torchs_own_encoder_layer():
    """torch.nn.TransformerEncoderLayer, pre-norm and with exact GELU, is the public reference."""
    torch.manual_seed(0)
    block = TransformerBlock(hidden_size=64, num_heads=8).double()
    reference = nn.TransformerEncoderLayer(64, 8, 256, 0.0, "gelu", batch_first=True, norm_first=True).double()
    names = {
        "attention_norm": "norm1", "mlp_norm": "norm2", "attention.qkv": "self_attn.in_proj_", "attention.out": "self_attn.out_proj",
        "mlp.up": "linear1", "mlp.down": "linear2",
    }  # fmt: skip
    state = {
        f"blocks.0.{ours}.{kind}": reference.state_dict()[(theirs + "." + kind).replace("_.", "_")]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }
    block.load_state_dict(state)
    x = torch.randn(4, 32, 64, dtype=torch.float64)
    torch.testing.assert_close(block(x), reference.train()(x), rtol=0, atol=1e-12)


def test_block_has_the_articles_shape():
    block = TransformerBlock()
    assert block(torch.zeros(4, 32, 512)).shape == (4, 32, 512)
    d = 512
    assert sum(p.numel() for p in block.parameters()) == 12 * d * d + 13 * d  # 4 + 8 matrices; 9 vectors of biases, 4 of norms


def test_block_flops_are_what_torch_counts():
    block = TransformerBlock(hidden_size=32, num_heads=4)
    x = torch.zeros(2, 8, 32, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        block(x).sum().backward()
    assert counted.get_total_flops() == 2 * block.flops((8, 32))


def test_plans_match_and_contracts_are_met():
    for model in (SimpleCNN(), TransformerBlock(hidden_size=32, num_heads=4)):
        assert match_plan(model, model.plan)
        assert isinstance(model, Model)
    assert not isinstance(SimpleCNN(), Initialised)
    assert isinstance(TransformerBlock(hidden_size=32, num_heads=4), Initialised)
