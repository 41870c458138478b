"""What of a config is legal, the nearest of what isn't, and a word on each change: degrees, the batch, what goes with what.

A training refuses what is changed here (`disttrain.config.check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from disttrain.config.check import micro_batch_of
from disttrain.config.schedules import needs, stages_a_rank, takes
from disttrain.config.schema import Config, StrategyConfig
from disttrain.config.sequence import lengths, tokens_multiple_of
from disttrain.config.world import DEGREES, divisors, shares_rows
from disttrain.plan.case import Layout
from disttrain.plan.shape import Shape

LITTLE = 0.25
"""Share of a global batch by which it may be changed to hold whole micro-batches."""


def whole_heads(model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The model with a hidden size that its heads share out, and with heads that those of keys and values do."""
    found = dict(model)
    hidden, heads, groups = (found.get(name) for name in ("hidden_size", "num_heads", "num_kv_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        found["hidden_size"] = -(-hidden // heads) * heads
        notes.append(f"model.hidden_size={hidden} is not divisible by model.num_heads={heads}; planned with {found['hidden_size']}")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        found["num_kv_heads"] = max(n for n in divisors(heads) if n <= groups)
        notes.append(f"model.num_heads={heads} is not divisible by model.num_kv_heads={groups}; planned with {found['num_kv_heads']}")
    return found


def degrees(config: Config, shape: Shape, notes: list[str]) -> StrategyConfig:
    """Degrees that multiply to the world and divide model and sequence, the nearest where those asked for don't."""
    strategy = config.strategy
    asked = {name: getattr(strategy, name) for name in DEGREES}
    fixed = math.prod(degree for degree in asked.values() if degree > 0)
    filling = [name for name, degree in asked.items() if degree < 1]
    world = config.launch.world_size
    size = int(world) if isinstance(world, int) else fixed * 2 ** len(filling)
    made = {name: max(1, degree) for name, degree in asked.items()}
    wished = 1
    for name in ("tp", "pp", "cp"):
        wanted = made[name] if asked[name] > 0 else size // fixed if filling == [name] else 1
        wished *= wanted
        legal = [n for n in divisors(size) if n <= wanted and not _against(config, shape, name, n, made["tp"])]
        made[name] = max(legal, default=1)
        if made[name] != wanted:
            why = _against(config, shape, name, wanted, made["tp"]) or f"does not divide {size} ranks"
            notes.append(f"strategy.{name}={wanted} {why}; planned with strategy.{name}={made[name]}")
    inside = made["tp"] * made["pp"] * made["cp"]
    if not isinstance(world, int):
        size = size // wished * inside
    rest = size // inside
    if rest * inside != size:
        notes.append(f"launch.world_size={world} is not divisible by tp x pp x cp = {inside}; planned with {rest * inside} ranks")
        size = rest * inside
    axis = "dp_shard" if asked["dp_shard"] != 1 else "dp_replicate"
    other = "dp_replicate" if axis == "dp_shard" else "dp_shard"
    made[other] = max(n for n in divisors(rest) if n <= max(1, asked[other])) if asked[other] > 0 else 1
    made[axis] = rest // made[other]
    if not filling and made[axis] != asked[axis]:
        notes.append(f"{size} ranks leave {rest} data ranks; planned with strategy.{axis}={made[axis]}")
    wanted = strategy.ep if strategy.ep > 0 else made["dp_shard"]
    ep = max(n for n in divisors(math.gcd(made["dp_shard"], shape.experts or 1)) if n <= wanted)
    if strategy.ep > 1 and ep != strategy.ep:
        notes.append(f"strategy.ep={strategy.ep} does not divide the experts or the data ranks; planned with strategy.ep={ep}")
    return _together(config, shape, replace(strategy, **made, ep=ep), notes)


def _against(config: Config, shape: Shape, name: str, degree: int, tp: int) -> str:
    """Why the degree `name` can't be that of this model and its sequences; empty where it can."""
    if degree == 1:
        return ""
    if name == "tp" and any(limit % degree for limit in shape.cut_by_tensor):
        return "does not divide this model"
    virtual = stages_a_rank(config.strategy.schedule, config.strategy.virtual_stages)
    if name == "pp" and degree * virtual > shape.layers and not named_starts(config.strategy.stage_split, shape, degree * virtual):
        return f"{f'times {virtual} stages a rank ' if virtual > 1 else ''}is more than the {shape.layers} layers"
    multiple = tokens_multiple_of(degree, tp if _cuts_tokens(config, tp) else 1)
    uncut = [f"{key}={length}" for key, length in lengths(config.dataset, config.model) if length % multiple]
    return f"does not cut {uncut[0]} into two chunks a rank" if name == "cp" and uncut else ""


def _cuts_tokens(config: Config, tp: int) -> bool:
    """Whether sequence parallelism is asked for and possible."""
    whole = all(length % tp == 0 for _, length in lengths(config.dataset, config.model))
    return config.strategy.sequence_parallel and tp > 1 and whole


def named_starts(names: Sequence[str], shape: Shape, stages: int) -> list[int]:
    """First layer of each later stage by `strategy.stage_split`; empty where it doesn't name them."""
    known = {f"blocks.{layer}": layer for layer in range(shape.layers)} | {"norm": shape.layers}
    starts = [known[name] for name in names if name in known]
    return starts if len(starts) == len(names) == stages - 1 and starts == sorted(set(starts)) else []


def _together(config: Config, shape: Shape, strategy: StrategyConfig, notes: list[str]) -> StrategyConfig:
    """The strategy, its degrees settled, without what these exclude."""
    made: dict[str, Any] = {"sequence_parallel": _cuts_tokens(config, strategy.tp)}
    if strategy.sequence_parallel and not made["sequence_parallel"]:
        why = f"strategy.tp={strategy.tp} does not divide the tokens" if strategy.tp > 1 else "it needs strategy.tp of two or more"
        notes.append(f"strategy.sequence_parallel=true: {why}; planned without")
    stages = strategy.pp * stages_a_rank(strategy.schedule, strategy.virtual_stages) if strategy.pp > 1 else 1
    if strategy.stage_split and not named_starts(strategy.stage_split, shape, stages):
        said = f"strategy.stage_split=[{','.join(strategy.stage_split)}] does not cut {shape.layers} layers into {stages} stages, in order"
        notes.append(f"{said}; planned with strategy.stage_split=[]")
    if shares_rows(strategy) and strategy.pp > 1 and strategy.zero != 1:
        made["zero"] = 1
        notes.append(
            f"strategy.zero={strategy.zero} under strategy.pp={strategy.pp}, which keeps gradients whole; planned with strategy.zero=1"
        )
    if shares_rows(strategy) and strategy.compression != "none":
        made["compression"] = "none"
        said = f"strategy.compression={strategy.compression} compresses whole gradients, and strategy.dp_shard shares them out"
        notes.append(f"{said}; planned with strategy.compression=none")
    return replace(strategy, **made)


def num_nodes(config: Config, world: int, notes: list[str]) -> int:
    """Machines of the world, as many ranks on each."""
    asked = config.launch.nodes
    found = max(n for n in divisors(world) if n <= asked)
    if found != asked:
        notes.append(f"launch.nodes={asked} does not divide {world} ranks; planned with launch.nodes={found}")
    return found


def like(strategy: StrategyConfig, notes: list[str]) -> StrategyConfig:
    """The layout of ours that DeepSpeed's engine is like."""
    if not strategy.zero:
        notes.append("DeepSpeed's engine is planned as strategy=ddp, which does what its stage 0 does")
        return strategy
    notes.append(f"DeepSpeed's engine is planned as strategy=fsdp strategy.zero={strategy.zero}, which shares out what its stage does")
    return replace(strategy, dp_shard=strategy.dp_replicate, dp_replicate=1)


def whole_batch(config: Config, layout: Layout, notes: list[str]) -> tuple[Layout, int]:
    """The micro-batch and a global batch that both divide."""
    batch, data, asked = config.train.global_batch_size, layout.data, micro_batch_of(config)
    if batch % data:
        whole = max(1, round(batch / (data * (asked or 1)))) * data * (asked or 1)  # in whole micro-batches, where that changes it little
        batch = whole if abs(whole - batch) <= LITTLE * batch else max(1, round(batch / data)) * data
        notes.append(
            f"train.global_batch_size={config.train.global_batch_size} is not divisible by {data} data ranks; planned with {batch}"
        )
    local = batch // data
    micro = max(n for n in divisors(local) if n <= (asked or local))
    if asked is not None and micro != min(asked, local):
        notes.append(f"a micro-batch of {asked} does not divide {local} samples a rank; planned with {micro}")
    if asked is None and layout.pp > 1:
        micro = 1
        notes.append("a pipeline passes micro-batches; planned with callbacks.grad_accumulation.micro_batch_size=1")
    if layout.pp > 1 and not takes(layout.schedule, local // micro, layout.pp):
        said = f"strategy.schedule={layout.schedule} takes {needs(layout.schedule, layout.pp)}, and there are {local // micro}"
        legal = [n for n in divisors(local) if takes(layout.schedule, local // n, layout.pp)]
        micro = max((n for n in legal if n <= micro), default=min(legal, default=micro))
        notes.append(
            f"{said}; " + (f"planned with micro-batches of {micro}" if legal else "no micro-batch gives that: a larger batch does")
        )
    return replace(layout, micro_batch=micro), batch
