"""Which overrides should help against a bottleneck, the likeliest first. What they cost elsewhere is said with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from disttrain.config.check import ACCUMULATION, check_layout
from disttrain.config.components import signature_of
from disttrain.config.local_sgd import AMP
from disttrain.config.schedules import takes
from disttrain.config.schema import Config
from disttrain.config.typed import show
from disttrain.config.world import divisors
from disttrain.doctor.budget import Budget
from disttrain.doctor.diagnose import BUBBLE, COMPUTE, EXPOSED, HOST, INPUT, MEMORY, OPTIMIZER, RANKS, STAGES, Verdict
from disttrain.errors import ConfigError
from disttrain.texts import typed_value

USUAL_BUCKET = 25.0
"""MiB."""
MOST_WORKERS = 8
NEAR = 1.03
"""Of two numbers of micro-batches that take about as long, the smaller one, whose operations are larger, is better."""
RARE_LOGS = 20
WORTH = 0.01
"""Share of a step that a remedy for host overhead must be able to save."""


@dataclass(frozen=True)
class Remedy:
    """Overrides, and why they should help."""

    words: tuple[str, ...]
    why: str
    is_lossy: bool = False
    """Another training by design."""


def advise(verdict: Verdict, config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    """Remedies for the verdict on a run of `config`, with whose layout they go; none where nothing in the config would help."""
    remedies = _BY_NAME[verdict.bottleneck](config, whole, found)
    return [one for one in remedies if _goes(config, one)] if _goes(config, Remedy((), "")) else remedies


def _goes(config: Config, remedy: Remedy) -> bool:
    """Whether a training with the remedy's degrees and micro-batch would not be refused, as far as a record tells."""
    changed = copy.deepcopy(config)
    for word in remedy.words:
        key, _, value = word.partition("=")
        match key.split("."):
            case ["strategy", name]:
                changed.strategy = replace(changed.strategy, **{name: typed_value(value)})
            case ["callbacks", name, argument]:
                changed.callbacks[name][argument] = typed_value(value)
    try:
        check_layout(changed)
    except ConfigError:
        return False
    return True


def _input(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    now = int(config.dataset.get("num_workers") or 0)
    rest = max(whole.step - whole.parts["input"], 1e-6)
    wanted = min(MOST_WORKERS, max(2, 2 * now, math.ceil(whole.parts["input"] / rest) + 1))
    why = f"{wanted} processes a rank make batches ready while the step runs"
    if wanted == now:
        return [Remedy((f"dataset.prefetch={2 * int(config.dataset.get('prefetch') or 4)}",), "more batches are made ready ahead")]
    target = str(config.dataset["_target_"])
    is_ours = target.startswith("disttrain.") or "rates" in found  # what a record names is not imported
    if "num_workers" in config.dataset or (is_ours and "num_workers" in signature_of(target, "dataset").parameters):
        return [Remedy((f"dataset.num_workers={wanted}",), why)]
    own = [key for key in config.dataset if key != "_target_"]
    words = ["dataset._target_=disttrain.data.adapt.Adapted", f"dataset.train._target_={target}"]
    words += [f"dataset.train.{key}={show(config.dataset[key])}" for key in own]
    return [Remedy((*words, *(f"~dataset.{key}" for key in own), f"dataset.num_workers={wanted}"), why)]


def _host(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    """By the seconds that each can save."""
    saves: list[tuple[float, Remedy]] = []
    for key, seconds in whole.callbacks.items():
        if key in config.callbacks:
            saves.append((seconds, Remedy((f"~callbacks.{key}",), f"it takes {seconds / whole.step:.0%} of a step")))
    if config.train.log_every < RARE_LOGS // 2:
        logs = (whole.parts["host"] - whole.dispatch) * (1 - config.train.log_every / RARE_LOGS)
        saves.append((logs, Remedy((f"train.log_every={RARE_LOGS}",), "a log point reads the device and writes")))
    for remedy in _larger_micro(config, found, "fewer, larger operations ask the host for less"):
        saves.append((whole.dispatch / 2, remedy))
    if not config.strategy.compile:
        saves.append((whole.dispatch / 4, Remedy(("strategy.compile=true",), "compiled blocks ask for fewer operations")))
    return [remedy for seconds, remedy in sorted(saves, key=lambda one: -one[0]) if seconds > WORTH * whole.step]


def _compute(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    remedies = []
    if config.strategy.recompute != "none":
        remedies.append(Remedy(("strategy.recompute=none",), "blocks compute nothing twice; takes more memory"))
    if config.launch.device == "cuda":
        key = next((key for key, value in config.callbacks.items() if value.get("_target_") == AMP), None)
        if key is not None and config.callbacks[key].get("precision") == "fp32":
            remedies.append(Remedy((f"callbacks.{key}.precision=bf16",), "matrix products in half the bits"))
        if not config.strategy.compile:
            remedies.append(Remedy(("strategy.compile=true",), "pointwise kernels are fused"))
    return remedies


def _data(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    strategy, remedies = config.strategy, []
    shares = strategy.dp_shard > 1 and strategy.zero > 0
    if not shares and strategy.bucket_size < USUAL_BUCKET:
        remedies.append(Remedy((f"strategy.bucket_size={USUAL_BUCKET:g}",), "gradients leave in a few large messages"))
    if shares and strategy.zero >= 2 and found["num_micro"] > 1:
        why = f"gradients are reduced once a step, not in each of {found['num_micro']} micro-batches; whole gradients take more memory"
        remedies += [Remedy(("strategy.zero=1",), why), *_larger_micro(config, found, "fewer reductions a step; takes more memory")]
    elif shares and strategy.zero == 3:
        remedies.append(Remedy(("strategy.zero=2",), "weights are gathered once a step; they take more memory"))
    if shares and strategy.gather_dtype == "weights":
        remedies.append(Remedy(("strategy.gather_dtype=bf16",), "half the bytes of gathered weights, which are rounded", True))
    if not shares and strategy.compression == "none" and strategy.pp == 1:
        remedies.append(Remedy(("strategy.compression=bf16",), "half the bytes; gradients are rounded", True))
    return remedies


def _tensor(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    return [*_larger_micro(config, found, "fewer, larger messages"), *_moved(config, "tp", "dp_replicate")]


def _context(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    other = "ring" if config.strategy.attention == "gather" else "gather"
    why = "keys and values travel beside the attention" if other == "ring" else "keys and values come in one message"
    return [Remedy((f"strategy.attention={other}",), why), *_moved(config, "cp", "dp_replicate")]


def _pipeline(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    return [*_larger_micro(config, found, "fewer, larger messages", config.strategy.pp), *_moved(config, "pp", "dp_replicate")]


def _expert(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    fewer = divisors(config.strategy.ep)[:-1]
    spread = [Remedy((f"strategy.ep={fewer[-1]}",), "tokens go to fewer ranks")] if fewer else []
    return [*_larger_micro(config, found, "fewer, larger messages"), *spread]


def _bubble(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    strategy, remedies, now = config.strategy, [], int(found["num_micro"])
    local, per_micro = _local_batch(config), whole.dispatch / now

    def seconds(num_micro: int) -> float:
        """Of a step whose every micro-batch costs what its operations do to ask for, however small it is."""
        return (num_micro + strategy.pp - 1) * (whole.parts["compute"] / num_micro + per_micro)

    legal = [m for m in divisors(local) if m > now and takes(strategy.schedule, m, strategy.pp)]
    shortest = min(map(seconds, legal), default=0.0)
    wanted = next((m for m in legal if seconds(m) <= NEAR * shortest), None)
    if wanted is not None and (key := _accumulation(config)) is not None:
        why = f"{wanted} micro-batches instead of {now} fill the pipeline better"
        remedies.append(Remedy((f"callbacks.{key}.micro_batch_size={local // wanted}",), why))
    if strategy.schedule in ("gpipe", "1f1b") and now % strategy.pp == 0:
        remedies.append(Remedy(("strategy.schedule=interleaved_1f1b",), "smaller stages fill the pipeline sooner, for more messages"))
    return remedies


def _stages(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    if config.strategy.stage_split:
        return [Remedy(("strategy.stage_split=[]",), "stages are balanced by the cost of their layers")]
    return []


def _ranks(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    cause = max(whole.excess, key=lambda name: (whole.excess[name], "." in name)) if whole.excess else ""
    if cause == "callbacks" or cause.startswith("callbacks."):
        own = {name: seconds for name, seconds in whole.excess.items() if name.startswith("callbacks.")}
        key = max(own, key=lambda name: own[name])
        return [Remedy((f"~{key}",), f"it takes {own[key] * 1e3:.3g} ms of a step on rank {whole.late_rank} alone")]
    if cause == "input":
        return _input(config, whole, found)
    return []


def _memory(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    remedies = []
    if config.strategy.recompute == "none":
        remedies.append(Remedy(("strategy.recompute=full",), "activations are computed again instead of kept"))
    local, key = _local_batch(config), _accumulation(config)
    if key is not None and (smaller := [size for size in divisors(local) if 2 * size * found["num_micro"] <= local]):
        remedies.append(Remedy((f"callbacks.{key}.micro_batch_size={smaller[-1]}",), "half the activations at a time, or fewer"))
    if config.strategy.dp_replicate > 1 and config.strategy.pp == 1:
        remedies.append(_sharded(config, 3, "weights, gradients and optimizer state are shared out"))
    return remedies


def _optimizer(config: Config, whole: Budget, found: Mapping[str, Any]) -> list[Remedy]:
    if config.strategy.dp_replicate > 1 and config.strategy.dp_shard == 1 and config.strategy.compression == "none":
        return [_sharded(config, 1, f"each of {config.strategy.dp_replicate} ranks updates its share of the weights")]
    return []


def _sharded(config: Config, zero: int, why: str) -> Remedy:
    """All data ranks share out what only some did, or none."""
    ranks = config.strategy.dp_replicate * config.strategy.dp_shard
    return Remedy(("strategy.dp_replicate=1", f"strategy.dp_shard={ranks}", f"strategy.zero={zero}"), why)


def _moved(config: Config, of: str, to: str) -> list[Remedy]:
    """The smallest factor of one degree moved to another, half of an even one; what the degree alone made possible goes with its last."""
    strategy, fewer = config.strategy, divisors(getattr(config.strategy, of))[:-1]
    if not fewer:
        return []
    left, degree = fewer[-1], getattr(strategy, of)
    words = [f"strategy.{of}={left}", f"strategy.{to}={degree // left * getattr(strategy, to)}"]
    words += ["strategy.sequence_parallel=false"] if of == "tp" and left == 1 and strategy.sequence_parallel else []
    words += ["strategy.attention=gather"] if of == "cp" and left == 1 and strategy.attention == "ring" else []
    words += ["strategy.stage_split=[]"] if of == "pp" and strategy.stage_split else []
    words += ["strategy.virtual_stages=null"] if of == "pp" and left == 1 and strategy.virtual_stages is not None else []
    return [Remedy(tuple(words), f"{left} instead of {degree} ranks share out what {of} cuts, and hold {degree // left} times as much")]


def _larger_micro(config: Config, found: Mapping[str, Any], why: str, least: int = 1) -> list[Remedy]:
    key, num = _accumulation(config), found["num_micro"]
    if key is None or num <= least:
        return []
    local = _local_batch(config)
    fewer = [
        m
        for m in divisors(local)
        if least <= m < num and (config.strategy.pp == 1 or takes(config.strategy.schedule, m, config.strategy.pp))
    ]
    return [Remedy((f"callbacks.{key}.micro_batch_size={local // fewer[-1]}",), why)] if fewer else []


def _accumulation(config: Config) -> str | None:
    return next((key for key, value in config.callbacks.items() if value.get("_target_") == ACCUMULATION), None)


def _local_batch(config: Config) -> int:
    return config.train.global_batch_size // (config.strategy.dp_replicate * config.strategy.dp_shard)


_BY_NAME: Mapping[str, Callable[[Config, Budget, Mapping[str, Any]], list[Remedy]]] = {
    INPUT: _input,
    HOST: _host,
    COMPUTE: _compute,
    OPTIMIZER: _optimizer,
    BUBBLE: _bubble,
    STAGES: _stages,
    RANKS: _ranks,
    MEMORY: _memory,
    EXPOSED["data"]: _data,
    EXPOSED["tensor"]: _tensor,
    EXPOSED["context"]: _context,
    EXPOSED["pipeline"]: _pipeline,
    EXPOSED["expert"]: _expert,
}
