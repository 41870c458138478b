"""A run that goes on is the same run: bit for bit in its own layout, from any step; to rounding in any other.

`experiments/reshard` tries every pair of layouts; here is its short form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from experiments.reshard import matrix


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> matrix.Runs:
    """What several of these tests go on from is run once."""
    return matrix.Runs(tmp_path_factory.mktemp("runs"), matrix.LAYOUTS, every=2)


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["ddp 2", "ddp 3", "ddp 4", "fsdp 3"])
def test_bit_for_bit_in_its_own_layout(name: str, runs: matrix.Runs) -> None:
    """E01, E02, E14: in the middle of the warm-up, at the end of an epoch, in the second; samples, losses and last checkpoint."""
    from_steps(name, [2, 6, 8], runs)


@pytest.mark.long
@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["ddp 2", "ddp 3", "ddp 4", "fsdp 3", "fsdp 2 x tp 2"])
def test_from_any_step(name: str, tmp_path: Path) -> None:
    from_steps(name, range(1, matrix.LAST), matrix.Runs(tmp_path, matrix.LAYOUTS, every=1))


def from_steps(name: str, steps: Iterable[int], runs: matrix.Runs) -> None:
    starts = {f"step-{step}": runs.unbroken(name) / f"checkpoints/step-{step}" for step in steps}
    for start, order in runs.go_on(name, starts).items():
        apart, wrong = runs.judge(name, start, starts[start], order, name)
        assert (apart, wrong, runs.exact(name, start)) == (0.0, [], []), start


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("single", ["ddp 4", "fsdp 3"]),
        ("fsdp 4, zero 2", ["tp 2"]),
        ("ddp 2 x tp 2", ["fsdp 2 x tp 2", "single"]),
        ("ddp 3", ["hsdp 2 x 2"]),
    ],
)
def test_in_any_other_layout_to_rounding(name: str, others: list[str], runs: matrix.Runs) -> None:
    """E05, E13: more ranks, fewer, cut otherwise; every weight, moment and average exact, every sample in its order."""
    starts = {other: runs.unbroken(other) / f"checkpoints/step-{matrix.SAVED}" for other in others}
    for start, order in runs.go_on(name, starts).items():
        _, wrong = runs.judge(name, start, starts[start], order, "single")
        assert wrong == [], start
