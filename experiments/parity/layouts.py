"""The layouts and models that `prove.py` sets against one device, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from disttrain.config.schema import StrategyConfig


@dataclass(frozen=True)
class Layout:
    """Degrees by axis, and the strategy's other knobs."""

    name: str
    degrees: Mapping[str, int]
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks in all; ep divides dp_shard."""
        return math.prod(degree for axis, degree in self.degrees.items() if axis != "ep")

    def strategy(self) -> StrategyConfig:
        """As the config group `strategy` would give it."""
        return StrategyConfig(name=self.name, **self.degrees, **self.knobs)


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
SEQUENCE = {"sequence_parallel": True}
RING = {"attention": "ring"}


def _named(degrees: Mapping[str, int], knobs: Mapping[str, Any]) -> str:
    """Like 'dp_replicate 2 x tp 2, sequence_parallel'."""
    words = [name if value is True else f"{name} {value}" if isinstance(value, int) else str(value) for name, value in knobs.items()]
    return ", ".join([" x ".join(f"{axis} {degree}" for axis, degree in degrees.items()), *words])


def _make(knobs: Mapping[str, Any] | None = None, **degrees: int) -> Layout:
    return Layout(_named(degrees, knobs or {}), degrees, knobs or {})


def layouts() -> Iterator[Layout]:
    """Every exact strategy, every schedule, and products of axes that make sense, on up to eight ranks."""
    yield Layout("single", {})
    for size in (2, 3, 4, 8):
        yield _make(dp_replicate=size)
    for zero, size in product((1, 2, 3), (2, 4)):
        yield _make({"zero": zero}, dp_shard=size)
    yield _make({"zero": 3}, dp_shard=3)
    yield _make({"zero": 3, "offload": True}, dp_shard=2)
    for zero in (1, 2, 3):
        yield _make({"zero": zero}, dp_replicate=2, dp_shard=2)
    for size, knobs in product((2, 4), ({}, SEQUENCE)):
        yield _make(knobs, tp=size)
    for knobs in ({}, SEQUENCE):
        yield _make(knobs, dp_replicate=2, tp=2)
        yield _make(knobs, dp_replicate=2, tp=4)
        yield _make({"zero": 3} | knobs, dp_shard=2, tp=2)
    yield _make({"zero": 1}, dp_shard=2, tp=2)
    yield _make({"zero": 3} | SEQUENCE, dp_replicate=2, dp_shard=2, tp=2)
    for size, schedule in product((2, 4), SCHEDULES):
        yield _make({"schedule": schedule}, pp=size)
    for schedule in SCHEDULES:
        yield _make({"schedule": schedule}, pp=2, dp_replicate=2)
        yield _make({"schedule": schedule}, pp=2, tp=2)
    yield _make({"schedule": "1f1b"} | SEQUENCE, pp=2, tp=2)
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        yield _make({"schedule": schedule, "zero": 1}, pp=2, dp_shard=2)
    for schedule in ("1f1b", "interleaved_1f1b", "zbv"):
        yield _make({"schedule": schedule}, pp=2, dp_replicate=2, tp=2)
    yield _make({"schedule": "1f1b"} | SEQUENCE, pp=2, dp_replicate=2, tp=2)
    for size, knobs in product((2, 4), ({}, RING)):
        yield _make(knobs, cp=size)
    for knobs in ({}, RING):
        yield _make(knobs, dp_replicate=2, cp=2)
        yield _make(knobs, cp=2, tp=2)
    yield _make(SEQUENCE, cp=2, tp=2)
    yield _make({"zero": 3}, dp_shard=2, cp=2)
    yield _make({"schedule": "1f1b"}, pp=2, cp=2)
    yield _make(SEQUENCE, dp_replicate=2, cp=2, tp=2)
    yield _make({"schedule": "1f1b"} | SEQUENCE, pp=2, cp=2, tp=2)
    yield _make({"zero": 3}, dp_shard=2, cp=2, tp=2)
    for size in (2, 4):
        yield _make({"zero": 0}, dp_shard=size, ep=size)
    yield _make({"zero": 0}, dp_replicate=2, dp_shard=2, ep=2)
    yield _make({"zero": 0}, dp_shard=2, ep=2, tp=2)
    yield _make({"zero": 3}, dp_shard=4, ep=2)
    yield _make({"zero": 0, "schedule": "1f1b"}, pp=2, dp_shard=2, ep=2)
    for knobs in ({}, {"tp": 2}, {"cp": 2}):
        yield _make({"loss_chunk": 8}, **{"dp_replicate": 2, **knobs})
    for recompute in ("full", "selective"):
        yield _make({"recompute": recompute}, dp_replicate=2)
        yield _make({"recompute": recompute} | SEQUENCE, tp=2)
    yield _make({"recompute": "full", "zero": 3}, dp_shard=2)
    for schedule in ("1f1b", "zbv", "dualpipev", "interleaved_zero_bubble"):
        yield _make({"recompute": "full", "schedule": schedule}, pp=2)
    yield _make({"recompute": "full"} | RING, cp=2)


SMALL = ["model.num_layers=8", "model.hidden_size=32", "model.max_seq_len=32", "dataset.context=32"]
"""Eight blocks, so that four ranks have two stages each."""

MODELS: Mapping[str, list[str]] = {
    "tiny_gpt, tied": ["model=tiny_gpt", *SMALL],
    "llama_tiny, grouped queries, untied": ["model=llama_tiny", "model.intermediate_size=64", *SMALL],
    "simple_cnn": ["model=simple_cnn", "dataset=digits"],
    "resnet18, SyncBatchNorm": [
        "model=resnet18",
        "dataset=synthetic",
        "dataset.kind=images",
        "dataset.shape=[1,8,8]",
        "model.image_size=8",
    ],
    "moe_tiny": ["model=moe_tiny", *SMALL],
}


def applies(model: str, layout: Layout) -> bool:
    """Whether the model has what the layout cuts: sequences, blocks, experts; convolutions are cut along the data only."""
    axes = {axis for axis, degree in layout.degrees.items() if degree > 1}
    if model.startswith(("simple_cnn", "resnet18")):
        return axes <= {"dp_replicate", "dp_shard"} and not layout.knobs.keys() & {"recompute", "loss_chunk"}
    return model.startswith("moe") or "ep" not in axes
