"""The numbers of a run: sums kept on the device, read once a log point, and the rows made of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from disttrain.parallel.step import Report


@dataclass
class Window:
    """What happened since the last log point."""

    steps: int = 0
    data_wait_seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Wall-clock time since the last log point, evaluations and saves left out."""
        return time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Time that was not spent on steps."""
        self._start += seconds


class Sums:
    """Loss sums and counts by term [2, terms] over the run, float64 on the device."""

    def __init__(self, terms: int, device: torch.device) -> None:
        self._losses = torch.zeros(terms, dtype=torch.float64, device=device)
        self._counts = torch.zeros(terms, dtype=torch.float64, device=device)
        self._logged, self._epoch = self.total, self.total

    @property
    def total(self) -> Tensor:
        """The run's sums [2, terms]."""
        return torch.stack([self._losses, self._counts])

    def add(self, report: Report) -> None:
        """Count a step."""
        self._losses += report.losses.sum(0)
        self._counts += report.counts

    def targets_in_window(self) -> Tensor:
        """Valid targets since this was last asked."""
        count = (self.total - self._logged)[1].sum()
        self._logged = self.total
        return count

    def epoch_loss(self) -> float:
        """The epoch's sum of losses over its valid targets; the next epoch begins. A host read."""
        losses, counts = (self.total - self._epoch).tolist()
        self._epoch = self.total
        return float(sum(loss / max(1.0, count) for loss, count in zip(losses, counts, strict=True)))

    def state(self) -> list[list[list[float]]]:
        """The run's sums and those at the start of the epoch."""
        return [self.total.tolist(), self._epoch.tolist()]

    @classmethod
    def restored(cls, state: list[list[list[float]]], device: torch.device) -> Sums:
        """Sums as `state` had them."""
        total, epoch = (torch.tensor(values, dtype=torch.float64, device=device) for values in state)
        sums = cls(total.shape[1], device)
        sums._losses, sums._counts = total.clone().unbind()
        sums._logged, sums._epoch = total, epoch
        return sums


def row_of(report: Report, rate: Tensor, skipped: Tensor, targets: Tensor, measured: Sequence[str]) -> dict[str, float]:
    """The metrics of a log point, with one read of the device.

    `measured` names what the columns of `report.measured` hold: each gives its mean, `_min` and `_max` over ranks.
    """
    numbers = {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/lr": rate,
        "train/skipped_updates": skipped,
        "train/targets": targets,
    }
    scalars = torch.stack([number.double() for number in numbers.values()])
    flat = torch.cat([scalars, report.measured.flatten()]).tolist()
    row = dict(zip(numbers, flat, strict=False))
    by_rank = flat[len(numbers) :]
    for index, name in enumerate(measured if by_rank else ()):
        values = by_rank[index :: len(measured)]
        row |= {name: sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return row
