"""A job: one run folder, everything in it, one message, the right exit code."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disttrain.config.frozen import freeze
from disttrain.launch import job as jobs
from disttrain.launch.describe import describe
from disttrain.launch.job import Job, run
from disttrain.places import new_folder
from disttrain.record import RunFolder
from tests.launch.program import config_of

ENTRIES = "tests.launch.entries"


@pytest.fixture(autouse=True)
def log_level_stays() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def of_file(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.world(2)
def test_one_folder_that_holds_the_whole_record(tmp_path: Path) -> None:
    """A01, M25, M31."""
    config = config_of(2, data=str(tmp_path / "prepared"), env={"PLANTED": "yes"}, threads=2)
    outcome = run(Job(config, f"{ENTRIES}:where", ["train.steps=1"], f"{ENTRIES}:count_call", outputs=tmp_path / "outputs"))
    assert outcome.exit_code == 0
    folders = list((tmp_path / "outputs").glob("*/*"))
    assert folders == [outcome.folder]
    folder = RunFolder(folders[0])
    assert (folder.config_text(), folder.overrides()) == (freeze(config), ["train.steps=1"])
    for rank in range(2):
        seen = of_file(folder.path / f"seen-{rank}.json")
        assert (seen["rank"], seen["folder"], seen["threads"], seen["total"]) == (rank, str(folder.path), 2, 1.0)
        assert seen["environment"]["PLANTED"] == "yes"
        assert folder.log_file(rank).exists()
    environment = of_file(folder.path / "environment.json")
    assert (environment["env"], environment["interface"]) == ({"PLANTED": "yes"}, "auto")
    assert (environment["start_method"], environment["threads"], environment["backend"]) == ("fork", 2, "gloo")
    result = folder.result()
    assert (result["status"], result["exit_code"], result["metrics"]) == ("done", 0, {"total": 1.0})
    assert len((tmp_path / "prepared").read_text().split()) == 1
    assert "PLANTED" not in os.environ
    folder.lock()  # nobody holds it any more
    folder.unlock()


@pytest.mark.world(2)
def test_a_failure_is_shown_once_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run(Job(config_of(2), f"{ENTRIES}:raises_at_step_3", outputs=tmp_path))
    shown = capfd.readouterr().err
    assert outcome.exit_code == 1
    assert (shown.count("Traceback"), shown.count("rank 1 failed: ValueError: planted at step 3")) == (1, 1)
    assert outcome.folder is not None
    folder = RunFolder(outcome.folder)
    assert f"its log: {folder.log_file(1)}" in shown
    assert "planted at step 3" in folder.log_file(1).read_text()
    result = folder.result()
    assert (result["status"], result["reason"], result["exit_code"]) == ("failed", "rank 1: ValueError: planted at step 3", 1)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("entry", "outputs", "moved", "hint"),
    [
        ("saves_and_raises", "outputs", False, "resume=outputs/{name}\n"),
        ("saves_and_raises", "a b", False, "\"resume='a b/{name}'\"\n"),
        ("saves_and_raises", "outputs", True, "resume={here}/outputs/{name}\n"),
        ("saves_and_diverges", "outputs", False, None),
    ],
    ids=["failed", "space", "chdir", "diverged"],
)
def test_how_a_run_goes_on_is_told_if_it_can(
    entry: str,
    outputs: str,
    moved: bool,
    hint: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Relative to where one is, unless the process works elsewhere; not for an end that a resume would come to again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    if moved:
        monkeypatch.chdir("elsewhere")
    folder = run(Job(config_of(1), f"{ENTRIES}:{entry}", outputs=tmp_path / outputs)).folder
    assert folder is not None
    told = capfd.readouterr().err.partition("it goes on with: python -m disttrain ")[2]
    assert told == ("" if hint is None else hint.format(name=f"{folder.parent.name}/{folder.name}", here=tmp_path))


@pytest.mark.world(1)
@pytest.mark.parametrize(("entry", "code"), [("ends_well", 1), ("saves_and_raises", 1)])
def test_a_record_that_cant_be_closed_hides_nothing(
    entry: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk, mostly."""

    def full(*_: Any, **fields: Any) -> None:
        if "ended" in fields:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "write_result", full)
    config = config_of(1, data=str(tmp_path / "prepared"))
    outcome = run(Job(config, f"{ENTRIES}:{entry}", outputs=tmp_path / "outputs"))
    said = capfd.readouterr().err
    assert outcome.exit_code == code
    assert "can't be closed: [Errno 28] No space left on device" in said
    assert ("rank 0 failed" in said) == (entry != "ends_well")
    assert outcome.folder is not None
    RunFolder(outcome.folder).lock()


@pytest.mark.world(2)
def test_a_users_mistake_in_a_rank_is_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run(Job(config_of(2), f"{ENTRIES}:users_mistake", outputs=tmp_path))
    assert outcome.exit_code == 2
    assert capfd.readouterr().err == "disttrain: found three samples\n  try: dataset.size=4\n"


def test_a_mistake_before_the_ranks_is_in_the_jobs_own_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A07."""
    outcome = run(Job(config_of(2), f"{ENTRIES}:where", prepare=f"{ENTRIES}:refuse", outputs=tmp_path))
    assert outcome.exit_code == 2
    assert capfd.readouterr().err == "disttrain: no network\n  try: put files into paths.data\n"
    assert outcome.folder is not None
    assert "no network" in RunFolder(outcome.folder).log_file(0).read_text()
    assert RunFolder(outcome.folder).result()["status"] == "user_error"


@pytest.mark.world(1)
def test_a_folder_in_use_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.make(tmp_path)
    folder.lock()
    assert run(Job(config_of(1), f"{ENTRIES}:where", resume=folder.path)).exit_code == 2
    assert "in use by another run" in capfd.readouterr().err
    assert folder.result() == {}
    folder.unlock()


@pytest.mark.world(2)
def test_going_on_in_a_folder_says_what_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A08."""
    first = config_of(2)
    path = run(Job(first, f"{ENTRIES}:where", outputs=tmp_path)).folder
    assert path is not None
    second = config_of(2)
    second.train.steps, second.resume = 800, str(path)
    assert run(Job(second, f"{ENTRIES}:where", resume=path)).exit_code == 0
    assert capfd.readouterr().err == "disttrain: changed since the run began: train.steps was 400, is 800\n"
    second.seed = 1
    assert run(Job(second, f"{ENTRIES}:where", resume=path)).exit_code == 0
    again = capfd.readouterr().err.splitlines()  # against the beginning, not against the start before this one
    assert [line.partition("began: ")[2] for line in again] == ["seed was 0, is 1", "train.steps was 400, is 800"]
    assert (path / "config.yaml").read_text() == freeze(first)
    assert str(path) not in (path / "config.1.yaml").read_text()


@pytest.mark.world(2)
def test_a_sweeps_jobs_lie_under_one_folder_and_one_failure_leaves_the_next_alone(tmp_path: Path) -> None:
    sweep = new_folder(tmp_path)
    codes = [
        run(Job(config_of(2), f"{ENTRIES}:{entry}", sweep_job=sweep / str(number))).exit_code
        for number, entry in enumerate(["where", "raises_at_step_3", "where"])
    ]
    assert codes == [0, 1, 0]
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2"]
    assert [RunFolder(sweep / str(number)).result()["status"] for number in range(3)] == ["done", "failed", "done"]


def test_an_interrupt_before_the_ranks_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_launch", interrupted)
    outcome = run(Job(config_of(2), f"{ENTRIES}:where", outputs=tmp_path))
    assert outcome.exit_code == 130
    assert outcome.folder is not None
    assert RunFolder(outcome.folder).result()["status"] == "interrupted"


def test_the_environment_holds_versions_and_source_but_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret")
    description = describe(threads=3)
    assert description["threads"] == 3
    assert {"python", "platform", "cpu", "cores", "gpus", "versions", "git"} <= description.keys()
    assert "torch" in description["versions"]
    assert "planted-secret" not in json.dumps(description | {"git": None})
