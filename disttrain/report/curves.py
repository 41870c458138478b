"""Curves thin enough to draw: of each piece of a long one its ends, its lowest and its highest point are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from disttrain.report.read import Run

MOST_POINTS = 120_000
"""Numbers in one page; a page of this many has some 1.5 MB of them."""
FEWEST = 60
"""Points of a curve, however many there are."""
FIRST = ("train/loss", "val/loss", "val/perplexity", "val/accuracy", "train/grad_norm", "train/lr", "perf/tokens_per_second")
"""Metrics that stand first in the choice."""
HIDDEN = ("step", "epoch", "train/targets", "perf/elapsed_seconds")


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Metrics that can be drawn over steps: those with numbers in a row, smallest and largest of ranks left out."""
    found = {key for run in runs for row in run.rows for key in row}
    found = {key for key in found if key not in HIDDEN and not key.endswith(("_min", "_max"))}
    return [key for key in FIRST if key in found] + sorted(found - set(FIRST))


def axes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What each row's number is drawn over: steps, targets seen so far, seconds so far.

    Seconds of a record without them are those of its steps.
    """
    step = [float(row["step"]) for row in rows]
    seen, tokens = 0.0, []
    spent, last, seconds = 0.0, 0.0, []
    for row in rows:
        seen += row.get("train/targets", 0.0)
        tokens.append(seen)
        spent += row.get("perf/step_seconds", 0.0) * (row["step"] - last)
        last = row["step"]
        seconds.append(float(row.get("perf/elapsed_seconds", spent)))
    return {"step": step, "tokens": tokens, "seconds": seconds}


def points_a_curve(runs: Sequence[Run], metrics: Sequence[str]) -> int:
    """How many points each curve may have."""
    return max(FEWEST, MOST_POINTS // max(1, len(runs) * len(metrics)))


def thin(values: Sequence[float], most: int) -> list[int]:
    """Indices of at most about `most` of `values` that keep their shape. Numbers that are not finite are gaps."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = set()
    size = math.ceil(len(values) / max(1, most // 4))
    for start in range(0, len(values), size):
        piece = range(start, min(start + size, len(values)))
        finite = [index for index in piece if math.isfinite(values[index])] or [start]
        kept |= {piece[0], piece[-1], min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def curves_of(run: Run, metrics: Sequence[str], most: int) -> dict[str, Any]:
    """{x: {axis: numbers}, y: {metric: [indices into x, values]}} of one run, None for what is not finite."""
    picked: dict[str, list[int]] = {}
    for key in metrics:
        at = [index for index, row in enumerate(run.rows) if isinstance(row.get(key), (int, float))]
        if at:
            picked[key] = [at[index] for index in thin([float(run.rows[index][key]) for index in at], most)]
    used = sorted({index for indices in picked.values() for index in indices})
    place = {index: number for number, index in enumerate(used)}
    x = {name: [_six(numbers[index]) for index in used] for name, numbers in axes(run.rows).items()}
    y = {key: [[place[index] for index in indices], [_six(run.rows[index][key]) for index in indices]] for key, indices in picked.items()}
    return {"x": x, "y": y}


def _six(number: float) -> float | None:
    """Seven digits are more than a screen shows."""
    return float(f"{number:.7g}") if math.isfinite(number) else None
