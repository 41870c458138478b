"""COVERAGE.md names tests that exist: read by AST, nothing is collected."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.quality.source import ROOT, Source

TABLE = (ROOT / "tests/COVERAGE.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", TABLE, re.MULTILINE)
NAMED = {row: re.findall(r"`([\w/]+\.py)::(\w+)`", tests) for row, _, tests in ROWS if row not in ("row", "---")}


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the functions at the top of a file."""
    return frozenset(node.name for node in Source(path).tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", NAMED)
def test_the_tests_of_a_row_exist(row: str) -> None:
    assert NAMED[row], "a row names at least one test"
    missing = [f"{path}::{name}" for path, name in NAMED[row] if not (ROOT / path).is_file() or name not in functions_of(path)]
    assert not missing
    assert all(name.startswith("test_") for _, name in NAMED[row])


def test_no_row_is_named_twice_and_none_is_missed() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| row")]
    assert len(lines) == len(NAMED)
    assert {f"M{number}" for number in range(1, 33)} <= set(NAMED)
