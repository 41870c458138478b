"""The smallest experiments that still have every part: what the tests of layouts train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from disttrain.config.schema import Config, LaunchConfig, StrategyConfig, TrainConfig, VerifyConfig

CONTEXT, VOCABULARY = 16, 32

GPT = {
    "_target_": "disttrain.models.gpt.GPT",
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "vocab_size": VOCABULARY,
    "max_seq_len": CONTEXT,
}
"""GPT-2's shape: tied head, merged projections, biases, learned positions."""

GPT_SEPARATE = GPT | {"merged_qkv": False}

LLAMA = GPT | {
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "tie_embeddings": False,
    "norm": "rms",
    "position": "rotary",
    "mlp": "swiglu",
    "bias": False,
    "merged_qkv": False,
}
"""Grouped-query heads, a head of its own, separate projections."""

LLAMA_MERGED = LLAMA | {"merged_qkv": True}

EXPERTS = {
    "_target_": "disttrain.models.experts.ExpertShape",
    "num_experts": 4,
    "top_k": 2,
    "intermediate_size": 24,
    "every": 2,
    "balance_weight": 0.1,
}
MOE = GPT | {"experts": EXPERTS}
"""GPT-2's shape, its second block with experts."""

BLOCK = {"_target_": "disttrain.models.block.TransformerBlock", "hidden_size": 32, "num_heads": 4, "max_seq_len": CONTEXT}
CNN = {"_target_": "disttrain.models.cnn.SimpleCNN"}

SEQUENCE_MODELS = {
    "gpt": GPT,
    "gpt_separate": GPT_SEPARATE,
    "llama": LLAMA,
    "llama_merged": LLAMA_MERGED,
    "block": BLOCK,
}
"""Every shape of model whose samples are sequences."""

TOKENS = {
    "_target_": "disttrain.data.synthetic.Synthetic",
    "kind": "tokens",
    "context": CONTEXT,
    "vocab_size": VOCABULARY,
    "num_samples": 64,
    "num_validation": 21,
}
VECTORS = {"_target_": "disttrain.data.synthetic.Synthetic", "kind": "vectors", "shape": [CONTEXT, 32], "num_samples": 64}

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.1}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def config(
    dp: int = 1,
    tp: int = 1,
    *,
    shard: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    strategy: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    model: Mapping[str, Any] = GPT,
    dataset: Mapping[str, Any] | None = None,
    micro_batch_size: int | None = None,
    callbacks: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] = ADAMW,
    scheduler: Mapping[str, Any] | None = None,
    verify: Mapping[str, Any] | None = None,
    plan: Mapping[str, str] | None = None,
    seed: int = 0,
    **train: Any,
) -> Config:
    """A frozen config as `check` leaves it. The global batch is 8 samples; `train` are keys of that group.

    `dp`, `shard`, `cp`, `tp`, `pp`, `ep`: degrees; `strategy`: that group's other keys.
    """
    keyed: dict[str, Any] = dict(callbacks or {})
    if micro_batch_size is not None:
        policy = "disttrain.callbacks.grad_accumulation.GradAccumulation"
        keyed["grad_accumulation"] = {"_target_": policy, "micro_batch_size": micro_batch_size}
    data = dataset or (VECTORS if model["_target_"] == BLOCK["_target_"] else TOKENS)
    return Config(
        strategy=StrategyConfig(
            dp_replicate=dp,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            pp=pp,
            ep=ep,
            sequence_parallel=sequence_parallel,
            plan=dict(plan or {}),
            **(strategy or {}),
        ),
        model=dict(model),
        dataset=dict(data),
        optimizer=dict(optimizer),
        scheduler=dict(scheduler or {"_target_": "disttrain.train.optimizer.Constant"}),
        callbacks=keyed,
        launch=LaunchConfig(world_size=dp * shard * cp * tp * pp, device="cpu", threads=1, timeout_seconds=60.0),
        train=replace(TrainConfig(steps=4, global_batch_size=8, clip_norm=0.1, eval_every=None), **train),
        verify=VerifyConfig(**(verify or {})),
        seed=seed,
    )
