"""The keys of the schema as `--help` prints them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from disttrain.config.schema import Config
from disttrain.config.typed import show

READS = {
    "generate": "goes on from a text with the newest good checkpoint of a run",
    "evaluate": "measures the newest good checkpoint of a run on its validation split, or on other data by dataset.<key>=<value>",
    "report": "writes runs, sweeps or both as one page",
}
"""Verbs that read runs: what each does."""


def usage(verb: str) -> str:
    """How a verb that reads runs is called, and its keys."""
    call = f"python -m disttrain {verb} RUN{' ...' if verb == 'report' else ''} [<key>=<value> ...]"
    where = "RUN: outputs/<date>/<time>-<id>, " + ("or the folder of a sweep" if verb == "report" else "or a checkpoint in it")
    section = next((field.default_factory for field in dataclasses.fields(Config) if field.name == verb), None)
    found = _lines(section, f"{verb}.") if section is not None else ()
    return "\n".join([call, "", READS[verb], where, *(f"  {line}" for line in found)])


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
