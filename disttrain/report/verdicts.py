"""What holds each run back, where a window of it was timed (`callbacks=[default,breakdown]`): `doctor`'s verdict on the record."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.config import typed
from disttrain.config.schema import Config
from disttrain.config.trust import check_stored
from disttrain.doctor.advice import Remedy, advise
from disttrain.doctor.budget import Budget, budget
from disttrain.doctor.diagnose import Verdict, diagnose
from disttrain.doctor.table import WORDS
from disttrain.errors import UserError
from disttrain.record import RunFolder
from disttrain.report import tables, words
from disttrain.report.html import Html, tag
from disttrain.report.parts import details, section
from disttrain.report.read import Run
from disttrain.report.tables import Cell, Column, Table

MOST_REMEDIES = 3
SMALLEST = 0.0005
"""Share of a step from which on a part is shown."""


def verdicts(runs: Sequence[Run]) -> Html | None:
    """A paragraph a run: the bottleneck, its share, the evidence and what should help; then the parts of a step."""
    blocks = [_one(runs, index, run) for index, run in enumerate(runs) if run.window]
    return section("verdicts", "What holds it back" if len(runs) == 1 else "What holds them back", blocks) if blocks else None


def _one(runs: Sequence[Run], index: int, run: Run) -> Html:
    whole = budget(run.window)
    verdict = diagnose(run.window, whole)
    remedies = _remedies(run, verdict, whole)[:MOST_REMEDIES]
    rank = f", rank {verdict.rank}" if verdict.rank is not None else ""
    share = f", {verdict.share:.0%} of a step" if verdict.share else ""
    title = tag("h3", [tables.swatch(index), f"{run.label}: "] if len(runs) > 1 else None, f"{verdict.bottleneck}{rank}{share}")
    help_ = [
        tag("li", tag("code", " ".join(one.words)), f" {one.why}", " (another training, by design)" if one.is_lossy else None)
        for one in remedies
    ]
    tried = [tag("p", "To try:"), tag("ul", help_)] if help_ else [tag("p", "Nothing in its config would help by itself.")]
    evidence = tag("ul", [tag("li", line) for line in verdict.evidence])
    parts = _parts(run, whole)
    if len(runs) == 1:
        return tag("div", title, evidence, tried, parts, class_="verdict")
    return tag("div", title, details("evidence, what to try, parts of a step", evidence, tried, parts), class_="verdict")


def _remedies(run: Run, verdict: Verdict, whole: Budget) -> list[Remedy]:
    """Overrides that should help; none for a config that this version doesn't read, or whose classes may not be looked at."""
    if not run.config:
        return []
    try:
        values = RunFolder(run.folder).config_values()
        check_stored(values, [], run.folder)
        return advise(verdict, typed.build(Config, values), whole, run.window)
    except UserError:
        return []


def _parts(run: Run, whole: Budget) -> Html:
    """Where a step's time goes."""
    columns = [Column("part", "part of a step", False), Column("seconds", "time"), Column("share", "share", False)]
    rows = []
    for name, what in WORDS.items():
        share = whole.share(name)
        if share >= SMALLEST:
            bar = tag("span", class_="bar", style=f"--share:{min(1.0, share):.4f}", aria_hidden="true")
            shown = Html(f"{tag('span', f'{share:.1%}', class_='share')}{bar}")
            rows.append([Cell(what, name), tables.number_cell("seconds", whole.parts[name]), Cell(f"{share:.1%}", share, shown)])
    of = f"{run.window['steps']} steps of {words.seconds(whole.step)}"
    return Table(columns, rows).html(f"where the time of {of} went, {run.label}")
