"""From a config to a case: the model's shape, degrees that are legal, a batch that divides, and a word on what was changed.

A plan is not refused: what doesn't divide is planned as the nearest that does, and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from disttrain.config.local_sgd import AMP
from disttrain.config.schedules import holders, stages_a_rank
from disttrain.config.schema import Config, StrategyConfig
from disttrain.config.split import balanced_starts
from disttrain.errors import ConfigError
from disttrain.plan import legal
from disttrain.plan.case import FULL, NONE, SPLIT_BACKWARD, Case, Layout, Numbers, Recompute, Shape, Software, every

GPT = "disttrain.models.gpt.GPT"
SELECTIVE = Recompute(0.0, 0.0, 1.0, 0.6)
"""All but matrix products and attention runs again: norms' outputs and activations are not kept."""
OWN_TENSOR_EXPOSED = 0.75
"""Of our tensor-parallel collectives, half of backward's run beside the weights' gradient; not where a schedule splits the two."""
STATES = {"AdamW": 8.0, "Adam": 8.0, "Adagrad": 4.0}
"""Bytes of float32 moments a parameter, by optimizer; SGD has none without momentum."""


@dataclass
class Settled:
    """A case that is legal, on how many machines, and what was changed to make it so."""

    case: Case
    nodes: int
    notes: list[str] = field(default_factory=list)


def settle(config: Config, precision: str | None = None) -> Settled:
    """The case of a config. ConfigError for a model whose shape is not known. `precision` stands in for callbacks.amp's."""
    notes: list[str] = []
    model = legal.whole_heads(config.model, notes)
    shape = shape_of(model)
    precision = precision or precision_of(config)
    strategy = legal.degrees(config, shape, notes)
    if strategy.deepspeed is not None:
        strategy = legal.like(strategy, notes)
    length = int(config.dataset.get("context") or config.model.get("max_seq_len") or 1)
    layout, batch = legal.whole_batch(config, layout_of(strategy, shape), notes)
    software = software_of(strategy, model, precision)
    if strategy.offload or strategy.offload_activations:
        notes.append("what waits in host memory is left out of the device's; the time that it takes on its way is not reckoned")
    case = Case(shape, layout, length, batch, numbers_of(config, layout, precision), software)
    return Settled(case, legal.num_nodes(config, layout.world, notes), notes)


def shape_of(model: Mapping[str, Any]) -> Shape:
    """Shape of a GPT-style model's config; ConfigError for any other."""
    if model.get("_target_") != GPT:
        raise unknown_shape(model.get("_target_"))
    hidden, heads = int(model.get("hidden_size", 128)), int(model.get("num_heads", 4))
    kv_heads, gated = int(model.get("num_kv_heads") or heads), model.get("mlp", "gelu") == "swiglu"
    ffn = int(model.get("intermediate_size") or (_llama_width(hidden) if gated else 4 * hidden))
    bias, is_layer = bool(model.get("bias", True)), model.get("norm", "layer") == "layer"
    kv_width = kv_heads * hidden // heads
    norm = hidden * (2 if is_layer and bias else 1)
    layers = int(model.get("num_layers", 4))
    fed = (ffn * (2 if gated else 1) + hidden) if bias else 0  # a dense feed-forward's biases; routed experts have none
    mixture = _mixture(model, ffn)
    sparse, shared = layers // mixture["every"] if mixture else 0, mixture.get("shared_ffn", 0)
    biases = ((2 * hidden + 2 * kv_width) if bias else 0) + fed * (layers - sparse) / layers
    if bias and shared:
        biases += (shared * (2 if gated else 1) + hidden) * sparse / layers
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=mixture.pop("ffn", ffn),
        vocab=int(model.get("vocab_size", 256)),
        gated=gated,
        tied=bool(model.get("tie_embeddings", True)),
        positions=int(model.get("max_seq_len", 128)) if model.get("position", "learned") == "learned" else 0,
        vectors=biases + 2 * norm,
        last_norm=norm,
        balanced=bool(model.get("experts") and model["experts"].get("balance_weight", 0.01)),
        bias=bias,
        norm_bias=is_layer and bias,
        rms=not is_layer,
        merged=bool(model.get("merged_qkv", True)),
        longest=int(model.get("max_seq_len", 128)),
        **mixture,
    )


def unknown_shape(target: Any) -> ConfigError:
    """What is told of a model that is no GPT."""
    return ConfigError(f"plan knows the shape of {GPT} and not of {target}", "model.parameters=1e9")


def _mixture(model: Mapping[str, Any], ffn: int) -> dict[str, int]:
    """Fields of the shape that a mixture of experts has (`disttrain.models.experts.ExpertShape`); empty for a dense model."""
    experts = model.get("experts")
    if not experts:
        return {}
    width = int(experts.get("intermediate_size") or ffn)
    return {
        "ffn": width,
        "experts": int(experts.get("num_experts", 8)),
        "top_k": int(experts.get("top_k", 2)),
        "shared_ffn": int(experts.get("num_shared", 0)) * width,
        "every": int(experts.get("every", 1)),
        "dense_ffn": ffn,
    }


def _llama_width(hidden: int) -> int:
    """As `disttrain.models.transformer.llama_width`, which imports torch."""
    return -(-(8 * hidden // 3) // 256) * 256


def precision_of(config: Config) -> str:
    """Type of matrix products: fp32, bf16 or fp16."""
    amp = next((value for value in config.callbacks.values() if value.get("_target_") == AMP), None)
    return "fp32" if amp is None else str(amp.get("precision", "fp32"))


def numbers_of(config: Config, layout: Layout, precision: str) -> Numbers:
    """Bytes as disttrain holds them: float32 weights, gradients and moments; autocast's copies beside the weights."""
    strategy = config.strategy
    whole = {"float64": 8.0, "bfloat16": 2.0}.get(config.train.dtype, 4.0)
    name = str(config.optimizer.get("_target_", "")).rpartition(".")[2]
    state = STATES.get(name, 4.0 if config.optimizer.get("momentum") else 0.0) * whole / 4.0
    if layout.sync_every > 1:  # the weights of the sync before, and the outer step's momentum
        kept = (strategy.outer_lr != 1.0 or strategy.outer_momentum > 0.0) + (strategy.outer_momentum > 0.0)
        state += whole * kept
    half = precision in ("bf16", "fp16") and whole == 4.0
    sent = 2.0 if strategy.compression in ("bf16", "fp16") and not layout.zero else whole
    on_device = 0.0 if strategy.offload and layout.zero else 1.0
    return Numbers(
        weight=whole * (on_device if layout.zero == 3 else 1.0),
        gradient=whole * (on_device if layout.zero >= 2 else 1.0),
        state=state * on_device,
        compute=2.0 if half else whole,
        stream=whole,
        gathered=2.0 if half else 0.0,
        shard_beside=whole * on_device if layout.zero in (1, 2) else 0.0,
        wire_weight=2.0 if strategy.gather_dtype == "bf16" else whole,
        wire_gradient=sent,
        logit=6.0 if half else 2 * whole,
    )


def software_of(strategy: StrategyConfig, model: Mapping[str, Any], precision: str) -> Software:
    """What is assumed of disttrain itself."""
    splits = strategy.schedule in SPLIT_BACKWARD and strategy.pp > 1
    return Software(
        kernel="flash",
        precision="bf16" if precision in ("bf16", "fp16") else precision,
        fused=strategy.compile or model.get("norm", "layer") == "layer",
        tensor_exposed=1.0 if splits else OWN_TENSOR_EXPOSED,
        scattered=False,
        own=not strategy.compile,
    )


def layout_of(strategy: StrategyConfig, shape: Shape) -> Layout:
    """The layout of a strategy whose degrees are settled."""
    gap = strategy.recompute_every
    recompute = {"none": NONE, "full": FULL if gap == 1 else every(1.0 / gap), "selective": SELECTIVE}[strategy.recompute]
    virtual = stages_a_rank(strategy.schedule, strategy.virtual_stages) if strategy.pp > 1 else 1
    if strategy.offload_activations:
        recompute = replace(recompute, kept=0.0)
    return Layout(
        dp_replicate=strategy.dp_replicate,
        dp_shard=strategy.dp_shard,
        cp=strategy.cp,
        tp=strategy.tp,
        pp=strategy.pp,
        ep=strategy.ep,
        zero=strategy.zero if strategy.dp_shard > 1 else 0,
        sequence_parallel=strategy.sequence_parallel,
        schedule=strategy.schedule,
        virtual=virtual,
        recompute=recompute,
        blocks=blocks_of(shape, strategy.schedule, strategy.pp, virtual, strategy.stage_split),
        share_context=False,
        attention=strategy.attention,
        loss_chunk=strategy.loss_chunk is not None,
        bucket_size=strategy.bucket_size,
        sync_every=strategy.sync_every if strategy.dp_replicate > 1 else 1,
    )


def blocks_of(shape: Shape, schedule: str, ranks: int, virtual: int, split: Sequence[str] = ()) -> tuple[tuple[int, ...], ...]:
    """Layers of each pipeline rank, in all its stages, as a training cuts them: by `split`, its first modules, or by cost."""
    if ranks == 1:
        return ()
    where = holders(schedule, ranks, ranks * virtual)
    starts = legal.named_starts(split, shape, len(where)) or _balanced_starts(shape, len(where))
    found: list[list[int]] = [[] for _ in range(ranks)]
    for rank, (low, high) in zip(where, pairwise([0, *starts, shape.layers]), strict=True):
        found[rank] += range(low, high)
    return tuple(map(tuple, found))


def _balanced_starts(shape: Shape, stages: int) -> list[int]:
    """First layer of each later stage, the head's cost counted."""
    length = shape.longest or 1
    attended = 2.0 * length * shape.attention_parameters + 4.0 * length * length * shape.hidden
    fed = {kind: 2.0 * length * shape.of_feed_forward(kind, active=True) for kind in (True, False)}
    layers = [attended + fed[shape.has_experts(layer)] for layer in range(shape.layers)]
    costs, is_block = [0.0, *layers, 2.0 * length * shape.head_parameters], [False, *[True] * shape.layers, False]
    return [start - 1 for start in balanced_starts(costs, is_block, stages)]  # the embedding is no layer
