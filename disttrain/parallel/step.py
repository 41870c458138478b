"""What travels through one optimizer step: the batch, this rank's numbers, the agreed numbers, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

Tensors = Any
"""A tensor, or a tuple or dict of tensors, as a model takes or returns them."""


def map_tensors(change: Callable[[Tensor], Tensor], tree: Tensors) -> Tensors:
    """`change` every tensor of a tensor, tuple, list or dict."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(map_tensors(change, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(change, value) for value in tree)
    return tree


class Verdict(IntEnum):
    """What all ranks do after a step; the largest asked for by anyone on any rank, but SKIP holds beside any other."""

    GO = 0
    SKIP = 1
    SAVE = 2
    STOP = 3
    ROLL_BACK = 4


def vote(verdict: Verdict) -> Tensor:
    """Counters [5] with one vote for `verdict`; float32, on the CPU."""
    counters = torch.zeros(len(Verdict))
    counters[verdict] = 1.0
    return counters


@dataclass(frozen=True)
class Precision:
    """The type that matrix products run in (autocast; weights stay as they are)."""

    dtype: torch.dtype


@dataclass(frozen=True)
class ScaleRule:
    """Dynamic loss scale of fp16 training, as in Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2."""

    start: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True)
class Declaration:
    """What a policy fixes from config alone, before any object exists. At most one policy answers each field."""

    precision: Precision | None = None
    micro_batch_size: int | None = None
    loss_scale: ScaleRule | None = None


@dataclass
class Batch:
    """One micro-batch: rows with `valid` 0 are void and count for nothing."""

    inputs: Tensors
    targets: Tensors
    valid: Tensor | None  # [micro] bool; None where every row is a sample
    indices: Tensor  # [micro], global sample numbers on the host, -1 where void


@dataclass
class Step:
    """All micro-batches of one optimizer step on this rank, every one of the same shape for the whole run."""

    number: int
    micro: list[Batch]
    local_counts: Mapping[str, float] = field(default_factory=dict)
    """Valid targets by term in this rank's samples, counted on the host while the batch is built."""
    counts: Tensor | None = None
    """Valid targets by term over the whole global batch [terms], float64 on the device; set by `Strategy`."""

    def counted(self) -> Tensor:
        """`counts`, once they are there."""
        assert self.counts is not None, "count the step before it runs"
        return self.counts


@dataclass
class Local:
    """This rank's numbers of one step."""

    sums: list[Tensor]
    """Loss sums, unscaled, float64: all terms of the first micro-batch, then of the next."""
    num_terms: int

    @property
    def losses(self) -> Tensor:
        """The sums by micro-batch and term [micro, terms]."""
        return torch.stack(self.sums).view(-1, self.num_terms)


@dataclass
class Report:
    """The agreed numbers of one step: views of one vector, summed once over the world. All on the device."""

    losses: Tensor
    """Loss sums by micro-batch index and term [micro, terms], over data ranks."""
    counts: Tensor
    """Valid targets by term [terms]."""
    grad_norm: Tensor
    """True global gradient norm, unscaled, before clipping."""
    verdict: Tensor
    """How many ranks asked for each verdict [5]."""
    skip: Tensor
    """1.0 where the update must not be made (overflow, no valid target, asked for), else 0.0; float32."""
    measured: Tensor
    """What each rank measured [world, values]; empty between log points."""
    number: int
    """Of the step in the run, from 1: a roll-back does not take it back."""

    def on(self, device: torch.device) -> Report:
        """The report with what an update needs of it on `device`: the host waits, where weights lie there."""
        if self.skip.device == device:
            return self
        return replace(self, grad_norm=self.grad_norm.to(device), skip=self.skip.to(device))

    def fold(self, found: Tensor) -> None:
        """Add what all ranks conclude alike from agreed numbers: verdict counters [5], whose SKIP holds for this step."""
        self.verdict = self.verdict + found
        self.skip = torch.maximum(self.skip, found[Verdict.SKIP].to(self.skip.dtype))

    @property
    def means(self) -> Tensor:
        """Mean of each term over what it counts in the global batch [terms]."""
        return self.losses.sum(0) / self.counts.clamp(min=1.0)

    @property
    def loss(self) -> Tensor:
        """What is minimised: mean loss over the valid targets of the global batch, and the means of all other terms."""
        return self.means.sum()

    @property
    def overflow(self) -> Tensor:
        """1.0 where some gradient is not finite, else 0.0; float32."""
        return self.grad_norm.isfinite().logical_not_().float()
