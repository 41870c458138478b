"""Restarts in place: what is tried again and what is not, and that nothing shows of a kill in what comes out.

The kills are those of experiments/crash_safety/kill.py, whose long form is run by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.launch import job
from disttrain.launch.environment import Environment
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from experiments.crash_safety import kill
from tests import tiny


class Impossible(Callback):
    """Can't be made."""

    def __init__(self, into: str) -> None:
        with Path(into).open("a", encoding="utf-8") as file:
            file.write("tried\n")
        raise TypeError("planted in the building of a callback")


@pytest.mark.world(2)
def test_an_error_of_the_building_is_not_tried_again(tmp_path: Path) -> None:
    config = tiny.config(
        dp=2, callbacks={"impossible": {"_target_": "tests.launch.test_restart.Impossible", "into": str(tmp_path / "tries")}}
    )
    config.launch.max_restarts = 3
    outcome = job.run(job.Job(config, "disttrain.build:train", outputs=tmp_path / "outputs"), Environment("alone"))
    assert (outcome.exit_code, outcome.num_restarts) == (1, 0)
    assert outcome.folder is not None
    assert "planted in the building" in RunFolder(outcome.folder).result()["failures"][0]["message"]
    assert (tmp_path / "tries").read_text().count("tried") <= 2, "each of the two ranks once"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> kill.Unbroken:
    return kill.leave_alone("ddp 2", tmp_path_factory.mktemp("runs") / "unbroken")


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("victim", "rank", "share"),
    [("rank", 0, 0.3), ("rank", 1, 0.6), ("parent", 0, 0.95), ("rank", 1, None), ("rank", 0, None), ("parent", 1, None)],
)
def test_a_killed_run_ends_as_if_unbroken(victim: str, rank: int, share: float | None, unbroken: kill.Unbroken, tmp_path: Path) -> None:
    """At an operation of a save (`share` of all that the rank's writer makes), or at some time."""
    operation = None if share is None else max(1, round(share * unbroken.operations[rank]))
    case = kill.Case("ddp 2", victim, rank, operation, 0.0 if operation else 0.6 * unbroken.seconds)
    assert kill.run_case(case, unbroken, tmp_path / "run") == []
    (folder,) = (tmp_path / "run").glob("*/*-*-*-*")
    result = RunFolder(folder).result()
    assert result["status"] == "done"
    if operation and victim == "rank":
        assert [(one["rank"], one["kind"]) for one in result["failures"]] == [(rank, "SIGKILL")]
        assert result["num_restarts"] == 1
