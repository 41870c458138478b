"""Local SGD: replicas train by themselves and average their weights every n-th step. Another training, by design.

What is cut: the batch, as in `data.py`. Each replica steps on the mean over its own samples, clipped by its own norm,
with optimizer moments of its own (Stich 2018, arXiv:1805.09767). What moves over `dp_replicate`: nothing between syncs;
at one, the weights, all-reduced in one flat tensor: 2(R-1)/R of their bytes every n steps, where ddp moves as many
every step. A row of the log sums its few numbers besides.

At a sync the mean m of the replicas is where plain averaging goes on. As in DiLoCo (Douillard et al. 2023,
arXiv:2311.08105, algorithm 1) it can be a gradient instead, D = a - m from the weights a after the sync before, for an
outer step with Nesterov momentum: v <- u v + D; a <- a - lr (D + u v). With lr 1 and u 0 that is the mean.

Replicas are alike after a sync only, so whatever speaks of one model waits for it: evaluations, saves, requests to save
or stop. A skip is a replica's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain.errors import CheckpointError, ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.layout import Layout, Own
from disttrain.parallel.step import Report, Verdict
from disttrain.parallel.update import Update

if TYPE_CHECKING:
    from disttrain.parallel.strategy import Strategy

MOMENTUM, UPDATES = "outer/momentum", "outer/updates"
"""What is saved beside each replica's moments."""


class Synced(Update):
    """An update of this replica's own, and at every n-th step, and the last, the average over all."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factors: Tensor, clip_norm: float | None, strategy: Strategy, num_steps: int
    ) -> None:
        """`strategy`: prepared, with `sync_every` of two or more; `num_steps` of the run, whose last is a sync too."""
        super().__init__(optimizer, factors, clip_norm, strategy.loss_scale)
        options, self.axis = strategy.options, strategy.apart
        if strategy.loss_scale is not None or self.axis.size * strategy.mesh.axis("tp").size != strategy.mesh.size:
            found = f"strategy.sync_every={options.sync_every} takes replicas, whole or cut by tp, and no moving loss scale"
            raise ConfigError(found, "strategy.sync_every=1")
        self.every, self.num_steps = options.sync_every, num_steps
        self.outer_lr, self.outer_momentum = options.outer_lr, options.outer_momentum
        self._trained = {name: one for name, one in strategy.parameters.items() if one.requires_grad}
        kept = set(strategy.model.state_dict())
        statistics = [b for name, b in strategy.model.named_buffers() if name in kept and b.is_floating_point()]
        self._averaged: list[Tensor] = [*self._trained.values(), *statistics]
        self._num_trained = sum(one.numel() for one in self._trained.values())
        self._last: Tensor | None = None
        self._momentum = torch.zeros_like(self._flat()[: self._num_trained]) if self.outer_momentum else torch.empty(0)
        self._asked = torch.zeros(len(Verdict), dtype=torch.float64, device=strategy.device)
        self._late: frozenset[str] = frozenset()

    def __call__(self, report: Report) -> None:
        """This replica's update; at a sync then the average, and what replicas have asked for since the one before."""
        if self._last is None and not self._is_plain:
            self._last = self._flat()[: self._num_trained]
        super().__call__(report)
        self._asked += report.verdict
        report.verdict = torch.zeros_like(self._asked)
        if self._is_sync(report.number):
            report.verdict = collectives.all_reduce(self._asked, self.axis)
            self._asked.zero_()
            self._average()

    @property
    def _is_plain(self) -> bool:
        return self.outer_lr == 1.0 and self.outer_momentum == 0.0

    def _is_sync(self, number: int) -> bool:
        return number % self.every == 0 or number == self.num_steps

    def _flat(self) -> Tensor:
        return torch.cat([one.detach().reshape(-1) for one in self._averaged])

    @torch.no_grad()
    def _average(self) -> None:
        """One all-reduce over the replicas, of weights and running statistics, and the outer step on the weights."""
        mean = collectives.all_reduce_(self._flat(), self.axis, "mean")
        if self._last is not None:
            weights = mean[: self._num_trained]
            moved = self._last - weights
            if self.outer_momentum:
                self._momentum.mul_(self.outer_momentum).add_(moved)
                moved.add_(self._momentum, alpha=self.outer_momentum)
            self._last.sub_(moved, alpha=self.outer_lr)
            weights.copy_(self._last)
        for one, part in zip(self._averaged, mean.split([one.numel() for one in self._averaged]), strict=True):
            one.copy_(part.view_as(one))

    # --- what waits for a sync -------------------------------------------------------------------------------------

    def ready(self, number: int, due: frozenset[str]) -> frozenset[str]:
        """Evaluations and saves wait for the next sync, where 'sync' has the loop read at once what was asked for."""
        waiting = due - {"log"}
        if not self._is_sync(number):
            self._late |= waiting
            return due - waiting
        due, self._late = due | self._late | {"sync"}, frozenset()
        return due

    def shown(self, report: Report) -> tuple[Report, Tensor, Tensor]:
        """Losses and counts of the whole global batch; of norms the root mean square, of rates and skips the mean over replicas."""
        own = [self.rate, self.skipped, report.grad_norm.square()]
        parts = [report.losses, report.counts, report.measured, torch.stack([number.double() for number in own]) / self.axis.size]
        vector = collectives.all_reduce_(torch.cat([part.reshape(-1) for part in parts]), self.axis)
        losses, counts, measured, (rate, skipped, square) = (
            part.view_as(own) for part, own in zip(vector.split([part.numel() for part in parts]), parts, strict=True)
        )
        return replace(report, losses=losses, counts=counts, measured=measured, grad_norm=square.sqrt()), rate, skipped

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state_tensors(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]) -> dict[str, tuple[Tensor, Layout]]:
        """Moments, and this replica's count of updates, stacked over replicas; the outer momentum as its parameter lies."""
        own = super().state_tensors(parameters, layouts) | {UPDATES: (self.updates, Layout(()))}
        found = {name: (value[None], self._own(layout).stacked()) for name, (value, layout) in own.items()}
        if self.outer_momentum:
            parts = self._momentum.split([one.numel() for one in self._trained.values()])
            for (name, one), part in zip(self._trained.items(), parts, strict=True):
                found[f"{MOMENTUM}/{name}"] = (part.view_as(one), layouts[name])
        return found

    def _own(self, layout: Layout) -> Layout:
        axis = self.axis.name
        return replace(layout, placements={**layout.placements, axis: Own()}, degrees={**layout.degrees, axis: self.axis.size})

    def state_dict(self) -> dict[str, Any]:
        """Of how many replicas the moments are, too."""
        return super().state_dict() | {"replicas": self.axis.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what replicas share; each one's count of updates came with the tensors."""
        own = self.updates.clone()
        super().load_state_dict(state)
        self.updates.copy_(own)
        self._last = None

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """CheckpointError for moments of another number of replicas, or of one training."""
        if state.get("replicas") != self.axis.size:
            saved = f"{state['replicas']} replicas" if "replicas" in state else "one training (strategy.sync_every=1)"
            raise CheckpointError(
                f"it holds the optimizer state of {saved}; strategy.sync_every={self.every} keeps one on each of {self.axis.size} replicas",
                "the layout that wrote it, or init_from=<it> to start anew from its weights",
            )
