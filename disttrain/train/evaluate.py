"""Evaluation: each validation sample exactly once on any number of ranks, weighted by valid targets.

Loss, perplexity and bits per byte are a sum and a count over ranks. `val/loss` is what training minimises, all terms; where
there are several each is there alone too, and perplexity and bits per byte are of the first, the targets' own. Other
metrics are torchmetrics', fed with valid samples only and exchanged once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError, DataError
from disttrain.models.task import loss_names
from disttrain.parallel import collectives
from disttrain.parallel.materialise import share_buffers
from disttrain.parallel.step import Verdict
from disttrain.parallel.strategy import Strategy
from disttrain.train.batch import Feed, split_positions
from disttrain.train.metrics import MetricSet
from disttrain.train.progress import Progress


class CutShort(Exception):  # noqa: N818 (no error: all ranks agree to leave an evaluation)
    """A stop was asked for while a split was measured; raised on every rank after the same batch."""


def unless_stopped(
    evaluate: Callable[..., dict[str, float]], stop_requested: Callable[[], str | None], progress: Progress
) -> dict[str, float]:
    """What `evaluate` finds; nothing if a signal came on any rank: all leave it together, and it is owed to the run that goes on."""
    try:
        return evaluate(is_stopped=lambda: stop_requested() is not None)
    except CutShort:
        progress.owes_evaluation = True
        if signal := stop_requested():
            progress.reasons.append(f"{Verdict.STOP.name}: {signal}")
        return {}


class Evaluator:
    """Measures a model, in the layout it is trained in, on one split."""

    def __init__(self, strategy: Strategy, feed: Feed, metrics: MetricSet, bytes_per_token: float | None = None) -> None:
        """`feed` gives every batch of the split once; `bytes_per_token`: of the data, where it knows."""
        self.strategy = strategy
        self.feed = feed
        self.metrics = metrics
        self.bytes_per_token = bytes_per_token
        self._is_stopped: Callable[[], bool] = lambda: False
        self._said: collectives.Pending | None = None

    def run(
        self,
        prefix: str = "val",
        weight_sets: Mapping[str, Mapping[str, Tensor]] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Metrics by name (`val/loss`, ...), the same on every rank; once more for each set of weights, with its suffix.

        `is_stopped` is asked after every batch; where it is true on any rank, all raise CutShort after the next one.
        """
        share_buffers(self.strategy.model, self.strategy.mesh.axis("data"))
        self._is_stopped = is_stopped
        found = self._measure(prefix, "")
        for suffix, weights in (weight_sets or {}).items():
            with _borrowed(self.strategy.parameters, weights):
                found |= self._measure(prefix, f"_{suffix}")
        return found

    def _measure(self, prefix: str, suffix: str) -> dict[str, float]:
        model = self.strategy.model
        was_training = model.training
        model.eval()
        try:
            terms, totals = self._sums()
        finally:
            model.train(was_training)
        losses, counts = totals.tolist()
        if 0.0 in counts:
            found = f"no target of the {prefix} split counts: all are ignored, or the task's `counts` are zero"
            raise DataError(found, "a split with targets, or none: `validation` gives None")
        means = [loss / count for loss, count in zip(losses, counts, strict=True)]
        named = {"loss": sum(means)} | dict(zip(loss_names(terms, self.strategy.task), means, strict=False))
        if getattr(self.strategy.task, "unit", "") == "tokens":
            named["perplexity"] = math.exp(min(means[0], 700.0))
            if self.bytes_per_token:
                named["bits_per_byte"] = means[0] / math.log(2) / self.bytes_per_token
        measured = self.metrics.compute()
        if taken := sorted(named.keys() & measured.keys()):
            found = f"a metric is called '{taken[0]}', which is a name of the loss's own: val/{taken[0]} would be two things"
            raise ConfigError(found, "another name for it, in metrics or in the task's metrics()")
        named |= measured
        return {f"{prefix}/{name}{suffix}": value for name, value in named.items()}

    def _leave_if_stopped(self) -> None:
        """Look at what ranks said after the batch before, and begin to add up what they say now: nobody waits for it."""
        if self._said is not None and self._said.wait().item():
            raise CutShort
        asked = torch.tensor(float(self._is_stopped()), device=self.strategy.device)
        self._said = collectives.start_all_reduce(asked, self.strategy.mesh.axis("world"))

    def _sums(self) -> tuple[Sequence[str], Tensor]:
        """Loss sums and counts [2, terms] over the whole split and world."""
        terms: Sequence[str] = ()
        totals: Tensor | None = None
        self._said = None
        for step in self.feed.steps(split_positions(self.feed.order)):
            sums, seen = self.strategy.evaluate(step)
            totals = sums if totals is None else totals + sums
            terms = tuple(step.local_counts)
            self._leave_if_stopped()
            if self.metrics.metrics:
                for outputs, targets, valid in seen:
                    self.metrics.update(self.strategy.whole_outputs(outputs), targets, valid)
        assert totals is not None, "a split has at least one batch"
        return terms, collectives.all_reduce(totals, self.strategy.mesh.axis("world"))


@contextmanager
def _borrowed(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in the memory of the parameters inside the block: a sharded one is read there and nowhere else."""
    own = {name: parameters[name].detach().clone() for name in weights}
    try:
        _fill(parameters, weights)
        yield
    finally:
        _fill(parameters, own)


@torch.no_grad()
def _fill(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)
