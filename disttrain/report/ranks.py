"""Sections on what ranks kept for themselves: one step on the clock, and step times."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.report import tables, words
from disttrain.report.html import Html, tag
from disttrain.report.parts import chart, chooser, details, section
from disttrain.report.read import Run
from disttrain.report.tables import Cell, Column, Table
from disttrain.report.timelines import KINDS, Timeline, histograms, timeline

MOST_BUSY = 16
"""Ranks of a table beside a drawing."""


def step(runs: Sequence[Run]) -> Html | None:
    """A recorded step, rank by rank."""
    having = [(index, run, found) for index, run in enumerate(runs) if (found := timeline(run)) is not None]
    if not having:
        return None
    having.sort(key=lambda one: not one[2].is_pipeline)
    blocks = []
    for index, run, found in having:
        said = _step_in_words(found)
        columns = [Column("rank", "rank"), Column("at", "place", False), Column("busy", "in actions"), Column("share", "of the time")]
        ranks = list(found.names.items())[:MOST_BUSY]
        rows = [
            [
                Cell(str(rank), rank),
                Cell(place, place),
                Cell(words.seconds(found.busy[rank]), found.busy[rank]),
                _share(found.busy[rank], found),
            ]
            for rank, place in ranks
        ]
        kinds = [kind for kind in KINDS if any(bar.kind == kind for bar in found.bars)]
        key = tag(
            "ul", [tag("li", tag("span", class_=f"swatch k-{kind}", aria_hidden="true"), KINDS[kind]) for kind in kinds], class_="key"
        )
        figure = chart(f"timeline:{index}", said, tag("figcaption", said), key, height=60 + 26 * len(found.names))
        table = Table(columns, rows).html(f"how long ranks of {run.label} were in actions")
        title = tag("h3", tables.swatch(index), run.label) if len(runs) > 1 else None
        blocks.append(tag("div", title, figure, details("by rank", table), class_="of-run", data_run=index))
    return section("timeline", "Timeline of a step", chooser("timeline-run", [(i, r) for i, r, _ in having]), blocks)


def _step_in_words(found: Timeline) -> str:
    """What the drawing shows."""
    span = f"the {words.seconds(found.seconds)} between the first forward and the last backward"
    if not found.is_pipeline:
        return f"Step {found.step}: ranks computed, and talked on the way, in {1 - found.waited:.0%} of {span}."
    beside = f"; {found.schedule} waits {found.predicted:.0%} by its formula" if found.predicted is not None else ""
    return f"Step {found.step}: ranks waited for each other in {found.waited:.0%} of {span}{beside}."


def _share(busy: float, found: Timeline) -> Cell:
    seconds = found.seconds
    return Cell(f"{busy / seconds:.0%}" if seconds else "–", busy / seconds if seconds else None)


def step_times(runs: Sequence[Run]) -> Html | None:
    """Histograms of step times, a row a rank."""
    having = [(index, run, found) for index, run in enumerate(runs) if (found := histograms(run))]
    if not having:
        return None
    blocks = []
    for index, run, found in having:
        columns = [Column("rank", "rank"), Column("steps", "steps"), Column("median", "median"), Column("p95", "95% below")]
        columns += [Column("longest", "longest"), Column("first", "first step")]
        rows = []
        for one in found:
            median, high, longest = (one.quantile(share) for share in (0.5, 0.95, 1.0))
            row = [Cell(str(one.rank), one.rank), Cell(f"{one.num_steps:,}", one.num_steps)]
            row += [tables.number_cell("seconds", number) for number in (median, high, longest)]
            rows.append([*row, tables.number_cell("seconds", one.first)])
        medians = [one.quantile(0.5) for one in found]
        said = f"{words.count(found[0].num_steps, 'step')} on {words.count(len(found), 'rank')}, evaluations and saves left out: "
        said += f"the median is {words.seconds(min(medians))}"
        said += f" to {words.seconds(max(medians))}, by rank" if max(medians) > 1.03 * min(medians) else ""
        figure = chart(f"steps:{index}", said, tag("figcaption", said), height=60 + 40 * min(len(found), MOST_BUSY))
        title = tag("h3", tables.swatch(index), run.label) if len(runs) > 1 else None
        table = details("by rank", Table(columns, rows).html(f"step times of {run.label} by rank"))
        blocks.append(tag("div", title, figure, table, class_="of-run", data_run=index))
    return section("steps", "Step times by rank", chooser("steps-run", [(i, r) for i, r, _ in having]), blocks)
