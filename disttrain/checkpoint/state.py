"""The state of a run, as it is saved and loaded: tensors with their layouts, and plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from disttrain.parallel.layout import Layout


@dataclass
class State:
    """`tensors` by '<kind>/<name>' ('model/blocks.0.norm1.weight', 'optimizer/<parameter>/exp_avg', 'callbacks/ema/...').

    Each is this rank's local part with the layout that says which part. `values` are JSON: 'progress', 'rng',
    'data', 'update', 'callbacks'; those under 'by_rank' differ from rank to rank, those under 'by_name'
    ({kind: {name: values}}) are each rank's word on the names that it holds; all others are the same on each rank.
    """

    tensors: dict[str, tuple[Tensor, Layout]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
