"""Whether the parts of a config fit each other and the machine, before any rank starts. No torch here.

`check` returns a config in which the degrees, the world size, the device and the backend are plain values. What
only a machine can say of its own ranks (threads, start method, network interface) stays `auto` for `launch`.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from disttrain.config.components import CHOICES_FOR, GIVES, TAKES
from disttrain.config.devices import num_gpus
from disttrain.config.schema import Config, StrategyConfig
from disttrain.errors import ConfigError, LaunchError

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""They multiply to the world size; `ep` divides dp_shard."""
NOT_YET = ("pp", "dp_shard", "cp", "ep")
DATA_PATHS = {"data_dir", "paths"}
"""Arguments of our datasets that are paths."""
ACCUMULATION = "disttrain.callbacks.grad_accumulation.GradAccumulation"


def check(config: Config, launched: int | None = None) -> Config:
    """The config with its automatic values worked out. `launched` is the world that torchrun or srun started, if one did.

    Raises ConfigError for parts that do not fit each other, LaunchError for a world that is not the one asked for.
    """
    config = copy.deepcopy(config)
    check_train(config)
    check_pair(config.model, config.dataset)
    device = _device(config)
    world = _world_size(config, device, launched)
    config.strategy = check_degrees(config.strategy, world)
    config.launch = replace(config.launch, world_size=world, device=device, backend=_backend(config, device, world, launched))
    check_heads(config.model)
    check_tensor(config)
    check_batch(config)
    check_callbacks(config)
    return config


def anchored(config: Config, cwd: str) -> Config:
    """The config with relative paths taken against `cwd`, the folder the command was typed in, whatever the ranks' is."""

    def absolute(path: str) -> str:
        return path if path.startswith("~") else os.path.join(cwd, path)

    config = copy.copy(config)
    config.paths = replace(config.paths, data=absolute(config.paths.data))
    if config.resume not in (None, "auto"):
        config.resume = absolute(str(config.resume))
    if config.init_from is not None:
        config.init_from = absolute(config.init_from)
    if str(config.dataset.get("_target_")).startswith("disttrain."):
        for name in DATA_PATHS & config.dataset.keys():
            value = config.dataset[name]
            config.dataset = config.dataset | {name: [absolute(one) for one in value] if isinstance(value, list) else absolute(value)}
    return config


def check_train(config: Config) -> None:
    """The length of the run, and numbers that must be positive."""
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        if train.steps is None:
            raise ConfigError("neither train.steps nor train.epochs is given", "train.steps=400")
        raise ConfigError(
            f"train.steps={train.steps} and train.epochs={train.epochs} both say how long the run is; one of them must be null",
            f"train.epochs={train.epochs} train.steps=null",
        )
    positive = {"train.steps": train.steps, "train.epochs": train.epochs, "train.global_batch_size": train.global_batch_size}
    positive |= {"train.log_every": train.log_every, "train.eval_every": train.eval_every, "train.clip_norm": train.clip_norm}
    positive |= {"verify.steps": config.verify.steps, "generate.length": config.generate.length, "generate.top_k": config.generate.top_k}
    launch = config.launch
    positive |= {"launch.timeout_seconds": launch.timeout_seconds, "launch.nodes": launch.nodes}
    positive |= {f"launch.{name}": value for name in ("threads", "world_size") if (value := getattr(launch, name)) != "auto"}
    positive |= {f"model.{name}": config.model.get(name) for name in ("num_layers", "num_heads", "hidden_size", "vocab_size", "max_seq_len")}
    for key, value in positive.items():
        if isinstance(value, (int, float)) and value <= 0:
            raise ConfigError(f"{key}={value} must be more than zero", f"{key}=1")
    zero = {"launch.max_restarts": launch.max_restarts, "launch.grace_seconds": launch.grace_seconds}
    zero |= {"optimizer.lr": config.optimizer.get("lr"), "optimizer.weight_decay": config.optimizer.get("weight_decay")}
    zero |= {"generate.temperature": config.generate.temperature, "dataset.num_workers": config.dataset.get("num_workers")}
    for key, value in zero.items():
        if isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"{key}={value} is negative", f"{key}=0")
    dropout = config.model.get("dropout")
    if isinstance(dropout, float) and not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout={dropout} is not a share between 0 and 1", "model.dropout=0.1")
    warmup = config.scheduler.get("warmup_steps")
    if isinstance(warmup, int) and train.steps is not None and not 0 <= warmup <= train.steps:
        raise ConfigError(
            f"scheduler.warmup_steps={warmup} does not lie within train.steps={train.steps}", f"scheduler.warmup_steps={train.steps // 10}"
        )


def check_pair(model: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
    """A shipped model and a shipped dataset speak of the same kind of samples; a user's own are taken at their word."""
    takes, gives = TAKES.get(str(model.get("_target_"))), GIVES.get(str(dataset.get("_target_")))
    if takes is not None and gives is not None and takes != gives:
        raise ConfigError(
            f"the model ({model['_target_']}) takes {takes}, but the dataset ({dataset['_target_']}) gives {gives}",
            f"dataset={CHOICES_FOR[takes]}",
        )


def _device(config: Config) -> str:
    found = num_gpus()
    if config.launch.device == "cuda" and not found:
        raise ConfigError("launch.device=cuda, but this machine shows no GPU (CUDA_VISIBLE_DEVICES counts)", "launch.device=cpu")
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if found else "cpu"


def _backend(config: Config, device: str, world: int, launched: int | None) -> str:
    asked = config.launch.backend
    uses_nccl = "nccl" in asked or (asked == "auto" and device == "cuda")
    if uses_nccl and device == "cpu":
        raise ConfigError(f"launch.backend={asked} needs GPUs, and ranks compute on the CPU (launch.device)", "launch.backend=gloo")
    here = world // config.launch.nodes
    if uses_nccl and launched is None and here > num_gpus():
        raise ConfigError(
            f"launch.world_size={world} puts {here} ranks on this machine, which has {num_gpus()} GPUs, and nccl wants one for each",
            "launch.device=cpu",
        )
    if asked != "auto":
        return asked
    return "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"


def _world_size(config: Config, device: str, launched: int | None) -> int:
    """As asked, as launched, or: one for a strategy that names no axis, the GPUs, else two for each axis it names."""
    asked, strategy = config.launch.world_size, config.strategy
    if launched is not None:
        if asked not in ("auto", launched):
            raise LaunchError(
                f"launch.world_size={asked}, but {launched} ranks were launched", f"launch.world_size={launched}, or launch {asked} ranks"
            )
        return launched
    if isinstance(asked, int):
        return asked
    degrees = [getattr(strategy, name) for name in DEGREES]
    needed = math.prod(2 if degree == -1 else degree for degree in degrees)
    fixed = math.prod(degree for degree in degrees if degree > 0)
    if device == "cpu" or needed <= 1:
        return max(1, needed)
    here = num_gpus() * config.launch.nodes
    if fixed > here:
        raise ConfigError(f"{product(strategy)} = {fixed} ranks are asked for, and there are {here} GPUs", "launch.device=cpu")
    return here if -1 in degrees else fixed


def check_degrees(strategy: StrategyConfig, world: int) -> StrategyConfig:
    """The strategy with -1 filled in. ConfigError unless the degrees multiply to the world size."""
    degrees = {name: getattr(strategy, name) for name in DEGREES}
    for name, degree in {**degrees, "ep": strategy.ep}.items():
        if degree < 1 and degree != -1:
            raise ConfigError(f"strategy.{name}={degree} is no number of ranks", f"strategy.{name}=1, or -1 for what is left of the world")
    filling = [name for name, degree in degrees.items() if degree == -1]
    if len(filling) > 1:
        keys = " and ".join(f"strategy.{name}=-1" for name in filling)
        raise ConfigError(f"{keys} each ask for what is left of the world", f"strategy.{filling[0]}=1")
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if filling:
        if world % fixed:
            raise ConfigError(
                f"launch.world_size={world} is not divisible by {product(strategy)} = {fixed}", f"launch.world_size={-(-world // fixed) * fixed}"
            )
        strategy = replace(strategy, **{filling[0]: world // fixed})
    elif fixed != world:
        remedy = f"launch.world_size={fixed}" if fixed > world or world % fixed else f"strategy.dp_replicate={world // fixed * degrees['dp_replicate']}"
        raise ConfigError(f"{product(strategy)} = {fixed}, but launch.world_size = {world}", remedy)
    if later := [name for name in NOT_YET if getattr(strategy, name) != 1]:
        name = later[0]
        raise ConfigError(
            f"strategy.{name}={getattr(strategy, name)}: this version cuts along dp_replicate and tp only", f"strategy.{name}=1"
        )
    if strategy.sequence_parallel and strategy.tp == 1:
        raise ConfigError("strategy.sequence_parallel=true needs strategy.tp of two or more", "strategy.sequence_parallel=false")
    return strategy


def product(strategy: StrategyConfig) -> str:
    """The degrees that are not one, with their keys, as a product."""
    named = {name: getattr(strategy, name) for name in DEGREES if getattr(strategy, name) not in (1, -1)}
    if not named:
        return f"strategy {strategy.name} (all degrees 1)"
    return f"{' * '.join(f'strategy.{name}' for name in named)} = {' * '.join(map(str, named.values()))}" if len(named) > 1 else f"strategy.{next(iter(named))}"


def check_heads(model: Mapping[str, Any]) -> None:
    """Heads share out the hidden size, and groups of heads the key-value heads."""
    hidden, heads, groups = (model.get(name) for name in ("hidden_size", "num_heads", "num_kv_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        raise ConfigError(
            f"model.hidden_size={hidden} is not divisible by model.num_heads={heads}", f"model.hidden_size={-(-hidden // heads) * heads}"
        )
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ConfigError(f"model.num_heads={heads} is not divisible by model.num_kv_heads={groups}", f"model.num_kv_heads={heads}")


def check_tensor(config: Config) -> None:
    """What tp cuts must divide: key-value heads, heads, the vocabulary, the sequence under sequence parallelism."""
    tp, model = config.strategy.tp, config.model
    if tp == 1:
        return
    cut = {name: model.get(name) for name in ("num_kv_heads", "num_heads", "vocab_size", "intermediate_size", "hidden_size")}
    if config.strategy.sequence_parallel:
        cut["max_seq_len"] = model.get("max_seq_len")
    for name, size in cut.items():
        if isinstance(size, int) and size % tp:
            fits = [n for n in divisors(size) if n < tp]
            raise ConfigError(
                f"strategy.tp={tp} does not divide model.{name}={size}",
                f"strategy.tp={max(fits)}" + (f" launch.world_size={config.launch.world_size // tp * max(fits)}" if isinstance(config.launch.world_size, int) else "")
                if max(fits, default=1) > 1
                else f"model.{name}={-(-size // tp) * tp}",
            )


def check_batch(config: Config) -> None:
    """The global batch is cut into whole micro-batches on every data rank."""
    total = config.train.global_batch_size
    ranks = config.strategy.dp_replicate * config.strategy.dp_shard
    keys = [key for key, value in config.callbacks.items() if value["_target_"] == ACCUMULATION]
    if not keys:
        if total % ranks:
            raise ConfigError(
                f"train.global_batch_size={total} is not divisible by {ranks} data ranks (strategy.dp_replicate)",
                f"train.global_batch_size={nearest_multiple(total, ranks)}",
            )
        return
    key = f"callbacks.{keys[0]}.micro_batch_size"
    micro = config.callbacks[keys[0]].get("micro_batch_size", 8)
    if micro < 1:
        raise ConfigError(f"{key}={micro} must be more than zero", f"{key}=8")
    if total % (micro * ranks):
        legal = [n for n in divisors(total // ranks) if n <= micro] if total % ranks == 0 else []
        multiple = nearest_multiple(total, micro * ranks)
        allowed = f"train.global_batch_size={multiple}" + (f", or {key}={max(legal)}" if legal else "")
        raise ConfigError(
            f"train.global_batch_size={total} is not divisible by {key}={micro} times {ranks} data ranks; the nearest legal: {allowed}",
            f"{key}={max(legal)}" if legal else f"train.global_batch_size={multiple}",
        )


def check_callbacks(config: Config) -> None:
    """At most one callback answers for micro-batches and one for precision; choices by name are among those that exist."""
    seen: dict[str, str] = {}
    for key, value in config.callbacks.items():
        target = value["_target_"]
        if target in seen and target.startswith("disttrain."):
            raise ConfigError(f"callbacks.{seen[target]} and callbacks.{key} are the same callback twice ({target})", f"~callbacks.{key}")
        seen[target] = key
    if config.train.dtype == "float64" and (amp := _of(config, "disttrain.callbacks.amp.AMP")):
        precision = config.callbacks[amp].get("precision", "fp32")
        if precision != "fp32":
            raise ConfigError(
                f"train.dtype=float64 is for proofs and callbacks.{amp}.precision={precision} for speed: not both", f"callbacks.{amp}.precision=fp32"
            )


def _of(config: Config, target: str) -> str | None:
    return next((key for key, value in config.callbacks.items() if value["_target_"] == target), None)


def divisors(number: int) -> Iterable[int]:
    """All of them, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_multiple(number: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `number`."""
    return max(1, round(number / of)) * of
