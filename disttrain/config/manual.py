"""The keys of the schema as `--help` prints them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from disttrain.config.schema import Config
from disttrain.config.typed import show


def keys() -> str:
    """One line a key: its default, meaning and unit."""
    return "\n".join(f"  {line}" for line in _lines(Config, ""))


def _lines(kind: Any, where: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        place = f"{where}{field.name}"
        if dataclasses.is_dataclass(default):
            yield from _lines(type(default), f"{place}.")
        elif "help" in field.metadata:
            unit = f" [{field.metadata['unit']}]" if field.metadata["unit"] else ""
            meaning = textwrap.shorten(field.metadata["help"] + unit, 110)
            yield f"{place}={show(default)}".ljust(42) + f" {meaning}"
