"""The two configs that `verify` compares: the layout's, made small, and one device's with the same micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from disttrain.config.schema import Config, StrategyConfig

MICRO_BATCH = 2
CONTEXT = 32
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bf16": 3e-1, "fp16": 6e-2}
"""Largest relative error by precision, unless `verify.tolerance` says otherwise: rounding of sums in another order.

Of the half types: about twice the largest error seen in three steps of llama_tiny cut over four ranks. They show that a
layout is not badly wrong; only float64 proves that it is right.
"""


def shrunk(config: Config) -> tuple[Config, list[str]]:
    """The layout's config, as small as it allows: what no layout depends on (batch, sequence, steps); and what was changed."""
    micro, num_micro, data = micro_batches(config)
    notes = []
    if config.verify.shrink:
        new_micro, new_num = min(micro, MICRO_BATCH), min(num_micro, 2)
        if (new_micro, new_num) != (micro, num_micro):
            whole = new_micro * new_num * data
            notes.append(f"global batch {config.train.global_batch_size} -> {whole} ({new_num} x {new_micro} x {data})")
        micro, num_micro = new_micro, new_num
        if int(config.dataset.get("context") or 0) > CONTEXT:
            notes.append(f"sequence {config.dataset['context']} -> {CONTEXT}")
            config = replace(config, dataset=config.dataset | {"context": CONTEXT})
    steps = config.verify.steps
    train = replace(config.train, steps=steps, epochs=None, global_batch_size=micro * num_micro * data, dtype=weights_dtype(config))
    return replace(config, train=train, callbacks=_policies(config, micro), resume=None, init_from=None), notes


def one_device(config: Config) -> Config:
    """The same experiment on one rank, in as many micro-batches."""
    micro, _, data = micro_batches(config)
    launch = replace(config.launch, world_size=1)
    return replace(config, strategy=StrategyConfig(name="single"), launch=launch, callbacks=_policies(config, micro * data))


def without_dropout(config: Config) -> Config:
    """Masks are drawn per rank, so equality is proved without them."""
    return replace(config, model=config.model | {"dropout": 0.0}) if config.model.get("dropout") else config


def micro_batches(config: Config) -> tuple[int, int, int]:
    """(samples a micro-batch, micro-batches a step, data ranks)."""
    data = config.strategy.dp_replicate * config.strategy.dp_shard
    local = config.train.global_batch_size // data
    accumulation: dict[str, Any] = config.callbacks.get("grad_accumulation") or {}
    micro = min(int(accumulation.get("micro_batch_size", local)), local)
    return micro, local // micro, data


def weights_dtype(config: Config) -> Literal["float32", "float64"]:
    """float64 for proofs, float32 else."""
    return "float64" if config.verify.dtype == "float64" else "float32"


def tolerance(config: Config) -> float:
    """The config's, where it was set; else the precision's."""
    return TOLERANCES[config.verify.dtype] if config.verify.tolerance == TOLERANCES["float64"] else config.verify.tolerance


def _policies(config: Config, micro_batch_size: int) -> dict[str, Any]:
    """The micro-batch size and precision; nothing else takes part in a step's numbers."""
    callbacks: dict[str, Any] = {
        "grad_accumulation": {"_target_": "disttrain.callbacks.grad_accumulation.GradAccumulation", "micro_batch_size": micro_batch_size}
    }
    if config.verify.dtype in ("bf16", "fp16"):
        callbacks["amp"] = {"_target_": "disttrain.callbacks.amp.AMP", "precision": config.verify.dtype}
    return callbacks
