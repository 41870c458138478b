"""How long ranks wait: the clock against orders worked out by hand, and the real orders of every schedule against its paper."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.pipelining  # noqa: F401  (seconds; imported once, before ranks are forked)

from disttrain.parallel.clock import Action, step_time, waited

ONE = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def test_two_ranks_and_two_micro_batches_by_hand() -> None:
    """Rank 1 forwards from 1 to 3 and goes backward till 7; rank 0 gets the first gradient at 5, the second at 7, and ends at 9."""
    first: list[Action] = [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]
    second: list[Action] = [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)]
    assert step_time([first, second], ONE) == 9
    assert waited([first, second], ONE) == pytest.approx(1 - 12 / 18)


def test_weights_backward_fills_a_wait() -> None:
    """Rank 1 hands gradients on at 3 and 4 and ends at 6; rank 0 waits from 2 to 3 and ends at 7."""
    first: list[Action] = [("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("W", 0, 0), ("I", 0, 1), ("W", 0, 1)]
    second: list[Action] = [("F", 1, 0), ("I", 1, 0), ("F", 1, 1), ("I", 1, 1), ("W", 1, 0), ("W", 1, 1)]
    assert step_time([first, second], ONE) == 7


def test_orders_that_wait_for_each_other_are_told() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        step_time([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], ONE)


def experiment() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments" / "pipeline_bubble" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure_bubble", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def textbook(schedule: str, m: int) -> float:
    """Four ranks: GPipe and 1F1B wait 3 of m + 3, two stages a rank halve that, and splitting the backward takes two thirds of it."""
    if schedule in ("gpipe", "1f1b"):
        return 3 / (m + 3)
    return 3 / (2 * m + 3) if schedule == "interleaved_1f1b" else 3 / (6 * m + 3)


def test_real_orders_wait_as_the_papers_say() -> None:
    found = experiment().shares((8,))
    assert len(found) == 6
    for (schedule, m), share in found.items():
        assert share == pytest.approx(textbook(schedule, m), abs=1e-12), schedule


@pytest.mark.long
def test_real_orders_of_more_micro_batches_wait_as_the_papers_say() -> None:
    found = experiment().shares((4, 8, 16))
    assert found.pop(("zbv", 4)) == pytest.approx(0.2)  # it is made for seven and more
    assert len(found) == 6 * 3 - 2
    for (schedule, m), share in found.items():
        assert share == pytest.approx(textbook(schedule, m), abs=1e-12), (schedule, m)
        assert "zero_bubble" not in schedule or share < found["1f1b", m]
