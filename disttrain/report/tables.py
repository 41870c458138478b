"""The tables of a page as data: the final one, and predictions beside measurements. HTML and CSV are written from these."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from disttrain.report import words
from disttrain.report.html import Child, Html, tag
from disttrain.report.read import Run, differences, differing, is_sent, value_of
from disttrain.texts import flat

SHOWN = (
    "val/loss",
    "train/loss",
    "val/accuracy",
    "perf/tokens_per_second",
    "perf/samples_per_second",
    "perf/step_seconds",
    "perf/mfu",
    "memory/peak_bytes_max",
)
"""Metrics of the final table, where a run has them."""
OF_THE_LOSS = {"val/perplexity", "val/bits_per_byte"}
"""What follows from the loss alone."""
SENT = "comm_bytes"
"""Key of a column of bytes over all axes."""
MEASURED_AS = {"memory/peak_bytes": "memory/peak_bytes_max"}
"""Predictions are of the fullest rank."""


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: for a person, and for sorting and CSV."""

    text: str
    value: float | str | None
    markup: Html | None = None
    class_: str = ""


@dataclass(frozen=True)
class Column:
    """One column."""

    key: str
    title: str
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first cell of a row names it."""

    columns: list[Column]
    rows: list[list[Cell]]

    def csv(self) -> str:
        """Values without units under the columns' keys."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        for row in self.rows:
            writer.writerow(["" if cell.value is None else cell.value for cell in row])
        return out.getvalue()

    def html(self, caption: str, is_sortable: bool = False) -> Html:
        """The element. Columns of a sortable one are ordered by buttons in their heads."""
        head = [
            tag("th", tag("button", column.title, type="button") if is_sortable else column.title, scope="col", class_=_kind(column))
            for column in self.columns
        ]
        body = [
            tag("tr", [self._cell(cell, column, index == 0) for index, (cell, column) in enumerate(zip(row, self.columns, strict=True))])
            for row in self.rows
        ]
        classes = "sortable" if is_sortable else None
        table = tag("table", tag("caption", caption), tag("thead", tag("tr", head)), tag("tbody", body), class_=classes)
        return tag("div", table, class_="scroll", role="region", aria_label=caption, tabindex=0)

    def _cell(self, cell: Cell, column: Column, is_head: bool) -> Html:
        content: Child = cell.markup if cell.markup is not None else cell.text
        classes = " ".join(part for part in (_kind(column) or "", cell.class_) if part) or None
        value = cell.value if cell.value is not None else ""
        if is_head:
            return tag("th", content, scope="row", class_=classes, data_value=value)
        return tag("td", content, class_=classes, data_value=value)


def _kind(column: Column) -> str | None:
    return "number" if column.is_number else None


def number_cell(key: str, number: float | None) -> Cell:
    """A metric's value; one that is not finite stands out."""
    is_odd = number is not None and not math.isfinite(number)
    return Cell(words.value(key, number), number, class_="bad" if is_odd else "")


def swatch(index: int) -> Html:
    """The colour that run number `index` is drawn in."""
    return tag("span", class_=f"swatch c{index % 12}", aria_hidden="true")


def status_cell(run: Run) -> Cell:
    """How it ended; in words, with a mark."""
    kind = "good" if run.status in words.GOOD else "bad" if run.status in ("failed", "user_error") else "odd"
    text = words.STATUS.get(run.status, run.status)
    return Cell(text, text, tag("span", text, class_=f"pill {kind}"))


def final(runs: Sequence[Run]) -> Table:
    """One row a run: what tells it from the others, how it ended, its last metrics."""
    keys = differing(runs) if len(runs) > 1 else []
    metrics = [key for key in SHOWN if any(key in run.metrics for run in runs)]
    if "perf/tokens_per_second" in metrics and "perf/samples_per_second" in metrics:
        metrics.remove("perf/samples_per_second")
    own = sorted({key for run in runs for key in run.metrics if key.startswith("val/")} - set(SHOWN) - OF_THE_LOSS)[:3]
    metrics[1:1] = own
    columns = [Column("run", "run", False), *[Column(key, key.rpartition(".")[2], False) for key in keys]]
    columns += [Column("status", "status", False), Column("step", "steps")]
    columns += [Column(key, words.name(key.removesuffix("_max"))) for key in metrics]
    sent = [is_measured for axes, is_measured in (run.communication() for run in runs) if axes]
    if sent:
        columns.append(Column(SENT, "sent by a rank, a step" + ("" if any(sent) else " (planned)")))
    rows = []
    for index, run in enumerate(runs):
        name = Cell(run.short, run.short, Html(f"{swatch(index)}{tag('span', run.short if len(runs) > 1 else run.label)}"))
        row = [name, *[_config_cell(run, key) for key in keys], status_cell(run), Cell(f"{run.step:,}", run.step)]
        row += [number_cell(key.removesuffix("_max"), run.metrics.get(key)) for key in metrics]
        if columns[-1].key == SENT:
            axes, is_measured = run.communication()
            total = sum(number for kinds in axes.values() for number in kinds.values()) if axes else None
            mark = "" if is_measured or total is None or not any(sent) else " planned"
            row.append(Cell(words.value("bytes", total) + mark, total))
        rows.append(row)
    return Table(columns, rows)


def _config_cell(run: Run, key: str) -> Cell:
    value, number = value_of(run, key), math.nan
    with suppress(ValueError):
        number = float(value)
    return Cell(value, value if math.isnan(number) else number)


def planned(run: Run) -> Table | None:
    """Predictions beside measurements of one run, metric by metric; None without predictions."""
    if not run.predicted:
        return None
    columns = [Column("metric", "metric", False), Column("planned", "planned"), Column("measured", "measured"), Column("off", "off by")]
    rows = []
    for key, expected in run.predicted.items():
        found = measured(run, key)
        rows.append([Cell(words.name(key), key), number_cell(key, expected), number_cell(key, found), _off(run, key, found, expected)])
    return Table(columns, rows)


def planned_beside(runs: Sequence[Run]) -> Table | None:
    """The same for several runs, one row a run: measured, planned and by how much they differ; bytes of all axes together."""
    keys = list(dict.fromkeys(key for run in runs for key in run.predicted if not is_sent(key)))
    all_sent = any(is_sent(key) for run in runs for key in run.predicted)
    if not keys and not all_sent:
        return None
    columns = [Column("run", "run", False), *[Column(key, words.name(key)) for key in keys]]
    columns += [Column(SENT, "sent by a rank, a step")] if all_sent else []
    rows = []
    for index, run in enumerate(runs):
        row = [Cell(run.tiny, run.label, Html(f"{swatch(index)}{tag('span', run.tiny)}"))]
        for column in columns[1:]:
            sent = [key for key in run.predicted if is_sent(key)]
            if column.key == SENT:
                found_by_axis = [measured(run, key) for key in sent]
                known = [number for number in found_by_axis if number is not None]
                expected = sum(run.predicted[key] for key in sent) if sent else None
                found = sum(known) if known and len(known) == len(sent) else None
            else:
                expected, found = run.predicted.get(column.key), measured(run, column.key)
            row.append(_beside(run, column.key, found, expected))
        rows.append(row)
    return Table(columns, rows)


def _beside(run: Run, key: str, found: float | None, expected: float | None) -> Cell:
    """Measured above planned, with their difference."""
    if expected is None:
        return Cell("–", None)
    off = _off(run, key, found, expected)
    lines = [tag("span", words.value(key, found)) if found is not None else None]
    lines.append(tag("small", f"planned {words.value(key, expected)}, ", tag("span", off.text, class_=off.class_ or None)))
    return Cell(off.text, off.value, tag("span", lines, class_="beside"))


def _off(run: Run, key: str, found: float | None, expected: float) -> Cell:
    """How far the measurement is off; a process's whole size is not what was planned, and isn't compared."""
    if found is None:
        return Cell("not measured", None)
    if key == "memory/peak_bytes" and str(run.config.get("launch.device")) == "cpu":
        return Cell("not comparable", None)
    return Cell(words.deviation(found, expected), found / expected - 1 if expected else None, class_=_how_far(found, expected))


def measured(run: Run, key: str) -> float | None:
    """What was measured of a prediction."""
    return run.measured.get(key, run.metrics.get(MEASURED_AS.get(key, key)))


def _how_far(found: float | None, expected: float) -> str:
    """Near is within a tenth, far beyond half."""
    if found is None or not expected:
        return ""
    off = abs(found / expected - 1)
    return "near" if off <= 0.1 else "far" if off > 0.5 else ""


def config_table(runs: Sequence[Run]) -> Table | None:
    """Keys in which runs differ, each value with the runs that have it; None where there are none."""
    found = differences(runs)
    if not found:
        return None
    place = {id(run): index for index, run in enumerate(runs)}
    rows = []
    for key, by_value in found.items():
        groups = [
            tag("li", tag("code", value), tag("span", [tag("span", swatch(place[id(run)]), run.short, class_="who") for run in some]))
            for value, some in by_value.items()
        ]
        text = "; ".join(f"{value}: {' '.join(run.short for run in some)}" for value, some in by_value.items())
        rows.append([Cell(key, key, tag("code", key)), Cell(text, text, tag("ul", groups, class_="values"))])
    return Table([Column("key", "key", False), Column("values", "value, and runs that have it", False)], rows)


def environment_table(runs: Sequence[Run]) -> Table | None:
    """What the runs ran on, where it is known: a row a fact, each value with its runs if they differ."""
    facts: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for key, value in flat(run.environment):
            if key.endswith("diff"):
                key, value = "git.uncommitted changes", "yes" if value else "no"
            if value not in (None, "", [], {}) and not key.startswith("env."):
                facts.setdefault(key, {}).setdefault(str(value), []).append(run.short)
    rows = []
    for key, by_value in facts.items():
        alone = len(by_value) == 1
        text = next(iter(by_value)) if alone else "; ".join(f"{value} ({', '.join(some)})" for value, some in by_value.items())
        rows.append([Cell(key, key), Cell(text, text)])
    return Table([Column("fact", "fact", False), Column("value", "value", False)], rows) if rows else None
