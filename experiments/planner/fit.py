"""Fits the planner's constants on published runs and cross-validates them.

Two shares are fitted, `matmul` and `link`; the others stay at their round values (`disttrain/plan/constants.py`),
because fitting them made a source that was left out no better. Rows are weighed alike; the loss is the soft absolute
value of the logarithm of predicted over measured, so that a few broken rows don't lead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
from rows import Row

from disttrain.plan.closed import Closed
from disttrain.plan.constants import Constants

FITTED = ("matmul", "link")
SOFT = 0.05
"""Relative error from which the loss grows in proportion."""
FOLDS, SEEDS = 5, 5

Array = np.ndarray


class Predictor:
    """Rows, counted once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Count all."""
        self.rows = list(rows)
        self.closed = [Closed(row.case, row.hardware) for row in self.rows]
        self.measured = np.array([row.seconds for row in self.rows])

    def ratios(self, constants: Constants, which: Sequence[int] | None = None) -> Array:
        """Predicted over measured step time."""
        which = range(len(self.rows)) if which is None else which
        return np.array([self.closed[i].seconds(constants).step / self.measured[i] for i in which])

    def fit(self, which: Sequence[int] | None = None, start: Constants | None = None) -> Constants:
        """Constants that fit the rows `which` best: Gauss and Newton on logarithms, rows weighed anew each round."""
        found = start or Constants()
        for _ in range(8):
            point = np.log([getattr(found, name) for name in FITTED])
            error = np.log(self.ratios(found, which))
            columns = []
            for number in range(len(FITTED)):
                moved = point.copy()
                moved[number] += 0.02
                columns.append((np.log(self.ratios(_with(found, moved), which)) - error) / 0.02)
            slope = np.stack(columns, axis=1)
            weight = 1.0 / np.sqrt(1.0 + (error / SOFT) ** 2)
            step = np.linalg.lstsq(slope * weight[:, None] ** 0.5, -error * weight**0.5, rcond=None)[0]
            found = _with(found, point + np.clip(step, -0.3, 0.3))
            if np.abs(step).max() < 1e-3:
                break
        return found


def _with(constants: Constants, logarithms: Array) -> Constants:
    return replace(constants, **{name: float(value) for name, value in zip(FITTED, np.exp(logarithms), strict=True)})


def cross_validate(predictor: Predictor, seeds: int = SEEDS) -> Array:
    """Ratios of rows whose family was not fitted on, `seeds` times the rows: families are dealt into five folds."""
    families = sorted({row.family for row in predictor.rows})
    pooled = []
    for seed in range(seeds):
        order = list(families)
        random.Random(seed).shuffle(order)
        fold = {family: number % FOLDS for number, family in enumerate(order)}
        pooled.append(_left_out(predictor, lambda row, fold=fold: fold[row.family])[0])  # type: ignore[misc]
    return np.concatenate(pooled)


def leave_one_source_out(predictor: Predictor) -> tuple[Array, dict[Hashable, Constants]]:
    """Ratios of rows of sources that were not fitted on, and the constants without each source."""
    return _left_out(predictor, lambda row: row.source)


def _left_out(predictor: Predictor, group: Callable[[Row], Hashable]) -> tuple[Array, dict[Hashable, Constants]]:
    groups = [group(row) for row in predictor.rows]
    ratios, fits = np.empty(len(groups)), {}
    for name in sorted(set(groups), key=str):
        held_out = [i for i, other in enumerate(groups) if other == name]
        fits[name] = predictor.fit([i for i, other in enumerate(groups) if other != name])
        ratios[held_out] = predictor.ratios(fits[name], held_out)
    return ratios, fits


def errors(ratios: Array) -> tuple[float, float, float]:
    """Median, mean and 90th percentile of |predicted / measured - 1|, in percent."""
    off = np.abs(ratios - 1.0) * 100
    return float(np.median(off)), float(off.mean()), float(np.percentile(off, 90))
