"""The numbers of a run: sums kept on the device, read once a log point, and the rows made of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
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

    def leave_out(self, seconds: float) -> Window:
        """Forget time that was not spent on steps; the window itself."""
        self._start += seconds
        return self


class Sums:
    """Loss sums and counts by term [2, terms] over the run, float64 on the device.

    `apart`: ranks whose own numbers a report leaves out (local SGD); their sums are added where the total is read, by all.
    """

    def __init__(self, terms: int, device: torch.device, apart: Axis) -> None:
        self._apart = apart
        self._losses = torch.zeros(terms, dtype=torch.float64, device=device)
        self._counts = torch.zeros(terms, dtype=torch.float64, device=device)
        self._logged = self._epoch = torch.zeros(2, terms, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        """The run's sums [2, terms]."""
        return collectives.all_reduce_(torch.stack([self._losses, self._counts]), self._apart)

    def add(self, report: Report) -> None:
        """Count a step."""
        self._losses += report.losses.sum(0)
        self._counts += report.counts

    def targets_in_window(self) -> Tensor:
        """Valid targets, which the first term counts, since this was last asked."""
        total = self.total
        count = (total - self._logged)[1, 0]
        self._logged = total
        return count

    def epoch_loss(self) -> float:
        """The epoch's sum of losses over its valid targets; the next epoch begins. A host read."""
        total = self.total
        losses, counts = (total - self._epoch).tolist()
        self._epoch = total
        return float(sum(loss / max(1.0, count) for loss, count in zip(losses, counts, strict=True)))

    def state(self) -> list[list[list[float]]]:
        """The run's sums and those at the start of the epoch."""
        return [self.total.tolist(), self._epoch.tolist()]

    @classmethod
    def restored(cls, state: list[list[list[float]]], device: torch.device, apart: Axis) -> Sums:
        """Sums as `state` had them."""
        total, epoch = (torch.tensor(values, dtype=torch.float64, device=device) for values in state)
        sums = cls(total.shape[1], device, apart)
        sums._losses, sums._counts = (total * (apart.index == 0)).unbind()
        sums._logged, sums._epoch = total, epoch
        return sums


def row_of(
    report: Report, rate: Tensor, skipped: Tensor, targets: Tensor, measured: Sequence[str], terms: Sequence[str] = ()
) -> dict[str, float]:
    """The metrics of a log point, with one read of the device.

    `terms`: names under which the loss's terms are reported, none if it has one. `measured` names what the columns of
    `report.measured` hold: each gives its mean, `_min` and `_max` over ranks.
    """
    numbers = {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/lr": rate,
        "train/skipped_updates": skipped,
        "train/targets": targets,
    }
    numbers |= dict(zip((f"train/{term}" for term in terms), report.means, strict=False))
    scalars = torch.stack([number.to(report.counts.device, torch.float64) for number in numbers.values()])
    flat = torch.cat([scalars, report.measured.flatten()]).tolist()
    row = dict(zip(numbers, flat, strict=False))
    by_rank = flat[len(numbers) :]
    for index, name in enumerate(measured if by_rank else ()):
        values = by_rank[index :: len(measured)]
        row |= {name: sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return row
