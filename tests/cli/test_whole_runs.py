"""Runs as they are typed, from the command line to the last rank: what all ranks see, what is imported, what a signal leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from disttrain import build
from disttrain.checkpoint.load import latest_good
from disttrain.cli import main
from disttrain.launch.place import Place
from disttrain.record import RunFolder
from tests.cli.words import BARE
from tests.launch.processes import exit_code, fork_owner, signed_in, still_alive
from tests.quality.source import ROOT


def witnessed(into: Path) -> list[str]:
    return ["callbacks.witness._target_=tests.cli.planted.Witness", f"callbacks.witness.into={into}"]


def without_data() -> list[str]:
    """`BARE` for data of 256 tokens."""
    return [word for word in BARE if not word.startswith("dataset") and "vocab_size" not in word]


def seen(into: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(into.glob("*-[0-9].json")) if "modules" not in path.name]


# --- one run, one folder, one config --------------------------------------------------------------------------------


@pytest.mark.world(4)
def test_ranks_that_come_late_see_the_same_folder_and_the_same_config(witness: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01, A05: four ranks, the last of which starts more than a second after the first; times are resolved once."""
    on_time = build.train

    def late(config: Any, folder: RunFolder | None, place: Place) -> dict[str, Any]:
        time.sleep(0.5 * place.rank)
        return on_time(config, folder, place)

    monkeypatch.setattr(build, "train", late)
    words = ["strategy=ddp", "launch.world_size=4", "run_name=${now:%H%M%S%f}-${hydra:job.name}"]
    assert main([*BARE, *words, *witnessed(witness)]) == 0
    (folder,) = Path("outputs").glob("*/*")
    found = seen(witness)
    assert [one.pop("rank") for one in found] == [0, 1, 2, 3]
    assert found == [found[0]] * 4
    assert found[0]["folder"] == str(folder.resolve())
    stamp, job = found[0]["run_name"].split("-")
    assert (stamp.isdigit(), job) == (True, "disttrain")


@pytest.mark.world(2)
def test_values_with_commas_colons_and_signs_reach_every_rank_as_typed(witness: Path) -> None:
    """A11."""
    assert main([*BARE, *witnessed(witness), 'tags=["a,b","x: y"]', "run_name='50% [v=1] a=b'"]) == 0
    assert [(one["tags"], one["run_name"]) for one in seen(witness)] == [(["a,b", "x: y"], "50% [v=1] a=b")] * 2


@pytest.mark.world(1)
def test_a_run_that_goes_on_with_other_keys_keeps_its_first_record(capsys: pytest.CaptureFixture[str]) -> None:
    """A08: four steps, then four more at another rate; the first config and what was typed stay as they were."""
    words = [*BARE, "strategy=single", "callbacks=[minimal,checkpoint]", "callbacks.checkpoint.keep_last=9", "train.steps=4"]
    assert main([*words, "callbacks.checkpoint.every=2"]) == 0
    (folder,) = Path("outputs").glob("*/*")
    before = {name: (folder / name).read_text(encoding="utf-8") for name in ("config.yaml", "overrides.yaml")}
    capsys.readouterr()
    assert main([f"resume={folder}", "train.steps=8", "optimizer.lr=5e-4"]) == 0
    assert {name: (folder / name).read_text(encoding="utf-8") for name in before} == before
    shown = capsys.readouterr().err
    assert "changed since the run began: train.steps was 4, is 8" in shown
    assert "changed since the run began: optimizer.lr was 0.001, is 0.0005" in shown
    new = yaml.safe_load((folder / "config.1.yaml").read_text(encoding="utf-8"))
    assert (new["train"]["steps"], new["optimizer"]["lr"]) == (8, 5e-4)
    assert "train.steps=8" in yaml.safe_load((folder / "overrides.1.yaml").read_text(encoding="utf-8"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6", "step-8"]


@pytest.mark.world(2)
def test_relative_paths_hold_although_the_working_folder_changes(elsewhere: Path, witness: Path) -> None:
    """A10: hydra.job.chdir, a relative data path and a relative config folder, on two ranks that really train."""
    (elsewhere / "mine/optimizer").mkdir(parents=True)
    (elsewhere / "mine/optimizer/own.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.5\n", encoding="utf-8")
    (elsewhere / "books").mkdir()
    (elsewhere / "books/one.txt").write_text("All happy families are alike. " * 40, encoding="utf-8")
    data = ["dataset=text", "dataset.paths=[books]", "paths.data=cache"]
    assert main([*without_data(), *data, "hydra.job.chdir=true", "-cd", "mine", "optimizer=own", *witnessed(witness)]) == 0
    found = seen(witness)
    assert [one["lr"] for one in found] == [0.5, 0.5]
    assert {tuple(one["dataset"]["paths"]) for one in found} == {(str(elsewhere / "books"),)}
    assert len(list((elsewhere / "outputs").glob("*/*"))) == 1
    assert list((elsewhere / "cache").iterdir())


@pytest.mark.world(4)
def test_two_runs_at_once_although_the_usual_port_is_taken(witness: Path) -> None:
    """B01: nothing is fixed that two runs could want."""
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        with suppress(OSError):  # somebody else holds it, which serves as well
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        owners = [fork_owner(lambda: main([*BARE, "strategy=ddp", *witnessed(witness)])) for _ in range(2)]
        assert [exit_code(owner) for owner in owners] == [0, 0]
    assert len(list(Path("outputs").glob("*/*"))) == 2
    assert len({one["folder"] for one in seen(witness)}) == 2


def test_less_data_than_one_global_batch_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    """M32: exit code 2, the key and what would mend it."""
    assert main([*BARE, "strategy=single", "dataset.num_samples=7"]) == 2
    err = capfd.readouterr().err
    assert "7 samples, fewer than one global batch (train.global_batch_size=8)" in err
    assert "try: train.global_batch_size=7, or more data by the keys of dataset" in err
    assert "Traceback" not in err


# --- what is not imported -------------------------------------------------------------------------------------------


def test_a_run_without_callbacks_imports_no_logger(witness: Path) -> None:
    """J04: in a new process, neither its parent nor its rank."""
    heavy = {"wandb", "torchvision", "matplotlib", "tensorboard", "torchmetrics", "sklearn"}
    words = [*BARE, "strategy=single", *witnessed(witness)]
    code = f"import sys; from disttrain.cli import main; rc = main({words!r}); print(sorted({heavy!r} & set(sys.modules))); sys.exit(rc)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    of_the_rank = json.loads((witness / "modules-0.json").read_text(encoding="utf-8"))
    assert "torch" in of_the_rank
    assert heavy & set(of_the_rank) == set()


# --- before there is a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 143), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_there_is_a_run_ends_it_with_a_word(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("disttrain.config.compose.compose", lambda app, request: os.kill(os.getpid(), number))
    assert exit_code(fork_owner(lambda: main(BARE))) == code
    assert capfd.readouterr().err == f"disttrain: stopped by {number.name}\n"
    assert not Path("outputs").exists()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than this machine has cores
@pytest.mark.parametrize("to_group", [False, True], ids=["parent only", "foreground group"])
def test_ctrl_c_saves_and_leaves_neither_ranks_nor_loader_workers(to_group: bool, witness: Path) -> None:
    """B10: two ranks with four loader workers each; exit code 130, nobody alive, and the checkpoint of the step it stopped at loads."""
    own = ["dataset=custom", "dataset._target_=disttrain.data.adapt.Adapted", "dataset.train._target_=tests.cli.planted.Sequences"]
    saves = ["callbacks=[checkpoint]", "callbacks.checkpoint.every=null", "train.steps=1000000"]
    words = [*without_data(), *own, "dataset.num_workers=4", *saves, *witnessed(witness)]
    owner = fork_owner(lambda: main(words))
    signed_in(witness, 2)
    deadline = time.monotonic() + 20
    while len(pids := [process.pid for process in psutil.Process(owner).children(recursive=True)]) < 2 + 2 * 4:
        assert time.monotonic() < deadline, f"{len(pids)} processes"
        time.sleep(0.05)
    (os.killpg if to_group else os.kill)(owner, signal.SIGINT)
    assert exit_code(owner) == 130
    assert not still_alive(pids, seconds=0.5)

    (path,) = Path("outputs").glob("*/*")
    result = RunFolder(path).result()
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    checkpoint = latest_good(path).folder
    assert checkpoint is not None
    assert checkpoint.name == f"step-{result['step']}"
    assert main([f"resume={path}", f"train.steps={result['step'] + 1}"]) == 0
    assert RunFolder(path).result()["step"] == result["step"] + 1
