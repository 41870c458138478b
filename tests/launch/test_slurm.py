"""Under a real Slurm of two nodes: a job over both that is preempted, requeued and goes on; a sweep through submitit.

A minute and a half on two cores, and half a minute more where Debian's packages are still to be installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.words import TINY
from tests.launch import slurm
from tests.launch.slow import curve
from tests.quality.source import ROOT

pytestmark = [pytest.mark.service, pytest.mark.long]

WORDS = [*TINY[:-3], "callbacks=[minimal,checkpoint]", "callbacks.grad_accumulation.micro_batch_size=2", "train.eval_every=null"]
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=job.log
export MASTER_ADDR=127.0.0.1 PYTHONPATH={root}
srun {python} -m disttrain {words} run_name=job-$SLURM_JOB_ID resume=auto
code=$?
echo "srun left with $code"
if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    reason = slurm.reason_not_to()
    if reason is not None:
        pytest.skip(reason)
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "two") as env:
        yield env


def disttrain(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disttrain", *words]
    return subprocess.run(command, cwd=folder, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_a_job_on_two_nodes_is_preempted_requeued_and_ends_on_the_unbroken_curve(nodes: dict[str, str], tmp_path: Path) -> None:
    words = [*WORDS, "strategy=ddp", "launch.world_size=2", "launch.threads=1", "train.steps=60", "train.log_every=10"]
    words.append("callbacks.dawdles._target_=tests.launch.slow.Dawdles")
    (tmp_path / "job.sh").write_text(JOB.format(root=ROOT, python=sys.executable, words=" ".join(f"'{word}'" for word in words)))
    number = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env=nodes, capture_output=True, text=True, check=True
    ).stdout.strip()

    def said(text: str) -> bool:
        return (tmp_path / "job.log").exists() and text in (tmp_path / "job.log").read_text()

    slurm.wait_for(lambda: len(list(tmp_path.glob("outputs/*/*/metrics.jsonl"))) == 1, 200, "first row")
    slurm.run(["scancel", "--signal=TERM", number], nodes)
    slurm.wait_for(lambda: said("srun left with 143"), 60, "preempted job")
    (folder,) = tmp_path.glob("outputs/*/*")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("preempted", "stopped by SIGTERM")
    assert 0 < result["step"] < 60
    assert (folder / "checkpoints" / f"step-{result['step']}").is_dir()
    slurm.wait_for(lambda: "PD" in slurm.run(["squeue", "-h", "-o", "%t"], nodes), 60, "requeued job")
    # Slurm itself waits two minutes; within the same second its daemons would still refuse the job's credential.
    slurm.run(["scontrol", "update", f"JobId={number}", "StartTime=now+3"], nodes)
    slurm.wait_for(lambda: said("srun left with 0"), 300, "job that goes on")
    assert [path.name for path in tmp_path.glob("outputs/*/*")] == [folder.name]

    whole = disttrain([*words, "paths.outputs=whole"], tmp_path, nodes)
    assert whole.returncode == 0, whole.stderr
    (unbroken,) = tmp_path.glob("whole/*/*")
    wanted, found = curve(unbroken), curve(folder)
    assert max(wanted) == 60
    assert {step: found[step] for step in wanted} == wanted


def test_a_sweep_of_four_through_submitit(nodes: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "hydra.launcher.mem_gb=null"]
    words = [*WORDS, "strategy=single", "train.steps=4", "optimizer.lr=1e-3,2e-3,3e-3,4e-3", "callbacks=minimal"]
    done = disttrain(["-m", *launcher, *words], tmp_path, nodes)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/*/*/*/result.json")]
    assert [result["status"] for result in results] == ["done"] * 4
    assert len({result["metrics"]["train/loss"] for result in results}) == 4
