"""Elements of a page as text. What is not an element is escaped, so nothing that a run has printed can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = {"input", "meta", "br"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """One element. `class_` is class, `data_x` is data-x; True is an attribute without a value, None and False leave it out."""
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{html.escape(str(value), quote=True)}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Children one behind the other; texts are escaped."""
    found = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            found.append(child if isinstance(child, Html) else html.escape(child, quote=False))
        else:
            found.append(join(child))
    return Html("".join(found))
