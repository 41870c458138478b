"""The page's charts as PNGs, for papers and chats. matplotlib is imported here, when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disttrain.report import words
from disttrain.report.curves import axes
from disttrain.report.read import Run
from disttrain.report.timelines import KINDS, MOST_ROWS, Timeline, histograms, timeline

COLOURS = (
    "#2463c9",
    "#d2690a",
    "#16874f",
    "#c93a3a",
    "#7a4fd0",
    "#0c8ba6",
    "#c0307f",
    "#6c8a12",
    "#8a5a34",
    "#56657a",
    "#a63ac0",
    "#0f766e",
)
KIND_COLOURS = {"F": "#3f7fe0", "B": "#1f9d63", "I": "#1f9d63", "W": "#86c95b", "reduce": "#d98a1f", "update": "#8a93a3"}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.frameon": False,
}
DPI = 160
STRIPE = 4.0
"""Length of a stripe, in widths of the line."""


def draw(runs: Sequence[Run], into: Path) -> list[str]:
    """Write the figures that these runs have into `into`; their names. ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = []
    with mpl.rc_context(STYLE):
        for key in ("train/loss", "val/loss"):
            if any(key in row for run in runs for row in run.rows):
                names.append(_save(_curves(pyplot, runs, key), into, f"{key.replace('/', '-')}.png"))
        if len(runs) > 1 and any(_rate(run) for run in runs):
            names.append(_save(_bars(pyplot, runs), into, "throughput.png"))
        for run in runs:
            end = f"-{run.short.replace('/', '-')}" if len(runs) > 1 else ""
            if (found := timeline(run)) is not None and (found.is_pipeline or len(runs) == 1):
                names.append(_save(_gantt(pyplot, found), into, f"timeline{end}.png"))
            if len(runs) == 1 and histograms(run):
                names.append(_save(_steps(pyplot, run), into, "step-times.png"))
    return names


def _save(figure: Any, into: Path, name: str) -> str:
    from matplotlib import pyplot

    figure.savefig(into / name, dpi=DPI, bbox_inches="tight")
    pyplot.close(figure)
    return name


def _curves(pyplot: Any, runs: Sequence[Run], key: str) -> Any:
    figure, place = pyplot.subplots(figsize=(8, 4.5))
    curves = {}
    for index, run in enumerate(runs):
        points = [(x, row[key]) for x, row in zip(axes(run.rows)["step"], run.rows, strict=True) if key in row]
        if points:
            curves[index] = points
    for index, style in _stripes(curves).items():
        x, y = zip(*curves[index], strict=True)
        place.plot(x, y, color=COLOURS[index % len(COLOURS)], linestyle=style, linewidth=1.8)
    place.set_xlabel("step")
    place.set_ylabel(words.name(key))
    if 1 < len(curves) <= 2 * len(COLOURS):
        named = [pyplot.Line2D([], [], color=COLOURS[index % len(COLOURS)], label=runs[index].label) for index in curves]
        place.legend(handles=named, fontsize=8, ncols=1 + (len(curves) > 3), loc="upper left", bbox_to_anchor=(0, -0.14))
    return figure


def _stripes(curves: Mapping[int, Sequence[tuple[float, float]]]) -> dict[int, Any]:
    """Line styles: curves that lie on each other take turns, so that each can be seen."""
    ys = [y for points in curves.values() for _, y in points if math.isfinite(y)]
    near = 0.004 * (max(ys, default=1.0) - min(ys, default=0.0))
    groups: list[list[int]] = []
    for index, points in curves.items():
        for group in groups:
            other = curves[group[0]]
            if len(other) == len(points) and all(x == u and abs(y - v) <= near for (x, y), (u, v) in zip(points, other, strict=True)):
                group.append(index)
                break
        else:
            groups.append([index])
    return {
        index: "-" if len(group) == 1 else (-STRIPE * place, (STRIPE, STRIPE * (len(group) - 1)))
        for group in groups
        for place, index in enumerate(group)
    }


def _rate(run: Run) -> float:
    return run.metrics.get("perf/tokens_per_second", run.metrics.get("perf/samples_per_second", 0.0))


def _bars(pyplot: Any, runs: Sequence[Run]) -> Any:
    figure, place = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(runs)))
    labels = [run.label for run in runs]
    bars = place.barh(labels, [_rate(run) for run in runs], color=[COLOURS[index % len(COLOURS)] for index in range(len(runs))])
    place.bar_label(bars, [words.large(_rate(run)) if _rate(run) else run.status for run in runs], padding=4, fontsize=8)
    place.invert_yaxis()
    place.grid(axis="y", visible=False)
    tokens = any("perf/tokens_per_second" in run.metrics for run in runs)
    place.xaxis.set_major_formatter(lambda rate, _: words.large(rate))
    place.set_xlabel("tokens a second" if tokens else "samples a second")
    return figure


def _gantt(pyplot: Any, found: Timeline) -> Any:
    figure, place = pyplot.subplots(figsize=(11, 0.9 + 0.38 * len(found.names)))
    rows = {rank: row for row, rank in enumerate(found.names)}
    for kind in KINDS:
        bars = [bar for bar in found.bars if bar.kind == kind]
        if bars:
            spans = [bar.end - bar.start for bar in bars]
            lefts, ys = [bar.start for bar in bars], [rows[bar.rank] for bar in bars]
            place.barh(ys, spans, left=lefts, height=0.8, color=KIND_COLOURS[kind], edgecolor="white", linewidth=0.4, label=KINDS[kind])
    place.set_yticks(list(rows.values()), [f"rank {rank} {where}" for rank, where in found.names.items()])
    place.invert_yaxis()
    place.grid(axis="y", visible=False)
    place.xaxis.set_major_formatter(lambda seconds, _: words.seconds(seconds))
    place.set_title(f"step {found.step}: ranks waited {found.waited:.0%} of {words.seconds(found.seconds)}", fontsize=10, loc="left")
    place.legend(ncols=6, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.12))
    return figure


def _steps(pyplot: Any, run: Run) -> Any:
    found = histograms(run)[:MOST_ROWS]
    low = min(one.quantile(0.005) for one in found) / 1.1
    high = max(one.quantile(0.99) for one in found) * 1.1
    edges = [low * (high / low) ** (number / 48) for number in range(49)]
    figure, places = pyplot.subplots(len(found), 1, sharex=True, squeeze=False, figsize=(8, 0.8 + 0.45 * len(found)))
    for place, one in zip(places[:, 0], found, strict=True):
        middles = [min(max(one.ratio**bin_, low), high * 0.999) for bin_ in one.counts]
        place.hist(middles, edges, weights=list(one.counts.values()), color=COLOURS[0])
        place.set_xscale("log")
        place.set_yticks([])
        place.set_ylabel(f"rank {one.rank}", rotation=0, ha="right", va="center", fontsize=8)
        place.minorticks_off()
    ticks = [low * (high / low) ** (number / 5) for number in range(6)]
    places[-1, 0].set_xticks(ticks, [words.seconds(tick) for tick in ticks])
    places[-1, 0].set_xlabel("step time")
    return figure
