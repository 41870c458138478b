"""Mistakes on the command line: one message on stderr, exit code 2, two seconds, nothing started; in a sweep, one job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disttrain.cli import main
from disttrain.launch.outcome import Outcome

LIMIT_SECONDS = 2.0

MISTAKES = {
    "unknown choice": ["model=tiny_gtp"],
    "beginning of several choices": ["model=llama"],
    "choice like no other": ["model=zzz"],
    "machine not measured": ["hardware=here"],
    "unknown group": ["optimiser=adam"],
    "unknown key": ["train.stepss=3"],
    "key of another section": ["lr=3"],
    "key of no component": ["model.width=3"],
    "key of a callback not chosen": ["callbacks.ema.decay=0.9"],
    "key of another meaning": ["callbacks=[default,loss_spike]", "callbacks.loss_spike.factor=2"],
    "key like none of its section": ["verify.foo=3"],
    "text for a number": ["optimizer.lr=fast"],
    "fraction for a count": ["train.steps=2.5"],
    "value not on the list": ["train.dtype=float3"],
    "value not on a component's list": ["model.norm=batch"],
    "section set to a number": ["train=5"],
    "choice by number": ["model=3"],
    "no equals sign": ["strategy", "ddp"],
    "unbalanced bracket": ["tags=[a"],
    "several values without -m": ["optimizer.lr=1,2"],
    "nothing to delete": ["~callbacks.wandbb"],
    "one callback twice": ["callbacks.mine._target_=disttrain.callbacks.monitor.Monitor"],
    "one of the choices unknown": ["callbacks=[default,emma]"],
    "group chosen by a force": ["++model=tiny_gpt"],
    "broken file": ["-cd", "{broken}", "model=broken"],
    "file that holds a list": ["-cd", "{broken}", "model=listed"],
    "folder beside the record": ["hydra.output_subdir=.hydra"],
    "package of no group": ["foo@bar=1"],
    "unknown key of hydra": ["hydra.foo=1"],
    "unknown launcher": ["hydra/launcher=slurmm"],
    "interpolation to nowhere": ["seed=${nope}"],
    "unknown resolver": ["seed=${nope:1}"],
    "missing value": ["dataset=text"],
    "number beyond a callback's limit": ["callbacks.checkpoint.every_minutes=0"],
    "nothing to stop early by": ["callbacks=[default,early_stopping]", "train.eval_every=null"],
    "own class not named": ["model=custom"],
    "own class not there": ["model=custom", "model._target_=nowhere.Net", "dataset.context=8"],
    "class nearly there": ["model=custom", "model._target_=torch.nn.Linearr", "dataset.context=8"],
    "class of ours nearly there": ["model=custom", "model._target_=disttrain.models.gpt.GPTT", "dataset.context=8"],
    "part of Python as a class": ["model=custom", "model._target_=os.system", "dataset.context=8"],
    "model and dataset of different kinds": ["model=simple_cnn"],
    "degrees against the world": ["strategy.dp_replicate=4", "launch.world_size=2"],
    "tp does not divide the heads": ["strategy=tensor_parallel", "strategy.tp=3"],
    "batch does not divide": ["train.global_batch_size=31"],
    "negative size": ["model.num_layers=-1"],
    "neither steps nor epochs": ["train.steps=null"],
    "both steps and epochs": ["train.epochs=2"],
    "single with two ranks": ["strategy=single", "launch.world_size=2"],
    "nccl on the CPU": ["launch.backend=nccl", "launch.device=cpu"],
    "several machines from here": ["launch.nodes=2"],
    "resume from nowhere": ["resume=no/such/run"],
    "no number": ["optimizer.lr=nan"],
    "no end": ["launch.timeout_seconds=inf"],
    "text for a count": ["train.steps=abc"],
    "word for a truth": ["model.bias=yes"],
    "number for a text": ["run_name=3"],
    "one path for a list": ["dataset=text", "dataset.paths=README.md"],
    "name that the key has elsewhere": ["optimizer.learning_rate=1e-3"],
    "key like no other": ["wxyzzy=1"],
    "weights from nowhere": ["init_from=no/such/run"],
    "run folder that can't be made": ["paths.outputs=/dev/null/outputs"],
    "optimizer of whole matrices on cut ones": ["strategy=tensor_parallel", "optimizer=custom", "optimizer._target_=torch.optim.Muon"],
    "unknown flag": ["--foo"],
    "unknown primary config": ["-cn", "nowhere"],
    "unknown config folder": ["-cd", "nowhere"],
    "unknown verb": ["trian"],
    "generate without a run": ["generate"],
    "evaluate of no run": ["evaluate", "no/such/run"],
    "flags that exclude each other": ["-m", "--cfg", "job"],
}
NAMES_THE_MISTAKE = {
    "unknown choice": "try: model=tiny_gpt",
    "beginning of several choices": "try: model=llama3_405b or llama3_70b or llama3_8b or llama_tiny",
    "choice like no other": "try: model=<one of these>",
    "machine not measured": "try: python -m disttrain doctor",
    "unknown group": "try: optimizer=adam",
    "unknown key": "try: train.steps=3",
    "key of another section": "try: optimizer.lr=3",
    "key of a callback not chosen": "try: callbacks=[default,ema]",
    "key of another meaning": "callbacks.loss_spike has action, zscore, ratio, ",
    "key like none of its section": "verify has steps, ",
    "class nearly there": "try: model._target_=torch.nn.Linear",
    "class of ours nearly there": "try: model._target_=disttrain.models.gpt.GPT",
    "resume from nowhere": "outputs holds no run",
    "value not on the list": "float32 or float64",
    "several values without -m": "try: -m optimizer.lr=1,2",
    "nothing to delete": "try: ~callbacks.wandb",
    "model and dataset of different kinds": "try: dataset=digits",
    "no number": "try: optimizer.lr=",
    "text for a count": "try: train.steps=<a whole number or null>",
    "word for a truth": "try: model.bias=true",
    "number for a text": "try: run_name=\"'3'\"",
    "one path for a list": "try: dataset.paths=[README.md]",
    "name that the key has elsewhere": "try: optimizer.lr=0.001",
    "key like no other": "try: python -m disttrain --cfg job",
    "weights from nowhere": "no/such/run is no folder",
    "run folder that can't be made": "try: paths.outputs=",
    "optimizer of whole matrices on cut ones": "torch.optim.Muon orthogonalises whole matrices",
    "file that holds a list": "model=['a', 'b'] is not allowed: it takes a mapping",
    "folder beside the record": "try: hydra.output_subdir=null",
    "unknown verb": "try: python -m disttrain train",
    "tp does not divide the heads": "model.num_kv_heads=4",
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """No mistake may come as far as a job; the sound jobs of a sweep are counted instead of run."""
    started: list[object] = []

    def run(job: object, environment: object = None) -> Outcome:
        started.append(job)
        return Outcome(0)

    monkeypatch.setattr("disttrain.launch.job.run", run)
    return started


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_message(kind: str, nothing_starts: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.process_time()
    broken = tmp_path.parent / "broken"
    (broken / "model").mkdir(parents=True, exist_ok=True)
    (broken / "model" / "listed.yaml").write_text("- a\n- b\n", encoding="utf-8")
    (broken / "model" / "broken.yaml").write_text("a: [1\nb: 2\n", encoding="utf-8")
    words = [word.format(broken=broken) if "{broken}" in word else word for word in MISTAKES[kind]]
    assert main(words) == 2
    assert time.process_time() - start < LIMIT_SECONDS
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("disttrain: ") == 1
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 4
    assert NAMES_THE_MISTAKE.get(kind, "") in err
    assert nothing_starts == []
    assert list(tmp_path.iterdir()) == []


def test_a_current_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["seed=1"]) == 2
    assert "the current folder does not exist any more" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)


SWEPT = {
    "unknown choice": "model=tiny_gpt,tiny_gtp,llama_tiny",
    "text for a number": "optimizer.lr=0.1,fast,0.2",
    "fraction for a count": "train.steps=2,2.5,3",
    "value not on the list": "train.dtype=float32,float3,float64",
    "tp does not divide the heads": "strategy.tp=1,3,2",
    "batch does not divide": "train.global_batch_size=32,31,64",
    "negative size": "model.num_layers=1,-1,2",
    "model and dataset of different kinds": "dataset=python_stdlib,digits,python_stdlib",
    "degrees against the world": "strategy.dp_replicate=2,4,-1",
    "interpolation to nowhere": "seed=1,${nope},2",
    "missing value": "scheduler=cosine,custom,wsd",
    "one of the choices unknown": "callbacks=none,[default,emma],minimal",
}


@pytest.mark.parametrize("kind", SWEPT)
def test_in_a_sweep_a_mistake_fails_its_own_job(
    kind: str, nothing_starts: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    world = [] if "tp" in SWEPT[kind] else ["launch.world_size=2"]
    assert main(["-m", SWEPT[kind], *world]) == 2
    assert len(nothing_starts) == 2
    out, err = capsys.readouterr()
    assert "3 jobs, 1 failed" in out
    assert err.count("is wrong:") == 1
    (sweep,) = (tmp_path / "outputs").glob("*/*")
    said = (sweep / "1/logs/rank-0.log").read_text(encoding="utf-8")
    assert said.strip() in err
    assert json.loads((sweep / "1/result.json").read_text(encoding="utf-8"))["exit_code"] == 2
    assert [row["exit_code"] for row in json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))] == [0, 2, 0]


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"], ["lr=3"], ["--version"], ["--info", "searchpath"], ["generate", "-h"]])
def test_a_light_command_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    """As a process of its own, without torch, wandb, torchvision or matplotlib."""
    heavy = "{'torch', 'wandb', 'torchvision', 'torchmetrics', 'matplotlib', 'rich', 'numpy'}"
    code = f"import sys; from disttrain.cli import main; rc = main({words!r}); sys.exit(99 if {heavy} & set(sys.modules) else rc)"
    repository = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(repository)}, capture_output=True, text=True)
    assert found.returncode == (2 if words == ["lr=3"] else 0), found.stderr
