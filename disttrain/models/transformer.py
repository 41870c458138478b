"""A transformer block, GPT-2's or Llama's by a few fields. It knows nothing of ranks.

It computes right when a tensor plan has cut its weights, because head counts and widths are read off the
activations and never stored. Between attention and feed-forward a block may see a part of the sequence only.

Shape suffixes: b samples, t tokens, d hidden size, h query heads (of this rank), g key-value heads (of this
rank), e size of a head. Grouped queries: Ainslie et al. 2023
(arXiv:2305.13245).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.projections import Projections

NORM_EPS = 1e-5

BLOCK_PLAN = {
    "blocks.*_norm": "sequence_norm",
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.core": "heads",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.gate_up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.dropout": "residual_dropout",
}
"""How Megatron cuts a block (Shoeybi et al. 2019, arXiv:1909.08053): two all-reduces in forward, two in backward."""


@dataclass(frozen=True)
class BlockShape:
    """Fields of one transformer block; see `GPT`."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    dropout: float = 0.0
    norm: str = "layer"
    mlp: str = "gelu"
    bias: bool = True
    merged_qkv: bool = True
    rope_theta: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        """Refuse what can't be built."""
        choice("norm", self.norm, ("layer", "rms"))
        choice("mlp", self.mlp, ("gelu", "gelu_tanh", "swiglu"))
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}",
                f"model.hidden_size={-(-self.hidden_size // self.num_heads) * self.num_heads}",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}",
                f"model.num_kv_heads={self.num_heads}",
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise ConfigError(
                f"rotary positions turn pairs of numbers, but a head has {self.head_dim} (model.hidden_size / model.num_heads)",
                f"model.hidden_size={(self.head_dim + 1) * self.num_heads}",
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_heads

    def flops(self, length: int) -> float:
        """Forward of one sample of `length` tokens: two a weight and token, plus 4 t d for scores and values.

        Causal masking isn't deducted, as in Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
        """
        feed_forward = self.hidden_size * self.intermediate_size * (3 if self.mlp == "swiglu" else 2)
        return self.attention_flops(length) + 2.0 * length * feed_forward

    def attention_flops(self, length: int) -> float:
        """The part of `flops` without the feed-forward."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return 2.0 * length * attention + 4.0 * length * length * self.hidden_size


def attention(q_bhte: Tensor, k_bgte: Tensor, v_bgte: Tensor, causal: bool, dropout: float) -> Tensor:
    """Scaled dot-product attention [b, h, t, e] among the tokens given; `dropout`: share of the weights that are dropped."""
    return F.scaled_dot_product_attention(
        q_bhte, k_bgte, v_bgte, dropout_p=dropout, is_causal=causal, enable_gqa=q_bhte.shape[1] != k_bgte.shape[1]
    )


class Core(nn.Module):
    """Attention proper, over whatever heads it is handed: rotation, scaled dot products, dropout of the weights."""

    def __init__(self, shape: BlockShape) -> None:
        """Holds no parameter."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.rope_theta = shape.rope_theta
        self.causal = shape.causal
        self.dropout = shape.dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        attend: Callable[[Tensor, Tensor, Tensor, bool, float], Tensor] = attention,
    ) -> Tensor:
        """q [b, t, h e], k and v [b, t, g e] to [b, t, h e].

        `positions` [t]: where in their sequence these tokens stand, 0, 1, ... by default. `attend`: what does the rest once
        heads are rotated, given elsewhere if these are not all the tokens that there are; called as `attention` is.
        """
        b, t, _ = q.shape
        q_bhte, k_bgte, v_bgte = (x.view(b, t, -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        if self.rope_theta is not None:
            at = torch.arange(t, device=q.device) if positions is None else positions
            cos, sin = rotary(at, self.head_dim, self.rope_theta, q.dtype)
            q_bhte, k_bgte = rotate(q_bhte, cos, sin), rotate(k_bgte, cos, sin)
        y_bhte = attend(q_bhte, k_bgte, v_bgte, self.causal, self.dropout if self.training else 0.0)
        return y_bhte.transpose(1, 2).reshape(b, t, -1)


class Attention(nn.Module):
    """Self-attention: projections, `core`, output projection, dropout on the residual."""

    def __init__(self, shape: BlockShape) -> None:
        """Query, key and value are cut by heads when a plan cuts them."""
        super().__init__()
        heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = Projections(shape.hidden_size, {"q": heads, "k": groups, "v": groups}, shape.bias, shape.merged_qkv)
        self.core = Core(shape)
        self.out = nn.Linear(heads, shape.hidden_size, shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        y: Tensor = self.dropout(self.out(self.core(*self.qkv(x_btd))))
        return y


class FeedForward(nn.Module):
    """Two linear maps around GELU."""

    def __init__(self, shape: BlockShape) -> None:
        """`gelu_tanh` is GPT-2's approximation of GELU."""
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, shape.bias)
        self.activation = gelu(shape)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        y: Tensor = self.dropout(self.down(self.activation(self.up(x_btd))))
        return y


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, shape: BlockShape) -> None:
        """Gate and up are merged where q, k and v are."""
        super().__init__()
        wide = shape.intermediate_size
        self.gate_up = Projections(shape.hidden_size, {"gate": wide, "up": wide}, shape.bias, shape.merged_qkv)
        self.down = nn.Linear(wide, shape.hidden_size, shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        gate, up = self.gate_up(x_btd)
        y: Tensor = self.dropout(self.down(F.silu(gate) * up))
        return y


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: BlockShape, mlp: nn.Module | None = None) -> None:
        """Attention and feed-forward, each on its own norm of the residual stream; `mlp` in place of the shape's own."""
        super().__init__()
        self.attention_norm = make_norm(shape.norm, shape.hidden_size, shape.bias)
        self.attention = Attention(shape)
        self.mlp_norm = make_norm(shape.norm, shape.hidden_size, shape.bias)
        self.mlp = mlp or (GatedFeedForward(shape) if shape.mlp == "swiglu" else FeedForward(shape))

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        y_btd: Tensor = x_btd + self.mlp(self.mlp_norm(x_btd))
        return y_btd


def init_transformer(name: str, shape: tuple[int, ...], rows: range, generator: torch.Generator, std: float, num_layers: int) -> Tensor:
    """Rows of a parameter's start as in GPT-2: normal(0, std), biases 0, norms 1, float32 on the CPU.

    The two maps of a block that write to the residual stream are narrower by sqrt(2 num_layers), so that the stream's
    variance doesn't grow with depth. No width of a rank's part enters.
    """
    if name.endswith("bias"):
        return torch.zeros(len(rows))
    if len(shape) == 1:
        return torch.ones(len(rows))
    residual = name.endswith(("attention.out.weight", "mlp.down.weight", "shared.down.weight", "experts.down"))
    scale = std / (2 * num_layers) ** 0.5 if residual else std
    return torch.empty(len(rows), *shape[1:]).normal_(0.0, scale, generator=generator)


@torch.no_grad()
def start(model: nn.Module) -> None:
    """The start of a model that is built with values, from torch's own generator. On the meta device there is nothing to start."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            rows = range(parameter.shape[0])
            parameter.copy_(model.init_parameter(name, tuple(parameter.shape), rows, torch.default_generator))  # type: ignore[operator]


def block_plan(shape: BlockShape, dense: bool = True) -> dict[str, str]:
    """`BLOCK_PLAN` without the feed-forward that this shape doesn't have; without any, unless some block is `dense`."""
    present = {"gate_up" if shape.mlp == "swiglu" else "up", "down"} if dense else set()
    return {name: style for name, style in BLOCK_PLAN.items() if ".mlp." not in name or name.rpartition(".")[2] in present}


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [t, e/2] of the angles position * theta^(-2i/e), positions [t] (Su et al. 2021, arXiv:2104.09864); float32 at least.

    Computed anew for each call: a buffer would not survive building on the meta device.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** (torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / -head_dim)
    angles = positions.to(wide)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_bhte: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + e/2) of the last dimension by its position's angle. In `cos`'s type, returned in the input's."""
    left, right = x_bhte.to(cos.dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x_bhte.dtype)


def llama_width(hidden_size: int) -> int:
    """Llama's feed-forward width: two thirds of 4 hidden_size, rounded up to a multiple of 256."""
    return -(-int(8 * hidden_size / 3) // 256) * 256


def gelu(shape: BlockShape) -> nn.GELU:
    """GELU, or GPT-2's approximation of it."""
    return nn.GELU(approximate="tanh" if shape.mlp == "gelu_tanh" else "none")


def make_norm(kind: str, size: int, bias: bool) -> nn.Module:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return nn.RMSNorm(size, eps=NORM_EPS) if kind == "rms" else nn.LayerNorm(size, eps=NORM_EPS, bias=bias)


def choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """ConfigError unless `value` of model.<key> is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"model.{key}={value} is not one of {', '.join(allowed)}", f"model.{key}={allowed[0]}")
