"""Small files of text and strict JSON, written whole or not at all.

A number that is not finite, which JSON cannot say, is written as "nan", "inf" or "-inf" and read back as that number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: a reader never sees a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """As strict JSON."""
    write_text(path, strict_json(value))


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


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
