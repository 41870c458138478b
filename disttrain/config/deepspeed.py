"""DeepSpeed's JSON beside a config, where `strategy.deepspeed` hands the step to its engine: each thing is said in one place.

What a config says already is filled into the JSON; what the JSON says otherwise is refused. What it says of how the engine
goes about its work is handed on. Nothing of DeepSpeed is imported here, nor anywhere before a rank has started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from disttrain.config.components import needs_whole
from disttrain.config.schema import Config, StrategyConfig
from disttrain.errors import ConfigError, MissingExtraError
from disttrain.places import expanded

Said = Mapping[str, Any]

ACCUMULATION = "disttrain.callbacks.grad_accumulation.GradAccumulation"
AMP = "disttrain.callbacks.amp.AMP"
ZERO = "zero_optimization"

FILLED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "callbacks.grad_accumulation.micro_batch_size",
    "gradient_accumulation_steps": "",
    "gradient_clipping": "train.clip_norm",
    "stage": "strategy.zero",
}
"""Numbers of the JSON that follow from a config, and the key that each comes from; the last stands in `zero_optimization`."""

PRECISION = "callbacks.amp.precision is autocast over float32 weights in every layout; the engine's own is another training"
OFFLOAD = "gradients that wait in host memory are not looked at before the update, so ranks could not agree on norm and skip"
ELSEWHERE = {
    "bf16": (PRECISION, "callbacks.amp.precision=bf16"),
    "fp16": (PRECISION, "callbacks.amp.precision=bf16"),
    "torch_autocast": (PRECISION, "callbacks.amp.precision=bf16"),
    "amp": (PRECISION, "callbacks.amp.precision=bf16"),
    "data_types": (PRECISION, "callbacks.amp.precision=bf16"),
    "communication_data_type": (
        "gradients travel in float32; in fewer bytes it is another training",
        "strategy=ddp strategy.compression=bf16",
    ),
    "optimizer": ("optimizer= says which it is, and the engine is given that one", "optimizer=adamw optimizer.lr=1e-3"),
    "scheduler": ("scheduler= says how the rate moves", "scheduler=cosine"),
    "activation_checkpointing": ("strategy.recompute says what runs again", "strategy.recompute=full"),
    "gradient_allreduce_op": ("the mean over ranks is what the loss is scaled for", ""),
    "managed_gradient_accumulation": ("a step's last micro-batch is told to the engine", ""),
    "offload_optimizer": (OFFLOAD, "strategy=fsdp strategy.offload=true"),
    "offload_param": (OFFLOAD, "strategy=fsdp strategy.offload=true"),
    "cpu_offload": (OFFLOAD, "strategy=fsdp strategy.offload=true"),
    "tensorboard": ("callbacks.tensorboard writes them", "callbacks=[default,tensorboard]"),
    "wandb": ("callbacks.wandb writes to it", "callbacks.wandb.project=mine"),
    "csv_monitor": ("callbacks.jsonl writes every row", ""),
    "tensor_parallel": ("the engine is given whole layers", "strategy=ddp_tensor_parallel"),
    "sequence_parallel_size": ("the engine is given whole sequences", "strategy=context_parallel"),
    "pipeline": ("the engine is given the whole depth", "strategy=pipeline_parallel"),
}
"""What the JSON may ask for and is said elsewhere, or can't be had here: why, and the override that comes closest."""

HANDED_ON = {
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "comms_logger",
    "flops_profiler",
    "zero_allow_untested_optimizer",
    ZERO,
}
ZERO_HANDED_ON = {
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "round_robin_gradients",
}
"""How the engine goes about its work; none of it changes what a step computes."""

USUAL = {
    "sync_every": (1, "replicas that train by themselves are no engine's step", "strategy=ddp"),
    "compression": ("none", "the engine sums gradients itself, and does not compress them", "strategy=ddp"),
    "find_unused_parameters": (False, "the engine updates what a step left out as if its gradient were zero", "strategy=ddp"),
    "bucket_size": (25.0, "the engine's buckets are zero_optimization.reduce_bucket_size of its JSON, in elements", ""),
    "stage_split": ([], "the engine is given the whole depth", "strategy=pipeline_parallel"),
}
"""Knobs of other strategies: their usual values, why no other can be had here, and where it can."""
AXES = {
    "tp": ("strategy=ddp_tensor_parallel", "layers"),
    "pp": ("strategy=pipeline_parallel", "depth"),
    "cp": ("strategy=context_parallel", "sequences"),
    "ep": ("strategy=expert_parallel", "sets of experts"),
    "dp_shard": ("strategy=fsdp", "weights"),
}
"""Axes that the engine does not get: where they are had, and what of the model is whole instead."""


@dataclass(frozen=True)
class Batch:
    """A step's samples: in all, in a micro-batch of one rank, and micro-batches a step."""

    whole: int
    micro: int
    num_micro: int


def check_deepspeed(config: Config) -> StrategyConfig:
    """`strategy` with DeepSpeed's JSON read in; ConfigError for what the engine can't do, or what is said twice."""
    strategy = config.strategy
    if strategy.deepspeed is None:
        return strategy
    _check_layout(strategy)
    if config.train.dtype != "float32":
        found = f"train.dtype={config.train.dtype} under strategy.deepspeed: the engine keeps its master weights in float32"
        raise ConfigError(found, "train.dtype=float32")
    for key, callback in config.callbacks.items():
        if callback["_target_"] == AMP and callback.get("precision") == "fp16":
            raise fp16(f"callbacks.{key}.precision")
    why = needs_whole([str(config.optimizer.get("_target_")).rpartition(".")[2]])
    if strategy.zero and why:
        found = f"{config.optimizer['_target_']} {why}, and the engine's ranks update flat pieces of them (strategy.zero={strategy.zero})"
        raise ConfigError(found, "strategy.zero=0, or optimizer=adamw")
    said, source = read(strategy.deepspeed)
    local = config.train.global_batch_size // strategy.dp_replicate
    sizes = [one.get("micro_batch_size", 8) for one in config.callbacks.values() if one["_target_"] == ACCUMULATION]
    micro = min([*sizes, local])
    filled_in(said, source, Batch(config.train.global_batch_size, micro, local // micro), config.train.clip_norm, strategy.zero)
    return replace(strategy, deepspeed=_without_auto(said))


def must_be_installed(config: Config) -> None:
    """MissingExtraError where the engine is asked for and DeepSpeed is not there. It is looked for, not imported."""
    if config.strategy.deepspeed is not None and find_spec("deepspeed") is None:
        raise MissingExtraError("deepspeed", "deepspeed", "strategy=deepspeed")


def fp16(key: str) -> ConfigError:
    """Why half precision with a loss scale is refused."""
    why = "the engine moves a loss scale only for weights that are fp16 themselves, which is another training"
    return ConfigError(f"{key}=fp16 under strategy.deepspeed: {why}", f"{key}=bf16")


def _check_layout(strategy: StrategyConfig) -> None:
    for axis, (instead, what) in AXES.items():
        if (degree := getattr(strategy, axis)) > 1:
            found = f"strategy.{axis}={degree} under strategy.deepspeed: the engine is given whole {what}, its only axis is dp_replicate"
            raise ConfigError(found, f"strategy.{axis}=1, or {instead}")
    if strategy.dp_replicate == 1:
        found = "strategy.deepspeed hands gradients to an engine that sums them over ranks, and strategy.dp_replicate is 1"
        raise ConfigError(found, "launch.world_size=2, or strategy=single")
    for name, (usual, why, instead) in USUAL.items():
        if (value := getattr(strategy, name)) != usual:
            remedy = " or ".join(filter(None, (f"strategy.{name}={str(usual).lower()}", instead)))
            raise ConfigError(f"strategy.{name}={str(value).lower()} under strategy.deepspeed: {why}", remedy)
    if strategy.zero == 3:
        found = "strategy.zero=3 under strategy.deepspeed: between uses no rank holds a whole parameter, which evaluation, callbacks and "
        raise ConfigError(f"{found}checkpoints look at", "strategy.zero=2, or strategy=fsdp strategy.zero=3")


def read(given: Said | str) -> tuple[dict[str, Any], str]:
    """The JSON as it stands, and what to call it in messages: its file, or the key that holds it."""
    if not isinstance(given, str):
        return dict(given), "strategy.deepspeed"
    try:
        found = json.loads(expanded(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"strategy.deepspeed={given} can't be read: {error.strerror or error}", "strategy.deepspeed=<DeepSpeed's JSON file>"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{given} is no JSON: {error}", "strategy.deepspeed=<DeepSpeed's JSON file>") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{given} holds no JSON object: DeepSpeed's JSON is one", "strategy.deepspeed=<DeepSpeed's JSON file>")
    return found, Path(given).name


def filled_in(said: Said, source: str, batch: Batch, clip_norm: float | None, zero: int) -> dict[str, Any]:
    """What the engine is given: the JSON, and what follows from a config. ConfigError where the two differ, naming both."""
    said = _without_auto(said)
    inside = said.pop(ZERO, {})
    if not isinstance(inside, Mapping):
        raise ConfigError(f"{source}: {ZERO} is a section with keys of its own", "leave it out")
    numbers = {
        "train_batch_size": batch.whole,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.num_micro,
        "gradient_clipping": clip_norm or 0.0,
    }
    for place, part, ours, known in (("", said, numbers, HANDED_ON), (f"{ZERO}.", inside, {"stage": zero}, ZERO_HANDED_ON)):
        for key, value in part.items():
            if key in ours:
                _must_agree(source, place, key, value, ours[key])
            elif key not in known and not _is_off(value):
                raise _not_handed_on(source, place, key)
    rest = {key: value for key, value in said.items() if key in HANDED_ON}
    within = {key: value for key, value in inside.items() if key in ZERO_HANDED_ON}
    return {"zero_allow_untested_optimizer": True} | rest | numbers | {ZERO: within | {"stage": zero}}


def _must_agree(source: str, place: str, key: str, said: Any, ours: float) -> None:
    if isinstance(said, (int, float)) and not isinstance(said, bool) and float(said) == float(ours):
        return
    override = FILLED[key]
    if not override:
        found = f"train.global_batch_size and callbacks.grad_accumulation.micro_batch_size make {ours}"
        raise ConfigError(f"{source} says {place}{key}={said}, and {found}", f"leave {key} out of it: it follows")
    shown = "null" if key == "gradient_clipping" and not ours else ours
    wanted = "null" if key == "gradient_clipping" and not said else said
    raise ConfigError(f"{source} says {place}{key}={said}, and {override}={shown}", f"{override}={wanted}, or leave {key} out of {source}")


def _not_handed_on(source: str, place: str, key: str) -> ConfigError:
    if key in ELSEWHERE:
        why, instead = ELSEWHERE[key]
        return ConfigError(f"{source} says {place}{key}: {why}", f"leave it out of {source}" + (f", and {instead}" if instead else ""))
    known = ZERO_HANDED_ON if place else HANDED_ON - {ZERO}
    listed = ", ".join(sorted(known))
    return ConfigError(
        f"{source} says {place}{key}, which is not handed on to the engine; of {ZERO if place else 'its keys'}: {listed}", "leave it out"
    )


def _is_off(value: Any) -> bool:
    """Whether a section or key of the JSON asks for nothing."""
    return value in (None, False) or (isinstance(value, Mapping) and value.get("enabled", value.get("device", True)) in (False, "none"))


def _without_auto(said: Said) -> dict[str, Any]:
    """Without the values that others (transformers, accelerate) fill in, and sections that they switch."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        part = _without_auto(value) if isinstance(value, Mapping) else value
        switched = isinstance(value, Mapping) and value.get("enabled") == "auto"
        if value != "auto" and not switched and not (part == {} and value):
            found[key] = part
    return found
