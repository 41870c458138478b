"""GPT-2 and Llama against formulas written out here, from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from disttrain.errors import ConfigError
from disttrain.models.gpt import GPT
from disttrain.models.transformer import BlockShape, Core, llama_width, rotary, rotate
from disttrain.parallel.plan import match_plan

SMALL = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "vocab_size": 50, "max_seq_len": 16}
LLAMA = {
    "norm": "rms", "position": "rotary", "mlp": "swiglu", "bias": False, "tie_embeddings": False, "num_kv_heads": 2, "intermediate_size": 48
}  # fmt: skip


def build(seed=0, **fields):
    torch.manual_seed(seed)
    model = GPT(**(SMALL | fields)).double()
    for name, parameter in model.named_parameters():  # norms and biases that a start leaves at 1 and 0 must matter
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def tokens(count=3, length=16, vocabulary=50):
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def attention_by_hand(q, k, v, causal):
    """softmax(q k^T / sqrt(e)) v, each query head with its group's key-value head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        t = q.shape[2]
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v


def rotate_by_hand(x, theta):
    """Pairs (i, i + e/2) as complex numbers, turned by position * theta^(-2i/e)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * theta ** (-2 * torch.arange(half, dtype=x.dtype) / x.shape[-1])
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def norm_by_hand(x, weights, name, rms):
    if rms:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def gpt2_by_hand(ids, w, num_layers, num_heads):
    x = w["tokens.weight"][ids] + w["positions.weight"][: ids.shape[1]]
    for i in range(num_layers):
        block = f"blocks.{i}"
        y = norm_by_hand(x, w, f"{block}.attention_norm", rms=False)
        qkv = y @ w[f"{block}.attention.qkv.weight"].T + w[f"{block}.attention.qkv.bias"]
        q, k, v = (heads(part, num_heads) for part in qkv.chunk(3, -1))
        y = attention_by_hand(q, k, v, causal=True).transpose(1, 2).flatten(2)
        x = x + y @ w[f"{block}.attention.out.weight"].T + w[f"{block}.attention.out.bias"]
        y = norm_by_hand(x, w, f"{block}.mlp_norm", rms=False) @ w[f"{block}.mlp.up.weight"].T + w[f"{block}.mlp.up.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w[f"{block}.mlp.down.weight"].T + w[f"{block}.mlp.down.bias"]
    return norm_by_hand(x, w, "norm", rms=False) @ w["tokens.weight"].T


def llama_by_hand(ids, w, num_layers, num_heads, num_kv_heads):
    x = w["tokens.weight"][ids]
    for i in range(num_layers):
        block = f"blocks.{i}"
        y = norm_by_hand(x, w, f"{block}.attention_norm", rms=True)
        q, k, v = (y @ w[f"{block}.attention.qkv.{name}.weight"].T for name in "qkv")
        q, k, v = heads(q, num_heads), heads(k, num_kv_heads), heads(v, num_kv_heads)
        q, k = rotate_by_hand(q, 10_000.0), rotate_by_hand(k, 10_000.0)
        x = x + attention_by_hand(q, k, v, causal=True).transpose(1, 2).flatten(2) @ w[f"{block}.attention.out.weight"].T
        y = norm_by_hand(x, w, f"{block}.mlp_norm", rms=True)
        gate, up = (y @ w[f"{block}.mlp.gate_up.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{block}.mlp.down.weight"].T
    return norm_by_hand(x, w, "norm", rms=True) @ w["head.weight"].T


@pytest.mark.parametrize(("groups", "causal"), [(4, True), (2, True), (1, True), (4, False)])
def test_core_is_scaled_dot_product_attention(groups, causal):
    q, k, v = (torch.randn(2, 7, n * 8, dtype=torch.float64) for n in (4, groups, groups))
    ours = Core(BlockShape(32, 4, groups, 64, causal=causal))(q, k, v)
    wanted = attention_by_hand(heads(q, 4), heads(k, groups), heads(v, groups), causal).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_gpt2_is_its_formula():
    model = build(mlp="gelu_tanh")
    wanted = gpt2_by_hand(tokens(), model.state_dict(), 2, 4)
    torch.testing.assert_close(model(tokens()), wanted, rtol=0, atol=1e-12)


def test_llama_is_its_formula():
    model = build(merged_qkv=False, **LLAMA)
    wanted = llama_by_hand(tokens(), model.state_dict(), 2, 4, 2)
    torch.testing.assert_close(model(tokens()), wanted, rtol=0, atol=1e-12)


def test_merged_projections_lie_one_after_the_other():
    separate, merged = build(merged_qkv=False, **LLAMA), build(**LLAMA)
    state = separate.state_dict()
    for name, names in (("attention.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        for i in range(2):
            parts = [state.pop(f"blocks.{i}.{name}.{part}.weight") for part in names]
            state[f"blocks.{i}.{name}.weight"] = torch.cat(parts)
    merged.load_state_dict(state)
    torch.testing.assert_close(merged(tokens()), separate(tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", [{}, LLAMA])
def test_the_future_is_not_seen(fields):
    model, ids = build(**fields), tokens()
    before = model(ids)
    ids[:, 9] = (ids[:, 9] + 1) % 50
    after = model(ids)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_rotation_keeps_lengths_and_sees_distances_only():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()
    cos, sin = rotary(torch.arange(12), 8, 10_000.0, torch.float64)
    q, k = rotate(q.expand(1, 1, 12, 8), cos, sin), rotate(k.expand(1, 1, 12, 8), cos, sin)
    products = (q @ k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(products[3, 1], products[11, 9], rtol=0, atol=1e-12)
    assert abs(products[3, 1] - products[3, 2]) > 1e-6
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[..., :1].expand(1, 1, 12), rtol=0, atol=1e-12)


def test_gpt2_has_its_published_number_of_parameters():
    with torch.device("meta"):
        model = GPT(num_layers=12, num_heads=12, hidden_size=768, vocab_size=50257, max_seq_len=1024)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_llama_7b_has_its_published_number_of_parameters():
    with torch.device("meta"):
        model = GPT(
            num_layers=32, num_heads=32, hidden_size=4096, vocab_size=32000, norm="rms", position="rotary", mlp="swiglu", bias=False,
            tie_embeddings=False,
        )  # fmt: skip
    assert llama_width(4096) == 11008
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "bias": False, "mlp": "swiglu", "position": "rotary"}])
def test_flops_are_what_torch_counts(fields):
    model = GPT(**(SMALL | fields))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(tokens(count=5, length=12)).sum().backward()
    # torch leaves out the gradient of the first matrix's input only where nothing needs it, and here all is needed
    assert counted.get_total_flops() == 5 * model.flops((12,))


def test_parts_name_every_parameter_once():
    for fields in ({}, LLAMA):
        model = build(**fields)
        parts = model.parts()
        names = [
            f"{part}.{name}"
            for part in (*parts.first, *parts.repeated, *parts.last)
            for name, _ in model.get_submodule(part).named_parameters()
        ]
        everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert sorted(names) == sorted(everything)
        assert parts.tied == (() if fields else (("tokens.weight", "head.weight"),))
        assert sum(parts.cost.values()) * 3 == model.flops()


@pytest.mark.parametrize("fields", [{}, LLAMA])
def test_plan_names_modules_that_exist_and_every_cut_matrix(fields):
    model = build(**fields)
    styles = match_plan(model, model.plan)  # raises for a pattern that matches nothing
    cut = {name for name, style in styles.items() if style in ("column", "row", "vocab_embedding", "vocab_head")}
    matrices = {name.rsplit(".", 1)[0] for name, p in model.named_parameters(remove_duplicate=False) if p.ndim == 2}
    assert matrices - cut == ({"positions"} if not fields else set())


def test_heads_are_counted_from_the_widths_at_hand():
    """A core that is handed half of the heads gives that half of the whole's output."""
    core = Core(BlockShape(32, 4, 2, 64, rope_theta=10_000.0))
    q, k, v = (torch.randn(2, 7, n * 8, dtype=torch.float64) for n in (4, 2, 2))
    whole = core(q, k, v)
    part = core(q[..., 16:], k[..., 8:], v[..., 8:])
    torch.testing.assert_close(part, whole[..., 16:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "std"),
    [
        ("tokens.weight", (400, 64), 0.02),
        ("blocks.1.attention.qkv.weight", (192, 400), 0.02),
        ("blocks.1.attention.out.weight", (64, 400), 0.02 / 2),
        ("blocks.0.mlp.down.weight", (64, 400), 0.02 / 2),
        ("blocks.0.mlp.up.weight", (64, 400), 0.02),
    ],
)
def test_start_is_gpt2s_whatever_the_rows(name, shape, std):
    model = GPT(**SMALL)  # two layers: sqrt(2 * 2) = 2
    whole = model.init_parameter(name, shape, range(shape[0]), torch.Generator().manual_seed(3))
    assert whole.shape == shape
    assert whole.dtype == torch.float32
    for rows in (range(8), range(40, 64)):
        part = model.init_parameter(name, shape, rows, torch.Generator().manual_seed(3))
        assert part.shape == (len(rows), *shape[1:])
        assert float(part.std()) == pytest.approx(std, rel=0.1)
        assert abs(float(part.mean())) < 0.1 * std


def test_start_of_norms_and_biases():
    model = GPT(**SMALL)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            start = model.init_parameter(name, tuple(parameter.shape), range(4), torch.Generator())
            assert torch.equal(start, torch.full((4,), 0.0 if name.endswith("bias") else 1.0))


def test_nothing_but_parameters_needs_materialising():
    with torch.device("meta"):
        model = GPT(**(SMALL | LLAMA))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


def test_tied_head_is_one_parameter():
    model = build()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert build(tie_embeddings=False).head.weight.data_ptr() != model.tokens.weight.data_ptr()


def test_autocast_and_dropout_train():
    model = GPT(**(SMALL | LLAMA | {"dropout": 0.1}))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("fields", "message", "remedy"),
    [
        ({"hidden_size": 30}, "model.hidden_size=30 is not divisible by model.num_heads=4", "model.hidden_size=32"),
        ({"num_kv_heads": 3}, "model.num_heads=4 is not divisible by model.num_kv_heads=3", "model.num_kv_heads=4"),
        ({"norm": "batch"}, "model.norm=batch is not one of layer, rms", "model.norm=layer"),
        ({"position": "alibi"}, "model.position=alibi is not one of learned, rotary", "model.position=learned"),
        ({"mlp": "relu"}, "model.mlp=relu is not one of gelu, gelu_tanh, swiglu", "model.mlp=gelu"),
        ({"position": "rotary", "hidden_size": 36}, "a head has 9", "model.hidden_size=40"),
    ],
)
def test_what_cannot_be_built_is_named(fields, message, remedy):
    with pytest.raises(ConfigError) as error:
        GPT(**(SMALL | fields))
    assert message in error.value.message
    assert error.value.remedy == remedy
