"""`verify` has teeth: every planted fault is noticed, at the right quantity, by name, with a cause that helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.schema import Config
from disttrain.verify import verb
from tests.verify import faults_context, faults_pipeline  # noqa: F401  enter their faults beside the others
from tests.verify.faults import FAULTS, LAYOUTS

Recorded = Callable[[str, Config], str]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_noticed_where_nothing_is_planted(layout: str, recorded: Recorded) -> None:
    proof = verb.compare(LAYOUTS[layout], recorded(layout, LAYOUTS[layout]))
    assert proof.equal, proof.failed
    assert proof.cause == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed_named_and_explained(name: str, recorded: Recorded) -> None:
    fault = FAULTS[name]
    config = LAYOUTS[fault.layout]
    proof = verb.compare(config, recorded(fault.layout, config), around=fault.plant)
    assert not proof.equal
    off = {error.name for error in proof.failed}
    assert proof.first is not None
    assert proof.first.step == fault.step
    assert proof.failed[0].quantity == fault.first, proof.failed
    assert set(fault.named) <= off
    assert not set(fault.spared) & {error.name for error in proof.failed if error.quantity == "gradient"}
    assert fault.cause in proof.cause, proof.cause


def test_a_wrong_short_window_leaves_full_windows_right(recorded: Recorded) -> None:
    fault = FAULTS["short_window_is_divided_by_the_full_count"]
    proof = verb.compare(LAYOUTS["ddp"], recorded("ddp", LAYOUTS["ddp"]), around=fault.plant)
    assert {error.step for error in proof.failed} == {1}


def test_at_least_twenty_faults_are_planted() -> None:
    assert len(FAULTS) >= 20
