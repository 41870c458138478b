"""The sections of a page, top to bottom. Each returns None where the runs have nothing to show in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from disttrain.config.typed import show
from disttrain.report import costs, ranks, tables, verdicts, words
from disttrain.report.html import Html, join, tag
from disttrain.report.parts import chart, details, section
from disttrain.report.read import Run, finite
from disttrain.report.tables import Cell, Column, Table

Section = Callable[[Sequence[Run]], Html | None]

LOSSES = ("val/loss", "train/loss")


# --- at the top ------------------------------------------------------------------------------------------------------


def headline(runs: Sequence[Run]) -> Html:
    """How many runs, how they ended, and the numbers that one looks for first."""
    return join([_how_they_ended(runs), tag("dl", [_card(*card) for card in _cards(runs)], class_="cards")])


def _how_they_ended(runs: Sequence[Run]) -> Html:
    counts = Counter(words.STATUS.get(run.status, run.status) for run in runs)
    if len(runs) == 1:
        (run,) = runs
        parts = [f"{words.STATUS.get(run.status, run.status)} after {words.count(run.step, 'step')}"]
        parts += [f"took {took}" for took in [words.took(run.result.get("started", ""), run.result.get("ended", ""))] if took]
    else:
        parts = [words.count(len(runs), "run"), *[f"{number} {status}" for status, number in counts.items()]]
    started = min((str(run.result["started"]) for run in runs if run.result.get("started")), default="")
    if started:
        parts.append(f"begun {words.moment(started)}")
    return tag("p", " · ".join(parts), class_="lead")


def _cards(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(what, value, of which run)."""
    found = []
    loss = next((key for key in LOSSES if any(finite(run, key) for run in runs)), None)
    best = [(loss, min)] if loss is not None else []
    rates = [key for key in ("perf/tokens_per_second", "perf/samples_per_second") if any(finite(run, key) for run in runs)]
    wanted = [*best, *[(key, max) for key in rates[:1]], ("perf/step_seconds", min), ("memory/peak_bytes_max", min), ("perf/mfu", max)]
    for key, choose in wanted:
        having = [run for run in runs if finite(run, key)]
        if not having:
            continue
        run = choose(having, key=lambda one, key=key: one.metrics[key])  # type: ignore[misc]
        name = words.name(key.removesuffix("_max"))
        if len(runs) > 1:
            name = f"{'lowest' if choose is min else 'highest'} {name}"
        found.append((name, words.value(key.removesuffix("_max"), run.metrics[key]), run.label if len(runs) > 1 else ""))
    return found


def _card(what: str, number: str, whose: str) -> Html:
    return tag("div", tag("dt", what), tag("dd", number, tag("small", whose) if whose else None))


def failures(runs: Sequence[Run]) -> Html | None:
    """Runs that did not end well, each with its reason and the end of its log."""
    bad = [run for run in runs if run.status not in words.GOOD]
    if not bad:
        return None
    blocks = []
    for run in bad:
        restarts = int(run.result.get("num_restarts") or 0)
        facts = [words.STATUS.get(run.status, run.status)]
        facts += [f"exit code {run.result['exit_code']}"] if run.result.get("exit_code") is not None else []
        facts += [f"after {words.count(run.step, 'step')}"] if run.step else []
        facts += [words.count(restarts, "restart")] if restarts else []
        kinds = [f"rank {one['rank']}: {one['kind']}" for one in run.result.get("failures") or [] if one.get("rank") is not None]
        facts += kinds[-1:]
        log = details("end of its log", tag("pre", run.log, tabindex=0)) if run.log and run.log.strip() != run.reason.strip() else None
        blocks.append(
            tag(
                "article",
                tag("h3", run.label, " ", tables.status_cell(run).markup),
                tag("p", " · ".join(facts[1:]), class_="facts") if facts[1:] else None,
                tag("pre", run.reason or "no reason was recorded", tabindex=0, class_="reason"),
                log,
                class_="failure",
            )
        )
    return section("failures", "Failures" if len(runs) > 1 else "How it ended", blocks)


# --- curves and the final table -----------------------------------------------------------------------------------------


def curves(runs: Sequence[Run]) -> Html | None:
    """Curves over each other, with what chooses metric, axis, smoothing and runs."""
    if not any(run.rows for run in runs):
        return None
    axes = tag(
        "fieldset",
        tag("legend", "over"),
        [
            tag("label", tag("input", type="radio", name="axis", value=name, checked=name == "step"), tag("span", title))
            for name, title in (("step", "steps"), ("tokens", _seen_word(runs)), ("seconds", "time"))
        ],
        class_="segments",
    )
    controls = tag(
        "div",
        tag("label", tag("span", "show"), tag("select", id="metric"), class_="field"),
        axes,
        tag("label", tag("span", "minus"), tag("select", id="reference"), class_="field", title="each curve minus that of one run")
        if len(runs) > 1
        else None,
        tag("label", tag("span", "smooth"), tag("input", type="range", id="smooth", min=0, max=0.98, step=0.02, value=0), class_="field"),
        tag("label", tag("input", type="checkbox", id="log"), tag("span", "log scale"), class_="field check"),
        class_="controls",
    )
    striped = tag("p", "Curves that lie on each other are drawn as stripes.", id="striped", class_="note", hidden=True)
    legend = tag(
        "fieldset",
        tag("legend", "runs"),
        tag("div", tag("button", "all", type="button", id="all"), tag("button", "none", type="button", id="none"), class_="choice")
        if len(runs) > 2
        else None,
        [
            tag(
                "label",
                tag("input", type="checkbox", name="run", value=index, checked=bool(run.rows), disabled=not run.rows),
                tables.swatch(index),
                tag("span", run.label),
                class_="run",
            )
            for index, run in enumerate(runs)
        ],
        class_="legend",
        hidden=len(runs) == 1,
    )
    return section("curves", "Curves", controls, chart("curves", "curves of the runs", height=380), striped, legend, _curve_numbers(runs))


def _seen_word(runs: Sequence[Run]) -> str:
    return "tokens" if any("perf/tokens_per_second" in row for run in runs for row in run.rows) else "targets"


def _curve_numbers(runs: Sequence[Run]) -> Html:
    """The loss curves in numbers, for who can't see them."""
    columns = [Column("run", "run", False), Column("metric", "metric", False), Column("first", "first"), Column("lowest", "lowest")]
    columns += [Column("at", "at step"), Column("last", "last")]
    rows = []
    for run in runs:
        for key in ("train/loss", "val/loss"):
            points = [(row["step"], row[key]) for row in run.rows if isinstance(row.get(key), (int, float))]
            finite = [point for point in points if math.isfinite(point[1])]
            if finite:
                step, lowest = min(finite, key=lambda point: point[1])
                row = [Cell(run.label, run.label), Cell(words.name(key), key), tables.number_cell(key, points[0][1])]
                rows.append([*row, tables.number_cell(key, lowest), Cell(f"{step:,}", step), tables.number_cell(key, points[-1][1])])
    return details("losses in numbers", Table(columns, rows).html("first, lowest and last losses"))


def final(runs: Sequence[Run]) -> Html:
    """The final table."""
    table = tables.final(runs).html("Runs by their last metrics", is_sortable=len(runs) > 1)
    return section("final", "Final numbers", table)


# --- what they were -----------------------------------------------------------------------------------------------------


def config(runs: Sequence[Run]) -> Html | None:
    """Config differences of several runs; what was typed, and the whole config, of one."""
    if len(runs) > 1:
        table = tables.config_table(runs)
        return section("config", "Config differences", table.html("config keys in which runs differ")) if table is not None else None
    (run,) = runs
    if not run.config:
        return None
    typed = tag("p", "Typed: ", tag("code", " ".join(run.words)) if run.words else "nothing: the default run")
    text = "\n".join(f"{key}: {show(value)}" for key, value in run.config.items() if not key.startswith("predicted."))
    return section("config", "Config", typed, details("the whole config, resolved", tag("pre", text, tabindex=0)))


def environment(runs: Sequence[Run]) -> Html | None:
    """What they ran on."""
    table = tables.environment_table(runs)
    return (
        section("environment", "Environment", details("versions, machine, source", table.html("environment")))
        if table is not None
        else None
    )


SECTIONS: tuple[Section, ...] = (
    failures,
    curves,
    final,
    verdicts.verdicts,
    costs.throughput,
    costs.communication,
    costs.predicted,
    ranks.step,
    ranks.step_times,
    config,
    environment,
)
"""In the order of the page."""
