"""Overrides as words: which key each one sets, what a stored run adds, what a person sees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from disttrain.errors import CheckpointError, ConfigError

_KEY = re.compile(r"^(?P<mark>~|\+{0,2})(?P<key>[^=]*)")


def key_of(word: str) -> str:
    """The key that an override sets or deletes, without marks: `+a.b=1`, `a.b=2` and `~a.b` are all `a.b`."""
    found = _KEY.match(word)
    assert found is not None
    return found["key"].strip()


def value_of(words: Iterable[str], key: str) -> str | None:
    """What the last override of `key` sets it to, as typed, without quotes around all of it."""
    value = None
    for word in words:
        if key_of(word) == key and "=" in word and not word.startswith("~"):
            value = word.partition("=")[2]
    if value and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return None if value in ("", "null") else value


def merge(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Stored overrides, then those typed; of several for one key the last stays, at the first one's place.

    A deletion (`~x`) or an addition (`+x`) repeated would fail, so each key occurs once.
    """
    merged: dict[str, str] = {}
    for word in (*stored, *typed):
        merged[key_of(word)] = word
    return list(merged.values())


def open_up(word: str) -> str:
    """A plain or adding override of a dotted key as one that may add: which keys exist is the schema's to say, not Hydra's."""
    mark = _KEY.match(word)
    if mark is None or mark["mark"] in ("~", "++") or "=" not in word:
        return word
    return f"++{word[len(mark['mark']) :]}"


def close(word: str) -> str:
    """An override as a person types it."""
    return word.lstrip("+") if word.startswith("+") else word


def find_run(resume: str, outputs: Path, run_name: str | None) -> Path | None:
    """The run folder that `resume` names: a run, a checkpoint in one, or the newest of `run_name` for 'auto' (None if there is none)."""
    if resume == "auto":
        files = [file for pattern in ("*/*", "*/*/*") for file in outputs.glob(f"{pattern}/overrides*.yaml")]
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        return next((file.parent.absolute() for file in files if _name_of(file.parent) == run_name), None)
    folder = Path(resume).expanduser().absolute()
    if not folder.exists():
        raise ConfigError(f"resume={resume}: there is no such folder", "resume=auto")
    for candidate in (folder, *folder.parents[:2]):
        if (candidate / "overrides.yaml").is_file():
            return candidate
    raise CheckpointError(f"resume={resume} is neither a run folder nor a checkpoint in one (no overrides.yaml there)", "resume=auto")


def _name_of(run: Path) -> str | None:
    import yaml

    try:
        return str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("run_name"))
    except (OSError, yaml.YAMLError, AttributeError):
        return None
