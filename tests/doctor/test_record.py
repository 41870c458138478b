"""`doctor RUN`: a real run with a window, a callback that holds it back; then the same folder without the window."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from disttrain import cli
from disttrain.train.hooks import Callback
from tests.launch.processes import exit_code, fork_owner, sign_in, signed_in, still_alive

PAUSE = 0.05


class Lazy(Callback):
    """Sleeps in every step."""

    def on_train_step_end(self, trainer, report):
        time.sleep(PAUSE)


class Endless(Callback):
    """Signs in, and never ends its first step."""

    def on_train_step_start(self, trainer):
        sign_in(Path("came"))
        time.sleep(100)


WORDS = (
    *("strategy=single", "launch.device=cpu", "launch.threads=1", "callbacks=[minimal,monitor,breakdown]", "callbacks.breakdown.start=2"),
    *("callbacks.breakdown.steps=3", "callbacks.own._target_=tests.doctor.test_record.Lazy", "train.steps=8", "train.log_every=1"),
    *("dataset=synthetic", "dataset.kind=tokens", "dataset.context=16", "dataset.vocab_size=256", "train.global_batch_size=8"),
    *("model.hidden_size=16", "model.num_layers=1", "model.max_seq_len=16", "train.eval_every=null"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main([*WORDS]) == 0
    (found,) = folder.glob("outputs/*/*")
    return found


def said(run: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert cli.main(["doctor", str(run), "doctor.json=true"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_window_on_record_names_the_callback(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(run, capsys)
    assert found["from"] == "window"
    assert found["verdict"]["bottleneck"] == "host overhead"
    assert "callbacks.own" in " ".join(found["verdict"]["evidence"])
    assert found["try"][0]["overrides"] == ["~callbacks.own"]
    assert 0.9 * PAUSE < found["callbacks"]["own"] < 4 * PAUSE  # other processes may hold a sleeper up
    window = json.loads((run / "breakdown.json").read_text())
    assert (window["first_step"], window["steps"]) == (3, 3)
    cli.main(["doctor", str(run)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_without_a_window_it_is_an_estimate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "breakdown.json").unlink()
    found = said(run, capsys)
    assert found["from"] == "log"
    assert found["step_seconds"] > PAUSE
    assert any("an estimate" in line for line in found["verdict"]["evidence"])


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert cli.main(["doctor", str(tmp_path / "missing")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["result.json", "config.yaml", "breakdown.json"])
def test_a_damaged_file_is_one_message(name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / name).write_text('{"status": "do')
    assert cli.main(["doctor", str(copy)]) == 2
    assert f"{copy / name} can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_a_doctor_at_once(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of a window that was cut short, and no other is begun."""
    monkeypatch.chdir(tmp_path)
    Path("came").mkdir()
    words = [word.replace("Lazy", "Endless") for word in WORDS]
    parent = fork_owner(lambda: cli.main(["doctor", "doctor.fix=true", *words]))
    ranks = signed_in(Path("came"), 1)
    os.kill(parent, number)
    assert exit_code(parent) == 128 + number
    assert not still_alive(ranks, seconds=0)
    assert not Path("outputs").exists()
