"""Evaluation: each validation sample exactly once on any number of ranks, weighted by valid targets.

Loss, perplexity and bits per byte are a sum and a count over ranks; other metrics are torchmetrics', fed with
valid samples only and exchanged once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from disttrain.parallel import collectives
from disttrain.parallel.strategy import Strategy
from disttrain.train.batch import Feed, split_positions
from disttrain.train.metrics import MetricSet


class Evaluator:
    """Measures a model, in the layout it is trained in, on one split."""

    def __init__(self, strategy: Strategy, feed: Feed, metrics: MetricSet, bytes_per_token: float | None = None) -> None:
        """`feed` gives every batch of the split once; `bytes_per_token`: of the data, where it knows."""
        self.strategy = strategy
        self.feed = feed
        self.metrics = metrics
        self.bytes_per_token = bytes_per_token

    def run(self, prefix: str = "val", weight_sets: Mapping[str, Mapping[str, Tensor]] | None = None) -> dict[str, float]:
        """Metrics by name (`val/loss`, ...), the same on every rank; once more for each set of weights, with its suffix."""
        self.strategy.share_buffers()
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
        means = {term: loss / count if count else math.nan for term, loss, count in zip(terms, losses, counts, strict=True)}
        loss = sum(means.values())
        named = {"loss": loss} | ({f"loss_{term}": value for term, value in means.items()} if len(means) > 1 else {})
        if getattr(self.strategy.task, "unit", "") == "tokens":
            named["perplexity"] = math.exp(min(loss, 700.0))
            if self.bytes_per_token:
                named["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        named |= self.metrics.compute()
        return {f"{prefix}/{name}{suffix}": value for name, value in named.items()}

    def _sums(self) -> tuple[Sequence[str], Tensor]:
        """Loss sums and counts [2, terms] over the whole split and world."""
        terms: Sequence[str] = ()
        totals: Tensor | None = None
        for step in self.feed.steps(split_positions(self.feed.order)):
            sums, seen = self.strategy.evaluate(step)
            totals = sums if totals is None else totals + sums
            terms = tuple(step.local_counts)
            if self.metrics.metrics:
                for outputs, targets, valid in seen:
                    self.metrics.update(self.strategy.whole_outputs(outputs), targets, valid)
        assert totals is not None, "a split has at least one batch"
        return terms, collectives.all_reduce(totals, self.strategy.mesh.axis("world"))


@contextmanager
def _borrowed(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in the parameters inside the block."""
    own = {name: parameters[name].data for name in weights}
    try:
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].data = value.to(own[name].dtype)
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value
