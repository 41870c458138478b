"""From a config to a case: the model's shape, degrees that are legal, a batch that divides, and a word on what was changed.

A plan is not refused: what doesn't divide is planned as the nearest that does, and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from disttrain.config.callbacks import key_of
from disttrain.config.check import ACCUMULATION
from disttrain.config.local_sgd import AMP
from disttrain.config.schedules import holders, stages_a_rank
from disttrain.config.schema import Config, StrategyConfig
from disttrain.config.split import balanced_starts
from disttrain.config.world import DEGREES, shares_rows
from disttrain.errors import ConfigError
from disttrain.plan import legal
from disttrain.plan.case import FULL, NONE, SPLIT_BACKWARD, Case, Layout, Numbers, Recompute, Software, every
from disttrain.plan.shape import Shape

GPT = "disttrain.models.gpt.GPT"
DROPPED = 0.4
"""Share of a block's activations that selective recomputation does not keep: outputs of norms, activations."""
OWN_TENSOR_EXPOSED = 0.75
"""Of our tensor-parallel collectives, half of backward's run beside the weights' gradient; not where a schedule splits the two."""
STATES = {"AdamW": 8.0, "Adam": 8.0, "Adagrad": 4.0}
"""Bytes of float32 moments a parameter, by optimizer; SGD has none without momentum."""


@dataclass
class Settled:
    """A case that is legal, on how many machines, what was changed to make it so, and what else is to be said of it."""

    case: Case
    nodes: int
    changes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """All of both."""
        return [*self.changes, *self.remarks]


def settle(config: Config, precision: str | None = None) -> Settled:
    """The case of a config. ConfigError for a model whose shape is not known. `precision` stands in for callbacks.amp's."""
    changes: list[str] = []
    model = legal.whole_heads(config.model, changes)
    shape = shape_of(model)
    precision = precision or precision_of(config)
    strategy = legal.degrees(config, shape, changes)
    if strategy.deepspeed is not None:
        strategy = legal.like(strategy, changes)
    length = int(config.dataset.get("context") or config.model.get("max_seq_len") or 1)
    layout, batch = legal.whole_batch(config, layout_of(strategy, shape), changes)
    software = software_of(strategy, model, precision)
    case = Case(shape, layout, length, batch, numbers_of(config, layout, precision), software)
    waits = "what waits in host memory is left out of the device's; the time that it takes on its way is not reckoned"
    remarks = [waits] if layout.offload or layout.offload_activations else []
    return Settled(case, legal.num_nodes(config, layout.world, changes), changes, remarks)


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
    return Numbers(
        weight=whole,
        gradient=whole,
        state=state,
        compute=2.0 if half else whole,
        stream=whole,
        gathered=2.0 if half else 0.0,
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
    selective = Recompute(0.0, 0.0, 1.0 / gap, 1.0 - DROPPED / gap)
    recompute = {"none": NONE, "full": FULL if gap == 1 else every(1.0 / gap), "selective": selective}[strategy.recompute]
    virtual = stages_a_rank(strategy.schedule, strategy.virtual_stages) if strategy.pp > 1 else 1
    return Layout(
        dp_replicate=strategy.dp_replicate,
        dp_shard=strategy.dp_shard,
        cp=strategy.cp,
        tp=strategy.tp,
        pp=strategy.pp,
        ep=strategy.ep,
        zero=strategy.zero if strategy.dp_shard > 1 else 0,
        sequence_parallel=strategy.sequence_parallel,
        schedule=strategy.schedule if strategy.pp > 1 else "1f1b",
        virtual=virtual,
        recompute=recompute,
        blocks=blocks_of(shape, strategy.schedule, strategy.pp, virtual, strategy.stage_split),
        share_context=False,
        attention=strategy.attention if strategy.cp > 1 else "gather",
        loss_chunk=strategy.loss_chunk is not None,
        bucket_size=strategy.bucket_size,
        sync_every=strategy.sync_every if strategy.dp_replicate > 1 else 1,
        compression=strategy.compression,
        compression_rank=strategy.compression_rank,
        offload=strategy.offload and shares_rows(strategy),
        offload_activations=strategy.offload_activations,
    )


def strategy_of(layout: Layout, strategy: StrategyConfig, shape: Shape) -> StrategyConfig:
    """The strategy that gives this layout: `strategy`, with as little changed as can be. What belongs to an axis goes with it."""
    again, pipes = layout.recompute, layout.pp > 1
    share = again.gemm or again.memory
    least = stages_a_rank(layout.schedule, None)
    asked = strategy.virtual_stages or least
    virtual = strategy.virtual_stages if asked == layout.virtual else layout.virtual if layout.virtual != least else None
    split = strategy.stage_split if pipes else []
    if split and layout.blocks != blocks_of(shape, layout.schedule, layout.pp, layout.virtual, split):
        split = []
    return replace(
        strategy,
        **{name: getattr(layout, name) for name in (*DEGREES, "ep", "sequence_parallel")},
        zero=cast(Any, layout.zero) if layout.dp_shard > 1 else strategy.zero,
        gather_dtype=strategy.gather_dtype if layout.shares_rows else "weights",
        offload=layout.offload,
        attention=cast(Any, layout.attention) if layout.cp > 1 else "gather",
        schedule=cast(Any, layout.schedule) if pipes else strategy.schedule,
        virtual_stages=virtual if pipes else None,
        stage_split=split,
        recompute="full" if again.gemm else "selective" if again.memory else "none",
        recompute_every=round(1 / share) if share else strategy.recompute_every,
        deepspeed=None,
    )


def laid_out(config: Config, case: Case) -> Config:
    """The config with the case's layout, batch and ranks, and its micro-batch where a callback takes one."""
    key, callbacks = key_of(config, ACCUMULATION), dict(config.callbacks)
    if key is not None:
        callbacks[key] = callbacks[key] | {"micro_batch_size": case.layout.micro_batch}
    return replace(
        config,
        model=legal.whole_heads(config.model, []),
        strategy=strategy_of(case.layout, config.strategy, case.shape),
        callbacks=callbacks,
        train=replace(config.train, global_batch_size=case.global_batch),
        launch=replace(config.launch, world_size=case.layout.world),
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
