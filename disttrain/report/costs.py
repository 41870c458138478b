"""Sections on what runs cost: throughput and memory, communication, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.report import tables, words
from disttrain.report.html import Html, tag
from disttrain.report.parts import chart, details, section
from disttrain.report.read import Run, finite
from disttrain.report.tables import Cell, Column, Table


def throughput(runs: Sequence[Run]) -> Html | None:
    """Rates, step times and memory, a bar a run."""
    keys = ["perf/tokens_per_second", "perf/samples_per_second", "perf/step_seconds", "memory/peak_bytes"]
    if any("perf/tokens_per_second" in run.metrics for run in runs):
        keys.remove("perf/samples_per_second")
    keys = [key for key in keys if any(finite(run, key) for run in runs)]
    if not keys:
        return None
    if len(runs) == 1:
        return section("throughput", "Throughput and memory", _spread(runs[0], keys))
    figures = [chart(f"bars:{key}", f"{words.name(key)} by run", tag("figcaption", words.name(key)), height=80) for key in keys]
    note = tag("p", "Bars are the last log point's means over ranks; a line through the end of one spans its ranks.", class_="note")
    return section("throughput", "Throughput and memory", tag("div", figures, class_="small-charts"), note)


def _spread(run: Run, keys: Sequence[str]) -> Html:
    """Mean, smallest and largest over ranks of one run."""
    columns = [Column("metric", "metric", False), *[Column(name, name) for name in ("mean of ranks", "smallest", "largest")]]
    keys = [*keys, "perf/data_wait_seconds", "system/cpu_utilisation", "system/device_utilisation"]
    keys = [key for key in keys if f"{key}_min" in run.metrics]
    rows = [
        [Cell(words.name(key), key), *[tables.number_cell(key, run.metrics.get(f"{key}{end}")) for end in ("", "_min", "_max")]]
        for key in keys
    ]
    return Table(columns, rows).html("the last log point, over ranks")


def communication(runs: Sequence[Run]) -> Html | None:
    """Bytes of a step by axis."""
    found = [(run, *run.communication()) for run in runs]
    found = [one for one in found if one[1]]
    if not found:
        return None
    columns = [Column("run", "run", False), Column("axis", "axis", False), Column("collective", "collective", False)]
    columns += [Column("bytes", "bytes a step"), Column("source", "as", False)]
    rows = [
        [
            Cell(run.label, run.label),
            Cell(axis, axis),
            Cell(kind.replace("_", "-"), kind),
            number_cell_bytes(number),
            Cell("measured" if is_measured else "planned", is_measured),
        ]
        for run, axes, is_measured in found
        for axis, kinds in axes.items()
        for kind, number in kinds.items()
    ]
    known = {is_measured for _, _, is_measured in found}
    source = "as counted" if known == {True} else "as planned; the record counts none" if known == {False} else "as counted, or as planned"
    caption = tag("figcaption", f"bytes that a rank sends in a step, by axis of the mesh, {source}")
    timed = _timed(runs)
    table = details("in numbers", _without_run(Table(columns, rows), runs).html("bytes a step by axis and collective"))
    return section("communication", "Communication by axis", chart("comm", "bytes a step by axis", caption, height=80), timed, table)


def _timed(runs: Sequence[Run]) -> Html | None:
    """Where a window was timed (`callbacks=[default,breakdown]`): how long an axis talked, and how much of it no work hid."""
    columns = [Column("run", "run", False), Column("axis", "axis", False), Column("seconds", "under way, a step")]
    columns += [
        Column("exposed", "not hidden by work"),
        Column("late", "waiting for late ranks"),
        Column("rate", "rate, a second"),
    ]
    rows = []
    for run in runs:
        for axis in sorted({key.split("/")[1] for key in run.metrics if key.startswith("comm/") and key.endswith("/seconds")}):
            found = [run.metrics.get(f"comm/{axis}/{name}") for name in ("seconds", "exposed_seconds", "late_seconds", "bytes_per_second")]
            units = ("seconds", "seconds", "seconds", "bytes")
            cells = [tables.number_cell(unit, number) for unit, number in zip(units, found, strict=True)]
            rows.append([Cell(run.tiny, run.label), Cell(axis, axis), *cells])
    return _without_run(Table(columns, rows), runs).html("time of communication by axis, in a timed window") if rows else None


def _without_run(table: Table, runs: Sequence[Run]) -> Table:
    """Of a page on one run nobody needs its name in every row."""
    return table if len(runs) > 1 else Table(table.columns[1:], [row[1:] for row in table.rows])


def number_cell_bytes(number: float) -> Cell:
    """Bytes."""
    return Cell(words.num_bytes(number), number)


def predicted(runs: Sequence[Run]) -> Html | None:
    """Plan and measurement next to each other."""
    table = tables.planned(runs[0]) if len(runs) == 1 else tables.planned_beside(runs)
    if table is None:
        return None
    on_cpu = any(str(run.config.get("launch.device", "")) == "cpu" for run in runs)
    text = (
        "On the CPU memory is the process's whole size, Python and torch included, while the plan counts tensors: these are not compared."
    )
    note = tag("p", text, class_="note") if on_cpu else None
    return section("predicted", "Plan and measurement", table.html("what plan predicted, and what was measured"), note)
