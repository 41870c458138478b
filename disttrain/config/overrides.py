"""Overrides as words: which key each one sets, what a stored run adds, what a person sees."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.errors import CheckpointError, ConfigError, UserError
from disttrain.places import expanded, is_remote, shown
from disttrain.texts import read_yaml

_KEY = re.compile(r"^(?P<mark>~|\+{0,2})(?P<key>[^=]*)")
_STEP = re.compile(r"step-\d+")

CHOSEN_WHOLE = ("strategy", "model", "dataset", "optimizer", "scheduler")
"""Groups whose keys belong to the choice; callbacks' belong to the callback."""


def key_of(word: str) -> str:
    """The key that an override sets or deletes, without marks: `+a.b=1`, `a.b=2` and `~a.b` are all `a.b`."""
    found = _KEY.match(word)
    assert found is not None
    return found["key"].strip()


def value_of(words: Iterable[str], key: str) -> str | None:
    """What the last override of `key` sets it to, as Hydra reads it: without quotes and escapes. What is no text is as typed."""
    word = next((word for word in reversed(list(words)) if key_of(word) == key and "=" in word and not word.startswith("~")), None)
    if word is None:
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    typed = word.partition("=")[2]
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:  # composing it says what is wrong
        return typed
    return None if value in (None, "") else value if isinstance(value, str) else typed


@dataclass(frozen=True)
class Choices:
    """What overrides choose: an option by group, and the callbacks that are in."""

    groups: Mapping[str, Any]
    callbacks: frozenset[str]


def fitting(stored: Sequence[str], typed: Sequence[str], before: Choices | None, after: Choices | None) -> tuple[list[str], list[str]]:
    """Stored overrides to keep and to leave out, where the stored ones chose `before` and both together choose `after`.

    With another choice of a group the old one's keys go; with a choice of callbacks the keys of those that are not in it, and
    deletions. A deletion goes before anything typed below it. `before` is None if it can no longer be told.
    """
    keys = [key_of(word) for word in typed]
    named = {key.split(".")[1] for key in keys if key.startswith("callbacks.")}

    def is_out(word: str) -> bool:
        key = key_of(word)
        group, _, rest = key.partition(".")
        if word.startswith("~") and any(one.startswith(f"{key}.") for one in keys):
            return True
        if after is None or not rest:
            return False
        if group == "callbacks":
            is_new = before is None or before.callbacks != after.callbacks
            return ("callbacks" in keys and word.startswith("~")) or (is_new and rest.split(".")[0] not in after.callbacks | named)
        return group in CHOSEN_WHOLE and (group in keys if before is None else before.groups.get(group) != after.groups.get(group))

    left_out = [word for word in stored if is_out(word)]
    return [word for word in stored if word not in left_out], left_out


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


def for_shell(key: str, value: str) -> str:
    """An override as one types it into a shell, in Hydra's quotes and the shell's where the value needs them."""
    if re.fullmatch(r"[\w./~-]+", value, re.ASCII):
        return f"{key}={value}"
    is_hard = bool(set(value) & set("'\"$`\\!"))
    quote = '"' if is_hard else "'"
    inside = re.sub(rf"(\\*)({quote}|$)", lambda found: found[1] * 2 + found[2].replace(quote, f"\\{quote}"), value)
    word = f"{key}={quote}{inside}{quote}"
    return shlex.quote(word) if is_hard else f'"{word}"'


def find_run(resume: str, outputs: Path, run_name: str | None) -> Path | None:
    """The run folder that `resume` names: a run, a checkpoint in one, or, for 'auto', the run of `run_name` with the newest checkpoint.

    None where 'auto' finds none.
    """
    if resume == "auto":
        saved = sorted(((when, run) for run in runs_in(outputs) if (when := saved_at(run)) is not None), reverse=True)
        return next((run.absolute() for _, run in saved if _name_of(run) == run_name), None)
    if is_remote(resume):
        raise ConfigError(f"resume={resume} is a place in a store; the run goes on in its folder", "resume=<run folder>")
    folder = expanded(resume).absolute()
    if not folder.exists():
        raise _no_run(ConfigError, f"resume={resume}: there is no such folder", outputs)
    if _is_run(folder):
        return folder
    named = _checkpoint(resume)
    run = next((one for one in (folder if named is None else named).parents if _is_run(one)), None)
    if named is not None and run in named.parents[:2]:
        return run
    if run is not None and folder == run / "checkpoints":
        return run
    if run is not None:
        raise ConfigError(f"resume={resume} lies in the run {shown(run)} and is no checkpoint", for_shell("resume", shown(run)))
    if named is not None:
        found = f"resume={resume} is a checkpoint of a run that is somewhere else: resume= wants that run's folder"
        raise _no_run(CheckpointError, found, outputs)
    found = f"resume={resume} is neither a run folder nor a checkpoint in one (no overrides.yaml there)"
    raise _no_run(CheckpointError, found, folder, outputs)


def named_in(resume: str | None, run: Path | None) -> str | None:
    """What a `resume=` means that was found in `run`: a checkpoint of it, or the run itself. Where 'auto' found none, nothing."""
    if run is None or resume is None:
        return None if resume == "auto" else resume
    named = _checkpoint(resume) if resume != "auto" else None
    return str(run if named is None else named)


def _is_run(folder: Path) -> bool:
    return (folder / "overrides.yaml").is_file()


def _checkpoint(place: str) -> Path | None:
    """The checkpoint at `place`, which may be a link to it; None if it is none by its name."""
    folder = expanded(place).absolute()
    return next((one for one in (folder, folder.resolve()) if _STEP.fullmatch(one.name) and one.is_dir()), None)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`, a sweep's among them, the one that was started last first."""
    files = [file for pattern in ("*", "*/*", "*/*/*") for file in folder.glob(f"{pattern}/overrides.yaml")]
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]


def _no_run(kind: type[UserError], found: str, *places: Path) -> UserError:
    """The error for a run that is not there, with those that are in the first of `places` that has some."""
    runs = next(filter(None, map(runs_in, places)), [])
    if not runs:
        return kind(f"{found}, and {places[-1]} holds no run", "leave out resume= to begin a new run")
    newest = [shown(run) for run in runs[:3]]
    return kind(f"{found}; the newest runs: {', '.join(newest)}", for_shell("resume", newest[0]))


def find_weights(init_from: str) -> None:
    """ConfigError unless there is a checkpoint where `init_from` says, by its looks."""
    if is_remote(init_from):
        return
    folder = expanded(init_from)
    is_kept_elsewhere = (folder / "checkpoints.url").is_file()
    if _checkpoint(init_from) is None and not is_kept_elsewhere and not any(folder.glob("checkpoints/step-*")):
        what = "holds no checkpoint" if folder.is_dir() else "is no folder"
        raise ConfigError(f"init_from={init_from} {what}", "init_from=outputs/<date>/<time>-<id>, or init_from=null")


def saved_at(run: Path) -> float | None:
    """When the newest checkpoint of a run was finished, by its looks; None without any. A store is not asked: its run's last row is."""
    if (run / "checkpoints.url").is_file():
        return max(file.stat().st_mtime for file in (run / "checkpoints.url", *run.glob("metrics.jsonl")))
    return max((file.stat().st_mtime for file in run.glob("checkpoints/step-*/manifest.json")), default=None)


def _name_of(run: Path) -> str | None:
    try:
        return str(read_yaml(run / "config.yaml", dict).get("run_name"))
    except (OSError, UserError):
        return None
