"""The run folder: made once, never mixed up, strict and movable."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from disttrain.errors import ConfigError, LaunchError
from disttrain.places import new_folder
from disttrain.record import RunFolder
from disttrain.texts import write_json


def test_a_folder_is_named_by_date_time_and_id(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "outputs")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[a-z0-9]{4}", str(folder.path.relative_to(tmp_path / "outputs")))


def test_two_folders_of_one_second_are_apart(tmp_path: Path) -> None:
    now = datetime(2026, 11, 29, 12, 0, 0)
    assert len({new_folder(tmp_path, now) for _ in range(20)}) == 20
    assert len(list((tmp_path / "2026-11-29").iterdir())) == 20


def test_a_sweeps_job_lies_where_the_sweep_says_and_is_made_once(tmp_path: Path) -> None:
    sweep = new_folder(tmp_path)
    (sweep / "3").mkdir()
    folder = RunFolder.make(tmp_path, sweep / "3")
    assert folder.path == sweep / "3"
    folder.append({"step": 1})
    folder.close()
    with pytest.raises(LaunchError, match="something is in it"):
        RunFolder.make(tmp_path, sweep / "3")


def test_a_log_that_began_before_the_run_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "disttrain.log").touch()
    assert RunFolder.make(tmp_path, tmp_path).path == tmp_path
    (tmp_path / "notes").touch()
    with pytest.raises(LaunchError) as caught:
        RunFolder.make(tmp_path, tmp_path)
    assert caught.value.remedy == "another hydra.run.dir", "what is no run can't be resumed"


def test_files_get_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = RunFolder.make(tmp_path)
        folder.write_result(status="done")
        folder.append({"step": 1})
        folder.close()
    finally:
        os.umask(before)
    assert [(folder.path / name).stat().st_mode & 0o777 for name in ("result.json", "metrics.jsonl")] == [0o640, 0o640]
    assert folder.path.stat().st_mode & 0o777 == 0o750


# --- one run at a time ------------------------------------------------------------------------------------------


def test_a_second_run_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.lock()
    with pytest.raises(LaunchError, match="in use by another run"):
        RunFolder(folder.path).lock()
    folder.unlock()
    again = RunFolder(folder.path)
    again.lock()
    again.unlock()


def test_the_lock_of_a_killed_run_is_gone_with_it(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    pid = os.fork()
    if pid == 0:
        folder.lock()
        os._exit(0)
    os.waitpid(pid, 0)
    folder.lock()
    folder.unlock()


# --- config -----------------------------------------------------------------------------------------------------


def test_resuming_keeps_the_first_config_and_tells_what_changed(tmp_path: Path) -> None:
    """A08."""
    folder = RunFolder.make(tmp_path)
    first = "train:\n  steps: 4\noptimizer:\n  lr: 0.001\ntags: [a]\n"
    assert folder.store_config(first, ["train.steps=4"]) == {}
    second = "train:\n  steps: 8\n  epochs: null\noptimizer:\n  lr: 0.001\ntags: [a]\n"
    assert folder.store_config(second, ["train.steps=8"]) == {"train.steps": (4, 8), "train.epochs": ("(absent)", None)}
    assert (folder.path / "config.yaml").read_text() == first
    assert (folder.path / "config.1.yaml").read_text() == second
    again = folder.store_config(second, ["train.steps=8"])
    assert again == {"train.steps": (4, 8), "train.epochs": ("(absent)", None)}, "compared with the first"
    assert (folder.config_text(), folder.overrides()) == (second, ["train.steps=8"])
    assert (folder.path / "config.2.yaml").exists()


@pytest.mark.parametrize("override", ["tags=['a,b', \"x: y\"]", "run_name='50% [v=1] a=b'", "a: b", "ä ✓", "~callbacks.wandb"])
def test_overrides_come_back_as_typed(override: str, tmp_path: Path) -> None:
    """A11."""
    folder = RunFolder.make(tmp_path)
    folder.store_config("{}", [override])
    assert folder.overrides() == [override]


def test_nothing_names_the_folders_own_place(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.store_config("{}", [])
    folder.store_config(f"resume: {folder.path}/checkpoints/step-4\n", [f"resume={folder.path}"])
    moved = tmp_path / "moved"
    shutil.move(folder.path, moved)
    assert all(str(folder.path) not in path.read_text() for path in moved.iterdir())
    assert RunFolder(moved).config_text() == "resume: ./checkpoints/step-4\n"


def test_environments_of_earlier_starts_stay(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    for threads in (1, 2, 3):
        folder.store_environment({"threads": threads})
    names = ("environment.1.json", "environment.2.json", "environment.json")
    assert [json.loads((folder.path / name).read_text())["threads"] for name in names] == [1, 2, 3]


# --- metrics and verdict ----------------------------------------------------------------------------------------


def test_rows_are_strict_json_and_come_back(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.append({"step": 1, "train/loss": math.nan, "train/grad_norm": math.inf})
    folder.append({"step": 2, "train/loss": 0.1})
    folder.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in folder.metrics_file.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = folder.read()
    assert math.isnan(first["train/loss"])
    assert first["train/grad_norm"] == math.inf
    assert second == {"step": 2, "train/loss": 0.1}


def test_metrics_are_cut_back_to_a_step_and_go_on(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    for step in range(1, 8):
        folder.append({"step": step, "train/loss": 1 / step})
    folder.cut_back(4)
    folder.append({"step": 5, "train/loss": 9.0})
    folder.close()
    assert [row["step"] for row in folder.read()] == [1, 2, 3, 4, 5]
    assert folder.read()[-1]["train/loss"] == 9.0


def test_an_evaluation_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """What is no longer measured, as by a run that goes on without an average of its weights, is no last value."""
    folder = RunFolder.make(tmp_path)
    folder.append({"step": 2, "train/loss": 3.0, "val/loss": 3.1, "val/loss_ema": 3.2})
    folder.append({"step": 3, "train/loss": 2.0})
    assert folder.last_values() == {"train/loss": 2.0, "val/loss": 3.1, "val/loss_ema": 3.2}
    folder.append({"step": 4, "val/loss": 1.9})
    folder.close()
    assert folder.last_values() == {"train/loss": 2.0, "val/loss": 1.9}


def test_a_line_cut_off_by_a_crash_is_no_row(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.append({"step": 1})
    folder.close()
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 2, "train/lo')
    assert folder.read() == [{"step": 1}]
    folder.append({"step": 2})
    folder.close()
    assert folder.read() == [{"step": 1}, {"step": 2}]


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    torn = ['{"step": 2, "tr', "\0\0\0", "null", "5", '{"train/loss": 3}', "[" * 100_000, '{"step": "two"}', "", "\udcff"]
    lines = ['{"step": 1}', *torn, '{"step": 3}', ""]
    folder.metrics_file.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    assert folder.read() == [{"step": 1}, {"step": 3}]
    folder.cut_back(1)
    assert folder.metrics_file.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("text", ["", '{"status": "do', "5", "[]", "[" * 100_000])
def test_a_damaged_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"result\.json can't be read") as raised:
        RunFolder(tmp_path).result()
    assert raised.value.remedy is not None
    subprocess.run(raised.value.remedy, shell=True, check=True)
    assert RunFolder(tmp_path).result() == {}


@pytest.mark.parametrize("text", ["", "\0\0", "a: [", "5", "- a"])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    folder = RunFolder(tmp_path)
    for read in (folder.config_values, lambda: folder.store_config("a: 1\n", [])):
        with pytest.raises(ConfigError, match=r"config\.yaml can't be read"):
            read()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "a refused resume stores nothing"


def test_a_new_folder_has_no_rows_and_no_result(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.cut_back(3)
    assert (folder.read(), folder.result()) == ([], {})


def test_a_result_is_added_to(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path)
    folder.write_result(status="running", metrics={"val/loss": 1.0})
    folder.write_result(status="done", predicted={"seconds": math.inf})
    assert folder.result() == {"status": "done", "metrics": {"val/loss": 1.0}, "predicted": {"seconds": math.inf}}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"kept": True})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"kept": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"kept": True}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_nor_does_a_full_disk_leave_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.make(tmp_path)
    folder.write_result(status="running")
    before = sorted(path.name for path in folder.path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_result(status="done")
    with pytest.raises(OSError, match="No space"):
        folder.store_config("{}", [])
    assert folder.result()["status"] == "running"
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_it_needs_no_torch() -> None:
    code = "import sys, disttrain.record, disttrain.launch.environment, disttrain.launch.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    first = RunFolder.make(tmp_path)
    first.store_config("train: {steps: 3}\n", ["train.steps=3"])
    assert not first.take_back()
    first.store_environment({"host": "a"})
    first.write_result(status="done", exit_code=0)
    before = {file.name: file.read_text() for file in first.path.glob("*.*")}
    again = RunFolder(first.path)
    again.store_config("train: {steps: 9}\n", ["train.steps=9"])
    again.write_result(status="running", exit_code=None)
    again.store_environment({"host": "b"})
    assert again.overrides() == ["train.steps=9"]
    assert again.take_back()
    assert {file.name: file.read_text() for file in first.path.glob("*.*")} == before


def test_the_folders_own_path_is_left_out_and_no_other_that_begins_or_ends_like_it(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path, tmp_path / "run")
    own = folder.path
    text = f"a: {own}/x\nb: {own}-old\nc: {own}\nd: [/far{own}, '{own}']\ne: {own}.bak\n"
    folder.store_config(text, [f"resume={own}", f"paths.data={own}s"])
    assert folder.config_text() == f"a: ./x\nb: {own}-old\nc: .\nd: [/far{own}, '.']\ne: {own}.bak\n"
    assert folder.overrides() == ["resume=.", f"paths.data={own}s"]
