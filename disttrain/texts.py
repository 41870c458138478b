"""Small files of text and strict JSON, written whole or not at all.

A number that is not finite, which JSON cannot say, is written as "nan", "inf" or "-inf" and read back as that number.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from disttrain.errors import ConfigError

T = TypeVar("T")

_POWER_OF_TEN = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""A number to everybody but YAML, which wants 1.0e-1 for 1e-1."""


def write_text(path: Path, text: str, lasting: bool = False) -> None:
    """Write the whole file or nothing: a reader never sees a part. One that is `lasting` is whole after a power cut too."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """As strict JSON."""
    write_text(path, strict_json(value))


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None where there is none. ConfigError for a file that is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The JSON object of a file, numbers as `strict` found them; empty where there is none. ConfigError for anything else."""
    value = read_json(path)
    if value is not None and not isinstance(value, dict):
        raise _damaged(path, "it holds no JSON object")
    return dict(numbers(value or {}))


def row_of(line: str) -> dict[str, Any] | None:
    """The row of a log point that a line holds; None for a line that is none, as a machine that goes down may leave behind."""
    try:
        row = numbers(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def read_yaml(path: Path, kind: type[T]) -> T:
    """The value of a YAML file, which is a `kind`. ConfigError for a file that is damaged or holds something else."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no YAML: {' '.join(str(error).split())}", is_needed=True) from error
    if not isinstance(value, kind):
        raise _damaged(path, f"it holds no {'mapping' if kind is dict else 'list'}", is_needed=True)
    return value


def typed_value(text: str) -> Any:
    """What was typed after a key's equals sign: a YAML value, or the text itself where it is none."""
    if _POWER_OF_TEN.fullmatch(text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _damaged(path: Path, why: str, is_needed: bool = False) -> ConfigError:
    """What is told of a file in a record; a run is read without those that it does not need."""
    aside = f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}"
    return ConfigError(f"{path} can't be read: {why}", f"a copy of {path.name} in its place" if is_needed else aside)


def strict_json(value: Any) -> str:
    """`value` as strict JSON."""
    return json.dumps(strict(value), indent=2, allow_nan=False) + "\n"


def strict(value: Any) -> Any:
    """`value` with numbers that JSON cannot say as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return value


def numbers(value: Any) -> Any:
    """The inverse of `strict`."""
    if isinstance(value, dict):
        return {key: numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) of nested mappings; lists are leaves."""
    if not isinstance(tree, dict) or (not tree and prefix):
        yield prefix, tree
        return
    for key, inner in tree.items():
        yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
