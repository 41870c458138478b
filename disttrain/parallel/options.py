"""The strategies' own knobs: the keys of config group `strategy` that are no degrees, by the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """See `StrategyConfig` for what each means."""

    sequence_parallel: bool = False
    attention: str = "gather"
    loss_chunk: int | None = None
    plan: Mapping[str, str] = field(default_factory=dict)
    bucket_size: float = 25.0
    find_unused_parameters: bool = False
    sync_batch_norm: bool = True
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stage_split: Sequence[str] = ()
    zero: int = 3
    gather_dtype: str = "weights"
    offload: bool = False
    recompute: str = "none"
    recompute_every: int = 1
    offload_activations: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    compression: str = "none"
    compression_rank: int = 4
    sync_every: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    deepspeed: Mapping[str, Any] | None = None
