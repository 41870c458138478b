"""The page: sections, the numbers that its script draws, and the script itself, in one file that asks nothing of a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from disttrain.report import curves, sections, words
from disttrain.report.html import Html, tag
from disttrain.report.read import Run, name_of, sweep_of
from disttrain.report.timelines import KINDS, histograms, timeline

DRAWN = ("perf/tokens_per_second", "perf/samples_per_second", "perf/step_seconds", "memory/peak_bytes")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The page may load nothing from anywhere."""
LIBRARIES = ("d3.min.js", "plot.umd.min.js")


def title_of(runs: Sequence[Run]) -> str:
    """What the page is about."""
    if len(runs) == 1:
        return runs[0].label
    names = list(dict.fromkeys(name for run in runs if (name := name_of(run))))
    sweep = sweep_of(runs)
    what = f"sweep {sweep.name}" if sweep else words.count(len(runs), "run")
    if len(names) not in (1, 2) or names == ["run"]:
        return what
    return " and ".join(names) + (f": {what}" if sweep or len(names) < len(runs) else "")


def page(runs: Sequence[Run], beside: Sequence[str] = ()) -> str:
    """The HTML. `beside` are names of files that lie next to it."""
    made = [(name, found) for name, found in ((one.__name__, one(runs)) for one in sections.SECTIONS) if found is not None]
    title = title_of(runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{title} – disttrain report"),
        tag("style", Html(_asset("page.css"))),
    )
    top = tag(
        "header",
        tag("a", "to the numbers", href="#main", class_="skip"),
        tag("p", "disttrain report", class_="brand"),
        tag("button", "theme: auto", type="button", id="theme"),
        tag("h1", title),
        sections.headline(runs),
        tag("nav", [tag("a", _heading(found), href=f"#{_id(found)}") for _, found in made], aria_label="sections"),
    )
    links = [part for name in beside for part in (tag("a", name, href=name), Html(" "))]
    foot = tag(
        "footer",
        tag("p", "Beside this page: ", links) if beside else None,
        tag("p", "Drawn by ", tag("span", "Observable Plot 0.6.17 and D3 7.9.2"), " (ISC licence), which are inside this file."),
    )
    body = tag(
        "body",
        top,
        tag("noscript", tag("p", "Charts need JavaScript; every number of theirs stands in a table below.", class_="note")),
        tag("main", [found for _, found in made], id="main"),
        foot,
        tag("script", Html(_embedded(data(runs))), type="application/json", id="data"),
        [tag("script", Html(_asset(name))) for name in (*LIBRARIES, "page.js")],
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def data(runs: Sequence[Run]) -> dict[str, Any]:
    """What is drawn, as JSON values."""
    metrics = curves.metrics_of(runs)
    most = curves.points_a_curve(runs, metrics)
    found: dict[str, Any] = {"runs": [], "metrics": [[key, words.name(key), words.unit(key)] for key in metrics], "kinds": KINDS}
    for run in runs:
        spans = {key: [_plain(run.metrics.get(f"{key}{end}")) for end in ("", "_min", "_max")] for key in DRAWN if key in run.metrics}
        axes, is_measured = run.communication()
        one = {"label": run.label, "tiny": run.tiny, "bars": spans, "comm": axes, "measured": is_measured}
        one |= curves.curves_of(run, metrics, most)
        if (line := timeline(run)) is not None:
            bars = [[bar.rank, bar.kind, bar.stage, bar.micro, _micro(bar.start), _micro(bar.end)] for bar in line.bars]
            one["timeline"] = {"ranks": [[rank, place] for rank, place in line.names.items()], "bars": bars}
        if times := histograms(run):
            one["steps"] = [
                [one_.rank, [[*map(_micro, one_.edges(bin_)), number] for bin_, number in one_.counts.items()]] for one_ in times
            ]
        found["runs"].append(one)
    return found


def _plain(number: float | None) -> float | None:
    return number if number is not None and number == number and abs(number) != float("inf") else None


def _micro(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _embedded(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("disttrain.report") / "assets" / name).read_text(encoding="utf-8").strip()


def _heading(found: Html) -> str:
    return found.partition("<h2>")[2].partition("</h2>")[0]


def _id(found: Html) -> str:
    return found.partition('id="')[2].partition('"')[0]
