"""`generate RUN ...`, `evaluate RUN ...` and `doctor RUN`: which folder is meant, and who reads it."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from disttrain.config.overrides import runs_in
from disttrain.errors import ConfigError
from disttrain.places import expanded

READERS = {
    "generate": "disttrain.reading.generate",
    "evaluate": "disttrain.reading.evaluate",
    "doctor": "disttrain.doctor.record",
}


def names_folder(words: Sequence[str]) -> bool:
    """Whether the first word is a path, and no override or flag."""
    return bool(words) and "=" not in words[0] and not words[0].startswith(("-", "~", "+"))


def main(verb: str, words: list[str]) -> int:
    """Read the run that the first word names. ConfigError, with the newest run there is, for a folder that there isn't."""
    folder = expanded(words[0]) if names_folder(words) else None
    if folder is None or not folder.is_dir():
        wrong = f"'{verb}' needs the folder of a run" if folder is None else f"there is no folder {folder}"
        newest = next((shlex.quote(str(run)) for run in runs_in(Path("outputs"))), "outputs/<date>/<time>-<id>")
        raise ConfigError(wrong, f"python -m disttrain {verb} {newest}")
    read: Callable[[Path, list[str]], int] = importlib.import_module(READERS[verb]).main
    return read(folder, words[1:])
