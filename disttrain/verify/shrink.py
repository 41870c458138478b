"""The two configs that `verify` compares: the layout's, made small, and one device's with the same micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from disttrain.config.check import ACCUMULATION, micro_batch_of
from disttrain.config.schedules import takes
from disttrain.config.schema import Config, StrategyConfig
from disttrain.config.sequence import unit_of

MICRO_BATCH = 2
CONTEXT = 32
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bf16": 3e-1, "fp16": 6e-2}
"""Largest relative error by precision, where `verify.tolerance` is null: rounding of sums in another order.

Of the half types: about twice the largest error seen in three steps of llama_tiny cut over four ranks. They show that a
layout is not badly wrong; only float64 proves that it is right.
"""


def shrunk(config: Config) -> tuple[Config, list[str]]:
    """The layout's config, as small as it allows: what no layout depends on (batch, sequence, steps); and what was changed."""
    micro, num_micro, data = micro_batches(config)
    notes = []
    if config.verify.shrink:
        new_micro, new_num = min(micro, MICRO_BATCH), _fewest(config.strategy, num_micro)
        if (new_micro, new_num) != (micro, num_micro):
            whole = new_micro * new_num * data
            notes.append(f"global batch {config.train.global_batch_size} -> {whole} ({new_num} x {new_micro} x {data})")
        micro, num_micro = new_micro, new_num
        unit = unit_of(config.strategy)
        context = -(-CONTEXT // unit) * unit
        if int(config.dataset.get("context") or 0) > context:
            notes.append(f"sequence {config.dataset['context']} -> {context}")
            config = replace(config, dataset=config.dataset | {"context": context})
    if config.strategy.gather_dtype != "weights" and config.verify.dtype != "bf16":
        notes.append(f"strategy.gather_dtype={config.strategy.gather_dtype} rounds weights: compared without")
        config = replace(config, strategy=replace(config.strategy, gather_dtype="weights"))
    if dtype_of(config) != config.verify.dtype:
        notes.append(f"DeepSpeed's engine keeps its master weights in float32: compared in that, not in {config.verify.dtype}")
    steps = config.verify.steps
    train = replace(config.train, steps=steps, epochs=None, global_batch_size=micro * num_micro * data, dtype=weights_dtype(config))
    return replace(config, train=train, callbacks=_policies(config, micro), resume=None, init_from=None), notes


def _fewest(strategy: StrategyConfig, num_micro: int) -> int:
    """The fewest micro-batches, two at least, that a pipeline's schedule takes; never more than there are."""
    legal = range(2, num_micro) if strategy.pp == 1 else (n for n in range(2, num_micro) if takes(strategy.schedule, n, strategy.pp))
    return next(iter(legal), num_micro)


def one_device(config: Config) -> Config:
    """The same experiment on one rank, in as many micro-batches."""
    micro, _, data = micro_batches(config)
    launch = replace(config.launch, world_size=1)
    return replace(config, strategy=StrategyConfig(name="single"), launch=launch, callbacks=_policies(config, micro * data))


def lossy_by_design(config: Config) -> list[str]:
    """The overrides, if any, by which a layout asks for another training than one device's."""
    usual = {"compression": "none", "sync_every": 1}
    found = {name: getattr(config.strategy, name) for name in usual}
    return [f"strategy.{name}={value}" for name, value in found.items() if value != usual[name]]


def micro_batches(config: Config) -> tuple[int, int, int]:
    """(samples a micro-batch, micro-batches a step, data ranks)."""
    data = config.strategy.dp_replicate * config.strategy.dp_shard
    local = config.train.global_batch_size // data
    micro = min(micro_batch_of(config) or local, local)
    return micro, local // micro, data


def dtype_of(config: Config) -> str:
    """The type that both sides compute in: verify.dtype, or the nearest that the layout can."""
    return "float32" if config.strategy.deepspeed is not None and config.verify.dtype == "float64" else config.verify.dtype


def weights_dtype(config: Config) -> Literal["float32", "float64"]:
    """float64 for proofs, float32 else."""
    return "float64" if dtype_of(config) == "float64" else "float32"


def tolerance(config: Config) -> float:
    """The config's, where it is set; else the precision's."""
    return config.verify.tolerance or TOLERANCES[dtype_of(config)]


def _policies(config: Config, micro_batch_size: int) -> dict[str, Any]:
    """The micro-batch size and precision; nothing else takes part in a step's numbers."""
    callbacks: dict[str, Any] = {"grad_accumulation": {"_target_": ACCUMULATION, "micro_batch_size": micro_batch_size}}
    if config.verify.dtype in ("bf16", "fp16"):
        callbacks["amp"] = {"_target_": "disttrain.callbacks.amp.AMP", "precision": config.verify.dtype}
    return callbacks
