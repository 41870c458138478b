"""Sweeps that really run: four jobs, four records; and one that fails on one rank while it trains."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from disttrain.cli import main
from disttrain.launch.outcome import Outcome
from disttrain.record import RunFolder
from tests.callbacks.wandb_file import runs
from tests.cli.words import SMALL, TINY
from tests.launch.processes import exit_code, fork_owner, signed_in, still_alive

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def swept(witness: Path, *words: str) -> tuple[int, str, Path]:
    """Exit code, all that was said in its order, and the folder of the sweep, run by a process of its own."""
    said = witness / "said"

    def own() -> int:
        sys.stdout = sys.stderr = said.open("a", buffering=1, encoding="utf-8")
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        return main(["-m", *TINY, "callbacks.witness._target_=tests.cli.planted.Witness", f"callbacks.witness.into={witness}", *words])

    code = exit_code(fork_owner(own))
    (sweep,) = Path("outputs").glob("*/*")
    return code, said.read_text(encoding="utf-8"), sweep


def seen(witness: Path) -> list[dict[str, Any]]:
    """What each rank of each job saw, in the order of jobs and ranks."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(witness.glob("[0-9]*-*.json"))]


@pytest.mark.world(2)
def test_four_jobs_leave_four_records(witness: Path) -> None:
    """A04, G07: two strategies by two rates; each job is started once a rank, with one rate on both, and is one W&B run."""
    code, said, sweep = swept(witness, "strategy=ddp,tensor_parallel", "optimizer.lr=1e-3,3e-4")
    assert code == 0, said
    assert "4 jobs, 0 failed" in said
    rates = [1e-3, 3e-4, 1e-3, 3e-4]
    assert [(Path(one["folder"]).name, one["rank"], one["lr"]) for one in seen(witness)] == [
        (str(job), rank, lr) for job, lr in enumerate(rates) for rank in range(2)
    ]
    assert len(signed_in(witness, 8)) == 8
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "3", "sweep.json"]

    ids = set()
    for job, lr in enumerate(rates):
        folder = RunFolder(sweep / str(job))
        assert (folder.result()["status"], folder.result()["exit_code"]) == ("done", 0)
        (run,) = runs(folder.path)
        ids.add(run.run.run_id)
        assert run.run.run_group == sweep.name
        assert run.config["optimizer"]["lr"] == lr
        assert run.config["strategy"]["name"] == ("ddp" if job < 2 else "tensor_parallel")
        assert run.config["train"]["global_batch_size"] == 8  # nested, not one blob
        assert run.exit_codes == [0]
        rows = folder.read()
        assert [row["step"] for row in run.history] == [row["step"] for row in rows] == [1, 2, 3, 4]
        for key in ("train/loss", "val/loss"):
            assert [row.get(key) for row in run.history] == [row.get(key) for row in rows]
        assert ["val/loss" in row for row in rows] == [False, True, False, True]
    assert len(ids) == 4


@pytest.mark.world(2)
def test_a_job_that_fails_on_one_rank_is_told_at_once_and_the_others_finish(witness: Path) -> None:
    """G07 too: the failed run is marked so in W&B. Nothing hangs, and no process is left."""
    fails = ["callbacks.fails._target_=tests.cli.planted.Fails", "callbacks.fails.rank=1", "callbacks.fails.step=2"]
    code, said, sweep = swept(witness, "strategy=ddp", "optimizer.lr=1e-3,3e-4,1e-4", *fails, "callbacks.fails.lr=3e-4")
    assert code == 1
    assert not still_alive(signed_in(witness, 6), seconds=0)

    assert (said.count("Traceback"), said.count("rank 1 failed: ArithmeticError: planted")) == (1, 1)
    message, next_job = said.index("job 1 (optimizer.lr=0.0003) failed: rank 1: ArithmeticError: planted"), said.rindex("model   ")
    assert message < next_job, "the failure was told only after the next job had begun"
    assert re.search(r"3 jobs, 1 failed", said)

    results = [RunFolder(sweep / str(job)).result() for job in range(3)]
    assert [result["status"] for result in results] == ["done", "failed", "done"]
    assert results[1]["reason"] == "rank 1: ArithmeticError: planted"
    assert "ArithmeticError: planted" in RunFolder(sweep / "1").log_file(1).read_text(encoding="utf-8")
    assert [[row["step"] for row in RunFolder(sweep / str(job)).read()] for job in (0, 2)] == [[1, 2, 3, 4]] * 2
    assert [row["exit_code"] for row in json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))] == [0, 1, 0]
    assert [run.exit_codes for job in range(3) for run in runs(sweep / str(job))] == [[0], [1], [0]]


def test_a_job_whose_folder_can_not_be_made_fails_alone(jobs: list, capsys: pytest.CaptureFixture[str]) -> None:
    names = ",".join(["n" * 300, "short"])
    assert main(["-m", *SMALL, "hydra.sweep.subdir=${hydra.job.override_dirname}", f"run_name={names}"]) == 2
    out, err = capsys.readouterr()
    assert [job.config.run_name for job in jobs] == ["short"]
    assert "2 jobs, 1 failed" in out
    assert "try: hydra.run.dir=<a shorter name>, or in a sweep hydra.sweep.subdir=<one>" in err


def test_every_wrong_job_is_in_the_summary_and_in_its_own_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A07: two good jobs and two bad ones."""
    monkeypatch.setattr("disttrain.launch.job.run", lambda job, environment=None: Outcome(0))
    assert main(["-m", *TINY, "model.num_layers=2,-1,-2,1"]) == 2
    out, err = capsys.readouterr()
    summary = out[out.index("4 jobs, 2 failed") :].splitlines()
    assert [line.split()[1] for line in summary if line.split()[0] in "0123"] == ["done", "wrong", "wrong", "done"]
    (sweep,) = Path("outputs").glob("*/*")
    for job, value in (("1", "-1"), ("2", "-2")):
        message = (sweep / job / "logs/rank-0.log").read_text(encoding="utf-8")
        assert f"model.num_layers={value}" in message
        assert "Traceback" not in message
        assert message.strip() in err
        assert message.splitlines()[0] in "\n".join(summary)
