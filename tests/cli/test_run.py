"""Jobs that really run: sweeps, `run()`, resume, relative paths. The smallest model, two ranks at most."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

import disttrain
from disttrain.cli import Task, main, split_verb
from disttrain.config.compose import parse
from disttrain.errors import CheckpointError, ConfigError
from disttrain.launch.environment import Environment
from disttrain.launch.outcome import Outcome
from tests.cli.words import SMALL


def resolved(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


@pytest.mark.world(2)
def test_a_sweep_starts_each_job_once(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three values on two ranks: three folders in one, one learning rate each, the fault of one job its own."""
    assert main(["-m", *SMALL, "optimizer.lr=0.1,-0.2,0.3", "~metrics"]) == 2
    (sweep,) = (elsewhere / "outputs").glob("*/*")
    rates = {int(job.name): resolved(job)["optimizer"]["lr"] for job in sweep.iterdir() if (job / "config.yaml").exists()}
    assert rates == {0: 0.1, 2: 0.3}
    assert sorted(entry.name for entry in sweep.iterdir()) == ["0", "1", "2", "sweep.json"]
    for number in (0, 2):
        assert json.loads((sweep / f"{number}/result.json").read_text(encoding="utf-8"))["status"] == "done"
        assert sorted(log.name for log in (sweep / f"{number}/logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    out, err = capfd.readouterr()
    assert "3 jobs, 1 failed" in out
    assert "optimizer.lr=-0.2 must be at least zero" in err


def test_a_failure_in_the_run_is_reported_at_once_and_the_next_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def run(job, environment=None) -> Outcome:
        order.append(f"ran {job.config.seed}" + capsys.readouterr().err)
        return Outcome(1, "rank 1: ValueError: planted") if job.config.seed == 1 else Outcome(0)

    monkeypatch.setattr("disttrain.launch.job.run", run)
    assert main(["-m", *SMALL, "seed=0,1,2"]) == 1
    assert [line.split("job")[0] for line in order] == ["ran 0", "ran 1", "ran 2"]
    assert "job 1 (seed=1) failed: rank 1: ValueError: planted" in order[2]
    assert "3 jobs, 1 failed" in capsys.readouterr().out


def test_a_wrong_job_is_told_before_the_first_one_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def run(job, environment=None) -> Outcome:
        told.append(capsys.readouterr().err)
        return Outcome(0)

    monkeypatch.setattr("disttrain.launch.job.run", run)
    assert main(["-m", *SMALL, "scheduler=cosine,cosinus,wsd"]) == 2
    assert ["job 1 (scheduler=cosinus) is wrong" in said for said in told] == [True, False]


def test_an_interrupt_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def run(job, environment=None) -> Outcome:
        seeds.append(job.config.seed)
        return Outcome(130, "interrupted")

    monkeypatch.setattr("disttrain.launch.job.run", run)
    assert main(["-m", *SMALL, "seed=0,1,2"]) == 130
    assert seeds == [0]


def test_multirun_under_torchrun_is_refused(jobs: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shared: list[str] = []
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("disttrain.launch.join.share_error", lambda environment, error: shared.append(str(error)))
    assert main(["-m", "seed=1,2"]) == 2
    assert main(["lr=1"]) == 2
    assert ("torchrun" in shared[0], "optimizer.lr" in shared[1], jobs) == (True, True, [])
    assert capsys.readouterr().err == ""  # `share_error` shows it


def test_other_ranks_under_torchrun_never_enter_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("disttrain.launch.join.follow", lambda environment: Outcome(7))
    monkeypatch.setattr("disttrain.config.compose.parse", lambda words: pytest.fail("entered Hydra"))
    assert main(["this is no override"]) == 2  # a verb that does not exist: said by each, before anything
    assert main(["lr=1"]) == 7
    assert main(["--help"]) == 0


@pytest.mark.world(2)
def test_run_from_python(elsewhere: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = list(logging.getLogger().handlers)
    result = disttrain.run([*SMALL, "tags=['a,b','x: y']", "run_name='50% [v=1] a=b'"])
    assert (result.status, result.exit_code) == ("done", 0)
    assert result.folder is not None
    assert (resolved(result.folder)["tags"], resolved(result.folder)["run_name"]) == (["a,b", "x: y"], "50% [v=1] a=b")
    assert result.metrics["train/loss"] > 0
    with pytest.raises(ConfigError, match=r"optimizer\.lrr"):
        disttrain.run(["optimizer.lrr=3"])
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert logging.getLogger().handlers == root
    assert not GlobalHydra.instance().is_initialized()


def test_relative_paths_are_taken_against_the_first_folder(jobs: list, elsewhere: Path) -> None:
    (elsewhere / "mine/optimizer").mkdir(parents=True)
    (elsewhere / "mine/optimizer/own.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.5\n")
    words = ["hydra.job.chdir=true", "dataset=text", "dataset.paths=[books]", "-cd", "mine", "optimizer=own", "paths.data=cache"]
    assert main(words) == 0
    (job,) = jobs
    assert job.config.dataset["paths"] == [str(elsewhere / "books")]
    assert job.config.dataset["data_dir"] == str(elsewhere / "cache")
    assert job.sweep_job.is_relative_to(elsewhere / "outputs")
    assert os.getcwd() == str(elsewhere)


def test_the_output_folder_can_be_chosen(jobs: list, elsewhere: Path) -> None:
    assert main([*SMALL, "hydra.run.dir=here"]) == 0
    assert main([*SMALL, "paths.outputs=there"]) == 0
    assert jobs[0].sweep_job == elsewhere / "here"
    assert jobs[1].sweep_job.is_relative_to(elsewhere / "there")


@pytest.mark.parametrize("verb", ["generate", "evaluate", "report"])
def test_verbs_that_read_runs_say_how_they_are_called(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"python -m disttrain {verb} RUN")
    assert ("  generate.prompt=" in said) == (verb == "generate")


@pytest.mark.parametrize(
    ("words", "verb", "rest"),
    [
        ([], "train", []),
        (["seed=1"], "train", ["seed=1"]),
        (["-m", "seed=1,2"], "train", ["-m", "seed=1,2"]),
        (["~callbacks.wandb"], "train", ["~callbacks.wandb"]),
        (["verify", "strategy=ddp"], "verify", ["strategy=ddp"]),
        (["train"], "train", []),
    ],
)
def test_a_verb_comes_first(words: list[str], verb: str, rest: list[str]) -> None:
    assert split_verb(words) == (verb, rest)


def test_errors_keep_their_kind() -> None:
    with pytest.raises(CheckpointError):
        disttrain.run(["resume=."])


def test_a_sweeps_launcher_may_send_the_task_to_another_process() -> None:
    task = Task(Environment("alone"), parse(["seed=1"]))
    assert pickle.loads(pickle.dumps(task)) == task
