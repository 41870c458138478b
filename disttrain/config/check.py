"""Whether the parts of a config fit each other and the machine, before any rank starts. No torch here.

`check` returns a config in which the degrees, the world size, the device and the backend are plain values. What
only a machine can say of its own ranks (threads, start method, network interface) stays `auto` for `launch`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Mapping
from typing import Any

from disttrain.config import schedules, typed, world
from disttrain.config.callbacks import check_callbacks, key_of
from disttrain.config.components import CHOICES_FOR, GIVES, TAKES, WITHOUT_BLOCKS, needs_whole
from disttrain.config.deepspeed import check_deepspeed
from disttrain.config.local_sgd import check_local_sgd
from disttrain.config.schema import Config
from disttrain.config.sequence import check_sequence
from disttrain.errors import ConfigError

ACCUMULATION = "disttrain.callbacks.grad_accumulation.GradAccumulation"

POSITIVE = {
    "train": ("steps", "epochs", "global_batch_size", "log_every", "eval_every", "clip_norm"),
    "verify": ("steps", "tolerance"),
    "plan": ("top", "tokens"),
    "doctor": ("steps", "warmup"),
    "generate": ("length", "top_k"),
    "launch": ("world_size", "nodes", "threads", "timeout_seconds"),
    "strategy": ("loss_chunk", "virtual_stages", "bucket_size", "compression_rank", "recompute_every", "sync_every", "outer_lr"),
    "model": ("num_layers", "num_heads", "num_kv_heads", "hidden_size", "intermediate_size", "vocab_size", "max_seq_len", "num_classes"),
}
NOT_NEGATIVE = {
    "seed": (),
    "launch": ("max_restarts", "grace_seconds"),
    "generate": ("temperature",),
    "optimizer": ("lr", "weight_decay", "eps", "momentum"),
    "scheduler": ("warmup_steps", "decay_steps", "min_factor"),
    "dataset": ("num_workers",),
}


OF_THE_LOSS = ("loss", "perplexity", "bits_per_byte")
"""What an evaluation gives by itself."""


def check(config: Config, launched: int | None = None) -> Config:
    """The config with its automatic values worked out. `launched` is the world that torchrun or srun started, if one did.

    Raises ConfigError for parts that do not fit each other, LaunchError for a world that is not the one asked for.
    """
    config = copy.deepcopy(config)
    check_numbers(config)
    check_length(config)
    check_pair(config.model, config.dataset)
    check_heads(config.model)
    config.launch = world.check_launch(config, launched)
    check_layout(config)
    check_blocks(config)
    check_callbacks(config)
    check_metrics(config.metrics)
    config.strategy = check_deepspeed(config)
    return config


def check_layout(config: Config) -> None:
    """What is shared out over ranks can be; -1 among the degrees is filled in. Nothing is asked of the machine or of classes."""
    config.strategy = world.check_degrees(config.strategy, int(config.launch.world_size))
    world.check_tensor(config)
    world.check_experts(config)
    check_optimizer(config)
    check_memory(config)
    check_sequence(config)
    check_batch(config)
    check_pipeline(config)
    check_local_sgd(config)


def check_numbers(config: Config) -> None:
    """Signs of numbers, and that they are numbers."""
    for limit, table in ((0, NOT_NEGATIVE), (1, POSITIVE)):
        for section, names in table.items():
            part = getattr(config, section)
            values = part if isinstance(part, Mapping) else vars(part) if names else {"": part}
            for name in names or ("",):
                value = values.get(name)
                key = f"{section}.{name}".rstrip(".")
                if isinstance(value, float) and not math.isfinite(value):
                    raise ConfigError(f"{key}={value} is not a finite number", f"{key}=<a number>")
                if isinstance(value, (int, float)) and (value < 0 or (limit and value == 0)):
                    raise ConfigError(f"{key}={value} must be {'more than' if limit else 'at least'} zero", f"{key}={limit}")
    dropout = config.model.get("dropout")
    if isinstance(dropout, float) and not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout={dropout} is not a share between 0 and 1", "model.dropout=0.1")


def check_length(config: Config) -> None:
    """The run is as long as one of steps and epochs says, and its schedule fits in."""
    steps, epochs = config.train.steps, config.train.epochs
    if steps is None and epochs is None:
        raise ConfigError("neither train.steps nor train.epochs is given", "train.steps=400")
    if steps is not None and epochs is not None:
        both = f"train.steps={steps} and train.epochs={epochs} both say how long the run is; one of them must be null"
        raise ConfigError(both, f"train.epochs={epochs} train.steps=null")
    warmup = config.scheduler.get("warmup_steps") or 0
    decay = config.scheduler.get("decay_steps") or 0
    if steps is not None and isinstance(warmup, int) and isinstance(decay, int) and warmup + decay > steps:
        parts = f"scheduler.warmup_steps={warmup}" + (f" and scheduler.decay_steps={decay}" if decay else "")
        raise ConfigError(f"{parts} do not fit into train.steps={steps}", f"train.steps={warmup + decay}")


def check_pair(model: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
    """A shipped model and a shipped dataset speak of the same kind of samples; a user's own are taken at their word."""
    takes, gives = TAKES.get(str(model.get("_target_"))), GIVES.get(str(dataset.get("_target_")))
    gives = dataset.get("kind", gives)
    if takes is not None and gives is not None and takes != gives:
        raise ConfigError(
            f"the model ({model['_target_']}) takes {takes}, but the dataset ({dataset['_target_']}) gives {gives}",
            f"dataset={CHOICES_FOR[takes]}",
        )
    context, longest = dataset.get("context"), model.get("max_seq_len")
    if isinstance(context, int) and isinstance(longest, int) and context > longest:
        raise ConfigError(f"dataset.context={context} is longer than model.max_seq_len={longest}", f"model.max_seq_len={context}")


def check_heads(model: Mapping[str, Any]) -> None:
    """Heads share out the hidden size, and groups of heads the key-value heads."""
    hidden, heads, groups = (model.get(name) for name in ("hidden_size", "num_heads", "num_kv_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        fitting = -(-hidden // heads) * heads
        raise ConfigError(f"model.hidden_size={hidden} is not divisible by model.num_heads={heads}", f"model.hidden_size={fitting}")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ConfigError(f"model.num_heads={heads} is not divisible by model.num_kv_heads={groups}", f"model.num_kv_heads={heads}")


def check_optimizer(config: Config) -> None:
    """An optimizer that looks at whole matrices gets them. Under tp, shipped models and those with a plan given are cut."""
    target, knobs = str(config.optimizer.get("_target_")), config.strategy
    has_plan = bool(knobs.plan) or str(config.model.get("_target_")).startswith("disttrain.")
    cutting = [name for name, cuts in (("dp_shard", knobs.zero > 0), ("tp", has_plan)) if cuts and getattr(knobs, name) > 1]
    if cutting and not target.startswith("disttrain.") and (why := needs_whole([target.rpartition(".")[2]])):
        found = f"{target} {why}, and strategy.{cutting[0]}={getattr(knobs, cutting[0])} cuts matrices over ranks"
        raise ConfigError(found, "optimizer=muon or adamw, or strategy=ddp")


def check_blocks(config: Config) -> None:
    """What works on a model's repeated blocks finds some; a user's own model is asked when it is made."""
    if config.model.get("_target_") not in WITHOUT_BLOCKS:
        return
    for name, usual in (("recompute", "none"), ("offload_activations", False), ("compile", False)):
        if (value := getattr(config.strategy, name)) != usual:
            found = f"strategy.{name}={typed.show(value)} works on blocks that repeat, and {config.model['_target_']} has none"
            raise ConfigError(found, f"strategy.{name}={typed.show(usual)}")
    if config.optimizer.get("_target_") == "disttrain.parallel.muon.Muon":
        raise ConfigError(f"Muon is for matrices of blocks that repeat, and {config.model['_target_']} has none", "optimizer=adamw")


def check_memory(config: Config) -> None:
    """What is kept for backward is chosen once: by us, or by the compiler. What is compressed are whole gradients."""
    if config.strategy.compression != "none" and world.shares_rows(config.strategy):
        raise ConfigError(
            f"strategy.compression={config.strategy.compression} compresses whole gradients, and strategy.dp_shard shares them out",
            "strategy.compression=none",
        )
    if config.strategy.compile and config.strategy.recompute == "selective":
        raise ConfigError(
            "strategy.compile=true and strategy.recompute=selective both choose which activations a block keeps", "strategy.recompute=full"
        )
    schedule = config.strategy.schedule
    if config.strategy.recompute == "selective" and config.strategy.pp > 1 and schedules.SCHEDULES[schedule].splits_backward:
        raise ConfigError(
            f"strategy.recompute=selective keeps results for one backward, and strategy.schedule={schedule} runs two, "
            "for inputs and for weights",
            "strategy.recompute=full, or strategy.schedule=interleaved_1f1b",
        )


def micro_batch_of(config: Config) -> int | None:
    """Samples of a micro-batch as gradient accumulation has it, whatever it is called; None without the callback."""
    name = key_of(config, ACCUMULATION)
    return None if name is None else int(config.callbacks[name].get("micro_batch_size", 8))


def check_batch(config: Config) -> None:
    """The global batch is cut into whole micro-batches on every data rank; a rank's part that is smaller than one is one."""
    total = config.train.global_batch_size
    ranks = config.strategy.dp_replicate * config.strategy.dp_shard
    name = key_of(config, ACCUMULATION)
    if name is None:
        if total % ranks:
            multiple = world.nearest_multiple(total, ranks)
            raise ConfigError(
                f"train.global_batch_size={total} is not divisible by {ranks} data ranks ({world.data_keys(config.strategy)})",
                f"train.global_batch_size={multiple}",
            )
        return
    key = f"callbacks.{name}.micro_batch_size"
    micro = config.callbacks[name].get("micro_batch_size", 8)
    if micro < 1:
        raise ConfigError(f"{key}={micro} must be more than zero", f"{key}=8")
    if total % (micro * ranks) == 0 or (total % ranks == 0 and total // ranks < micro):
        return
    legal = [n for n in world.divisors(total // ranks) if n <= micro] if total % ranks == 0 else []
    remedies = [f"{key}={max(legal)}"] if legal else []
    remedies.append(f"train.global_batch_size={world.nearest_multiple(total, micro * ranks)}")
    raise ConfigError(
        f"train.global_batch_size={total} is not divisible by {key}={micro} times {ranks} data ranks ({world.data_keys(config.strategy)}); "
        f"nearest that fits: {' or '.join(remedies)}",
        remedies[0],
    )


def check_pipeline(config: Config) -> None:
    """A pipeline has a layer for each stage, and as many micro-batches a step as its schedule takes."""
    strategy = config.strategy
    name, size = strategy.schedule, strategy.pp
    if size == 1:
        if strategy.stage_split or strategy.virtual_stages is not None:
            key = "stage_split" if strategy.stage_split else "virtual_stages"
            raise ConfigError(f"strategy.{key}={getattr(strategy, key)} needs strategy.pp of two or more", "strategy=pipeline_parallel")
        return
    if world.shares_rows(strategy) and strategy.zero != 1:
        raise ConfigError(
            f"strategy.zero={strategy.zero} under strategy.pp={size}: a pipeline's schedule keeps weights and gradients whole until its "
            "last backward, which is strategy.zero=1",
            "strategy.zero=1",
        )
    if world.shares_rows(strategy) and strategy.find_unused_parameters:
        raise ConfigError(
            f"strategy.find_unused_parameters=true under strategy.pp={size} and strategy.dp_shard={strategy.dp_shard}: a schedule "
            "that splits backward does not say which gradients it made",
            "strategy.find_unused_parameters=false",
        )
    virtual = schedules.stages_a_rank(name, strategy.virtual_stages)
    layers = config.model.get("num_layers")
    if isinstance(layers, int) and layers < size * virtual and not strategy.stage_split:
        stages = f"strategy.pp={size}" + (f" times {virtual} stages a rank (strategy.schedule={name})" if virtual > 1 else "")
        raise ConfigError(f"model.num_layers={layers}: fewer than {stages}, and each stage needs one", f"model.num_layers={size * virtual}")
    callback = key_of(config, ACCUMULATION)
    if callback is None:
        raise ConfigError(
            "strategy.pp passes micro-batches from rank to rank, and no callback says how large one is",
            "callbacks=[none,grad_accumulation]",
        )
    local = config.train.global_batch_size // (strategy.dp_replicate * strategy.dp_shard)
    micro = min(config.callbacks[callback].get("micro_batch_size", 8), local)
    found = local // micro
    if not schedules.takes(name, found, size):
        fits = schedules.nearest(name, found, size, divides=local)
        remedy = f"callbacks.{callback}.micro_batch_size={local // fits}" if fits else ""
        if not fits:
            fits = schedules.nearest(name, found, size) or size
            remedy = f"train.global_batch_size={fits * micro * config.train.global_batch_size // local}"
        raise ConfigError(
            f"strategy.schedule={name} on strategy.pp={size} ranks takes {schedules.needs(name, size)}; "
            f"train.global_batch_size and callbacks.{callback}.micro_batch_size={micro} make {found}; nearest: {fits}",
            remedy,
        )


def check_metrics(names: Container[str]) -> None:
    """No metric of the user's takes the name of a number that follows from the loss."""
    for name in OF_THE_LOSS:
        if name in names:
            found = f"metrics.{name}: val/{name} is the name of what an evaluation gives by itself, of the loss"
            raise ConfigError(found, f"metrics.my_{name}._target_=... instead of metrics.{name}._target_=...")
