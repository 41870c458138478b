"""The same command under torchrun: the curve of the run that forks its own ranks, and one folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain.record import RunFolder
from disttrain.texts import read_json
from tests.cli.words import TINY
from tests.quality.source import ROOT

pytestmark = [pytest.mark.service, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ALONE = (sys.executable, "-m", "disttrain")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "disttrain")


def record_of(command: tuple[str, ...], cwd: Path, *words: str) -> RunFolder:
    """The one run folder that the command leaves, on a machine that shows no GPU."""
    cwd.mkdir()
    whole = [*command, *(word for word in TINY if not word.startswith("launch.device")), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(whole, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (cwd / "outputs").glob("*/*")
    return RunFolder(folder)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["ddp", "tensor_parallel"])
def test_torchrun_draws_the_same_curve_into_one_folder(strategy: str, tmp_path: Path) -> None:
    """M24 too: without a GPU, two ranks train on the CPU."""
    forked = record_of(ALONE, tmp_path / "forked", f"strategy={strategy}")
    launched = record_of(TORCHRUN, tmp_path / "launched", f"strategy={strategy}")
    curves = [
        [(row["step"], row["train/loss"], row["train/grad_norm"], row.get("val/loss")) for row in run.read()] for run in (forked, launched)
    ]
    assert [step for step, *_ in curves[0]] == [1, 2, 3, 4]
    assert curves[0] == curves[1]
    for run, launcher in ((forked, "alone"), (launched, "torchrun")):
        environment = read_json(run.path / "environment.json")
        assert environment is not None
        assert (environment["launcher"], environment["world_size"], environment["device"]) == (launcher, 2, "cpu")
        assert sorted(log.name for log in (run.path / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
        assert len([path for path in (run.path / "wandb").iterdir() if path.name.startswith("offline-run-")]) == 1
        assert run.result()["status"] == "done"
