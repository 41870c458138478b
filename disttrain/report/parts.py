"""What sections are made of: headings, places to draw into, what is shown when asked for."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.report.html import Child, Html, tag
from disttrain.report.read import Run


def section(name: str, title: str, *children: Child) -> Html:
    """A section with its heading."""
    return tag("section", tag("h2", title), *children, id=name)


def chart(name: str, described: str, *before: Child, height: int = 300) -> Html:
    """A place that the page's script draws `name` into; `described` is what a screen reader says of it."""
    place = tag("div", class_="plot", data_chart=name, role="img", aria_label=described, style=f"min-height:{height}px")
    return tag("figure", *before, place)


def details(title: str, *children: Child) -> Html:
    """What is shown when asked for."""
    return tag("details", tag("summary", title), *children)


def chooser(name: str, runs: Sequence[tuple[int, Run]]) -> Html | None:
    """Which of several runs a section shows; without a script, all of them."""
    if len(runs) == 1:
        return None
    options = [tag("option", run.label, value=index) for index, run in runs]
    return tag("div", tag("label", tag("span", "run"), tag("select", options, id=name, class_="choose"), class_="field"), class_="controls")
