"""How many ranks, on what, and how the degrees share them out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from disttrain.config.devices import num_gpus
from disttrain.config.schema import Config, LaunchConfig, StrategyConfig
from disttrain.errors import ConfigError, LaunchError

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""They multiply to the world size; `ep` divides dp_shard."""
Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl", "cuda:nccl,cpu:gloo"]


def check_launch(config: Config, launched: int | None) -> LaunchConfig:
    """`launch` with world size, device and backend worked out."""
    launch = config.launch
    if launch.nodes > 1 and launched is None:
        raise ConfigError(
            f"launch.nodes={launch.nodes}: from here only this machine's ranks are started", "launch.nodes=1, or torchrun or srun"
        )
    device = device_here(launch)
    size = _world_size(launch, config.strategy, device, launched)
    return replace(launch, world_size=size, device=device, backend=_backend(launch, device, size, launched))


def device_here(launch: LaunchConfig) -> Device:
    """The device that ranks of this machine compute on; ConfigError for a GPU that isn't there."""
    found = num_gpus()
    if launch.device == "cuda" and not found:
        raise ConfigError("launch.device=cuda, but this machine shows no GPU (CUDA_VISIBLE_DEVICES counts)", "launch.device=cpu")
    if launch.device == "auto":
        return "cuda" if found else "cpu"
    return launch.device


def _backend(launch: LaunchConfig, device: Device, size: int, launched: int | None) -> Backend:
    asked = launch.backend
    uses_nccl = "nccl" in asked or (asked == "auto" and device == "cuda")
    if uses_nccl and device == "cpu":
        raise ConfigError(f"launch.backend={asked} needs GPUs, and ranks compute on the CPU (launch.device)", "launch.backend=gloo")
    if uses_nccl and launched is None and size > num_gpus():
        raise ConfigError(
            f"launch.world_size={size}, but this machine has {num_gpus()} GPUs, and launch.backend={asked} wants one for each rank",
            "launch.device=cpu",
        )
    if asked == "auto":
        return "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    return asked


def _world_size(launch: LaunchConfig, strategy: StrategyConfig, device: Device, launched: int | None) -> int:
    """As asked, as launched, or: one for a strategy that names no axis, the GPUs, else two for each axis it names."""
    asked = launch.world_size
    if launched is not None:
        if asked not in ("auto", launched):
            remedy = f"launch.world_size={launched}, or launch {asked} ranks"
            raise LaunchError(f"launch.world_size={asked}, but {launched} ranks were launched", remedy)
        return launched
    if isinstance(asked, int):
        return asked
    degrees: list[int] = [getattr(strategy, name) for name in DEGREES]
    fixed = math.prod(degree for degree in degrees if degree > 0)
    num_filling = degrees.count(-1)
    if device == "cpu":
        return fixed * int(2**num_filling)
    if fixed <= num_gpus():
        return num_gpus() if num_filling else fixed
    raise ConfigError(f"{product(strategy)} asks for {fixed} ranks, and this machine has {num_gpus()} GPUs", "launch.device=cpu")


def check_degrees(strategy: StrategyConfig, size: int) -> StrategyConfig:
    """The strategy with -1 filled in. ConfigError unless the degrees multiply to the world size."""
    degrees = {name: getattr(strategy, name) for name in DEGREES}
    for name, degree in {**degrees, "ep": strategy.ep}.items():
        if degree < 1 and degree != -1:
            raise ConfigError(f"strategy.{name}={degree} is no number of ranks; -1 takes what is left of the world", f"strategy.{name}=1")
    filling = [name for name, degree in degrees.items() if degree == -1]
    if len(filling) > 1:
        keys = " and ".join(f"strategy.{name}=-1" for name in filling)
        raise ConfigError(f"{keys} each ask for what is left of the world", f"strategy.{filling[0]}=1")
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if filling and size % fixed:
        remedy = f"launch.world_size={-(-size // fixed) * fixed}"
        raise ConfigError(f"launch.world_size={size} is not divisible by {product(strategy)}", remedy)
    if not filling and fixed != size:
        grown = size // fixed * strategy.dp_replicate
        remedy = f"launch.world_size={fixed}" if size % fixed else f"strategy.dp_replicate={grown}"
        raise ConfigError(f"{product(strategy)}, but launch.world_size = {size}", remedy)
    if filling:
        strategy = replace(strategy, **{filling[0]: size // fixed})
    if strategy.ep == -1:
        strategy = replace(strategy, ep=strategy.dp_shard)
    if strategy.dp_shard % strategy.ep:
        fitting = max(degree for degree in divisors(strategy.dp_shard) if degree <= strategy.ep)
        raise ConfigError(f"strategy.ep={strategy.ep} does not divide strategy.dp_shard={strategy.dp_shard}", f"strategy.ep={fitting}")
    if strategy.offload and not shares_rows(strategy):
        found = "strategy.offload=true keeps shards in host memory and needs strategy.dp_shard of two or more, and strategy.zero"
        raise ConfigError(found, "strategy=fsdp")
    if strategy.gather_dtype != "weights" and not shares_rows(strategy):
        found = f"strategy.gather_dtype={strategy.gather_dtype} needs strategy.dp_shard of two or more, and strategy.zero"
        raise ConfigError(found, "strategy.gather_dtype=weights")
    return strategy


def shares_rows(strategy: StrategyConfig) -> bool:
    """Whether data ranks share out the rows of weights."""
    return strategy.dp_shard > 1 and strategy.zero > 0


def heavy_modules(strategy: StrategyConfig) -> list[str]:
    """Modules that every rank of this strategy will import, seconds of each: their parent does so once, before it forks them."""
    found = ["torch.distributed.fsdp", "torch._dynamo"] if shares_rows(strategy) else []
    return [*found, "torch.distributed.pipelining"] if strategy.pp > 1 else found


def data_keys(strategy: StrategyConfig) -> str:
    """The keys whose product is the number of data ranks, as far as they are given: 'strategy.dp_replicate * strategy.dp_shard'."""
    given = [f"strategy.{name}" for name in ("dp_replicate", "dp_shard") if getattr(strategy, name) != 1]
    return " * ".join(given) or "strategy.dp_replicate"


def product(strategy: StrategyConfig) -> str:
    """The degrees that are given, as a product with their keys: 'strategy.dp_replicate * strategy.tp = 2 * 2 = 4'."""
    named = {f"strategy.{name}": getattr(strategy, name) for name in DEGREES if getattr(strategy, name) not in (1, -1)}
    if len(named) < 2:
        return (
            "".join(f"{key} = {degree}" for key, degree in named.items()) or f"strategy {strategy.name}: every degree is 1, their product"
        )
    return f"{' * '.join(named)} = {' * '.join(map(str, named.values()))} = {math.prod(named.values())}"


def check_tensor(config: Config) -> None:
    """What tp cuts must divide: key-value heads, heads, vocabulary, widths."""
    tp, model, size = config.strategy.tp, config.model, int(config.launch.world_size)
    for name in ("num_kv_heads", "num_heads", "vocab_size", "intermediate_size", "hidden_size"):
        number = model.get(name)
        if isinstance(number, int) and number % tp:
            smaller = max(n for n in divisors(number) if n < tp)
            remedy = (
                f"strategy.tp={smaller} launch.world_size={size // tp * smaller}"
                if smaller > 1
                else f"model.{name}={nearest_multiple(number, tp)}"
            )
            raise ConfigError(f"strategy.tp={tp} does not divide model.{name}={number}", remedy)


def check_experts(config: Config) -> None:
    """ep shares out experts: the model has some, and as many on each rank."""
    ep, model, knobs = config.strategy.ep, config.model, config.strategy
    experts = model.get("experts")
    shape: Mapping[str, Any] = experts if isinstance(experts, Mapping) else {}
    for name in ("num_experts", "top_k", "every", "intermediate_size", "capacity_factor"):
        value = shape.get(name)
        if isinstance(value, (int, float)) and not value > 0:
            raise ConfigError(f"model.experts.{name}={value} is not above zero", f"model.experts.{name}=<a number above zero>")
    number, chosen = shape.get("num_experts", 8), shape.get("top_k", 2)
    if experts is not None and isinstance(number, int) and isinstance(chosen, int) and chosen > number:
        raise ConfigError(f"model.experts.top_k={chosen} is more than model.experts.num_experts={number}", f"model.experts.top_k={number}")
    layers, every = model.get("num_layers"), shape.get("every", 1)
    if experts is not None and isinstance(layers, int) and isinstance(every, int) and layers < every:
        found = f"model.experts.every={every} of model.num_layers={layers}: no block has experts"
        raise ConfigError(found, f"model.num_layers={every}, or model.experts.every=1")
    if ep == 1:
        return
    if experts is None and str(model.get("_target_")).startswith("disttrain."):
        raise ConfigError(f"strategy.ep={ep} shares out experts, and the model has none", "model=moe_tiny")
    if experts is not None and isinstance(number, int) and number % ep:
        remedy = f"model.experts.num_experts={nearest_multiple(number, ep)}"
        raise ConfigError(f"strategy.ep={ep} does not divide model.experts.num_experts={number}", remedy)
    if knobs.compression != "none":
        found = f"strategy.compression={knobs.compression} knows one set of ranks for all gradients, and strategy.ep={ep} makes two"
        raise ConfigError(found, "strategy.compression=none")


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_multiple(number: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `number`."""
    return max(1, round(number / of)) * of
