"""Classes of a user's own, and runs read or resumed: what does not fit is one message before any rank starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import disttrain
from disttrain import build
from disttrain.cli import main
from disttrain.config import world
from disttrain.config.compose import compose, composer, parse
from disttrain.errors import ConfigError
from disttrain.reading import run as reading
from disttrain.reading.run import open_run
from disttrain.record import RunFolder
from disttrain.train import writing
from tests.cli.words import BARE

ALONE = [*BARE, "strategy=single"]
MINE = """
import torch

class Halved:
    def __call__(self, update):
        return 0.5

class Silent:
    pass

class Small(torch.nn.Embedding):
    def __init__(self, size=32):
        from disttrain.models.task import Classification
        super().__init__(size, size)
        self.task = Classification("tokens")
"""


@pytest.fixture
def mine(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's own."""
    name = f"mine_{elsewhere.name}"
    (elsewhere / f"{name}.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(elsewhere)
    yield name
    sys.modules.pop(name, None)


def newest() -> RunFolder:
    return RunFolder(max(Path("outputs").glob("*/*"), key=lambda path: path.stat().st_mtime))


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a command line that is the user's mistake."""
    assert main(list(words)) == 2
    said = capfd.readouterr().err
    assert said.count("disttrain: ") == 1
    assert "Traceback" not in said
    return said


def test_a_torch_scheduler_sets_the_rate() -> None:
    own = ["scheduler=custom", "scheduler._target_=torch.optim.lr_scheduler.ExponentialLR", "scheduler.gamma=0.5", "optimizer.lr=0.25"]
    assert main([*ALONE, *own]) == 0
    assert newest().result()["metrics"]["train/lr"] == pytest.approx(0.125)


def test_an_optimizer_of_torchs_keeps_its_own_defaults() -> None:
    own = [
        "optimizer=custom",
        "optimizer._target_=torch.optim.AdamW",
        "scheduler=custom",
        "scheduler.max_lr=0.01",
        "scheduler.total_steps=4",
    ]
    once = ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "scheduler.cycle_momentum=false", "scheduler.pct_start=0.5"]
    assert main([*ALONE, *own, *once]) == 0
    assert newest().result()["metrics"]["train/lr"] == pytest.approx(0.01)  # at the peak, whatever rate the class begins with
    request = parse([*ALONE, *own, *once])
    with composer(request) as app:
        assert build.optimizer_of(compose(app, request)[1])[1] == 0.01  # AdamW's weight decay


def test_a_schedule_need_not_ask_for_the_runs_length(mine: str) -> None:
    assert main([*ALONE, "scheduler=custom", f"scheduler._target_={mine}.Halved", "optimizer.lr=0.5"]) == 0
    assert newest().result()["metrics"]["train/lr"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("group", "target", "says"),
    [
        ("scheduler", "{mine}.Silent", "a Silent can't be"),
        ("scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau", "follows a metric"),
        ("optimizer", "{mine}.Halved", "is no torch Optimizer"),
        ("optimizer", "torch.optim.LBFGS", "computes the loss several times a step"),
        ("optimizer", "torch.optim.Muon", "Muon only supports 2D parameters"),
        ("callbacks.mine", "{mine}.Halved", "is no disttrain Callback"),
    ],
)
def test_a_class_of_another_kind_is_refused(mine: str, capfd: pytest.CaptureFixture[str], group: str, target: str, says: str) -> None:
    choice = [] if "." in group else [f"{group}=custom"]
    assert says in refused(capfd, *ALONE, *choice, f"{group}._target_={target.format(mine=mine)}")


def test_a_run_whose_class_is_not_here_is_not_read(mine: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in ALONE if not word.startswith("model.")]
    assert main([*words, "model=custom", f"model._target_={mine}.Small", "callbacks=[checkpoint]"]) == 0
    run = str(newest().path)
    assert main(["evaluate", run]) == 0
    (elsewhere / f"{mine}.py").unlink()
    sys.modules.pop(mine)
    capfd.readouterr()
    assert f"{mine}.Small, which can't be imported" in refused(capfd, "evaluate", run)


def test_what_is_read_is_checked_and_a_sample_wants_some_learning(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "callbacks=[checkpoint]"]) == 0
    assert "what it writes now" not in capfd.readouterr().out
    run = str(newest().path)
    assert "generate.temperature=-1.0 must be at least zero" in refused(capfd, "generate", run, "temperature=-1")
    assert "generate.length=-5 must be more than zero" in refused(capfd, "generate", run, "length=-5")
    assert main([f"resume={run}", "train.steps=1"]) == 0
    assert "nothing is left to do of 1 steps" in capfd.readouterr().out


def test_a_run_too_short_for_a_sample_says_so(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What `generate` then prints in pieces is what the model wrote in one: the prompt and as many bytes as were asked for."""
    (elsewhere / "corpus.txt").write_text("def add(a, b):\n    return a + b\n" * 100, encoding="utf-8")
    text = ["dataset=text", "dataset.paths=[corpus.txt]", "dataset.context=8", "model.vocab_size=256"]
    assert main([*(word for word in ALONE if not word.startswith(("dataset", "model.vocab"))), *text, "callbacks=[checkpoint]"]) == 0
    said = capfd.readouterr().out
    assert "no sample of what it writes: before step 50 that is noise" in said
    assert "try next:   python -m disttrain generate " in said
    (elsewhere / "corpus.txt").unlink()  # what bytes mean needs no text
    assert main(["generate", str(newest().path), "prompt=def", "length=3", "temperature=0"]) == 0
    written = capfd.readouterr().out
    assert written.startswith("def")
    assert written.endswith("\n")
    command = f"{sys.executable} -m disttrain generate {newest().path} length=300 | head -c 3"
    environment = {**os.environ, "PYTHONPATH": str(Path(disttrain.__file__).parents[1])}
    read = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (read.stdout, read.stderr) == ("def", "")  # who has read enough is no failure


def test_a_text_without_the_prompts_letters_and_a_model_of_more_tokens_end_well(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sample goes on from the text's own beginning, and has no token that the text has not."""
    monkeypatch.setattr(writing, "SAMPLE_FROM", 1)
    (elsewhere / "genome.txt").write_text("ACGTTGCA\n" * 40, encoding="utf-8")
    text = ["dataset=text", "dataset.paths=[genome.txt]", "dataset.context=8", "dataset.vocabulary=characters", "callbacks=[checkpoint]"]
    assert main([*(word for word in ALONE if not word.startswith("dataset")), *text]) == 0
    said = capfd.readouterr().out
    written = said.partition("what it writes now\n\n")[2].partition("run folder:")[0].strip()
    assert written.startswith("ACGTTGCA")
    assert set(written) <= set("ACGT\n")
    assert "prompt=ACGTTGCA" in said
    assert "try: generate.prompt=ACGT" in refused(capfd, "generate", str(newest().path))
    assert main(["generate", str(newest().path), "generate.prompt=ACGT", "length=3"]) == 0


def test_a_run_from_a_gpu_is_read_on_a_machine_without(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reading, "num_gpus", lambda: 0)
    monkeypatch.setattr(world, "num_gpus", lambda: 0)
    assert main([*ALONE, "callbacks=[checkpoint]"]) == 0
    run = newest().path
    config = (run / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(config.replace("device: cpu", "device: cuda"), encoding="utf-8")
    capfd.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert "this machine shows none: read on the CPU" in capfd.readouterr().err
    assert "try: launch.device=cpu" in refused(capfd, "evaluate", str(run), "launch.device=cuda")


def test_what_is_typed_for_a_run_that_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    """A number as anybody writes it; bytes that are no text are told as such."""
    assert main([*ALONE, "callbacks=[checkpoint]"]) == 0
    run = newest().path
    assert open_run(run, ["temperature=1e-1"], "generate")[0].generate.temperature == 0.1
    assert "generate.temperature=[ is not allowed: it takes a number" in refused(capfd, "generate", str(run), "temperature=[")
    assert "'prompt=?' has bytes that are no UTF-8" in refused(capfd, "generate", str(run), "prompt=\udcff")


def test_a_run_that_is_read_keeps_what_its_forward_computes_with() -> None:
    """By their classes: under other names too."""
    named = [f"callbacks.{name}._target_=disttrain.callbacks.{file}" for name, file in (("half", "amp.AMP"), ("times", "jsonl.JSONL"))]
    assert main([*ALONE, "callbacks=[checkpoint]", *named]) == 0
    assert list(open_run(newest().path, [], "generate")[0].callbacks) == ["half"]


def test_a_layout_typed_at_resume_replaces_the_stored_one(capfd: pytest.CaptureFixture[str]) -> None:
    cut = ["strategy=tensor_parallel", "strategy.sequence_parallel=true", "callbacks=[checkpoint]"]
    assert main([*BARE, *cut]) == 0
    run = newest().path
    assert main([f"resume={run}", "strategy=ddp", "train.steps=3"]) == 0
    said = capfd.readouterr().err
    assert "left out of what the run was started with: strategy.sequence_parallel=true" in said
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["step"] == 3


def test_run_takes_a_list_of_overrides_and_no_verb() -> None:
    with pytest.raises(ConfigError, match="takes a list") as caught:
        disttrain.run("strategy=ddp seed=1")
    assert caught.value.remedy == "run(['strategy=ddp', 'seed=1'])"
    with pytest.raises(ConfigError, match="'verify' is a verb") as caught:
        disttrain.run(["verify", "strategy=ddp"])
    assert caught.value.remedy == "python -m disttrain verify strategy=ddp"


def test_a_run_that_diverges_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "callbacks=minimal", "optimizer=sgd", "optimizer.lr=1e30", "train.clip_norm=null"]) == 1
    err = capfd.readouterr().err
    assert "the run has diverged: at the end val/loss is nan" in err
    assert "Traceback" not in err
    result = newest().result()
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert "val/loss is nan" in result["reason"]


def test_a_resume_with_nothing_to_do_leaves_the_record_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "callbacks=[checkpoint]"]) == 0
    run = newest().path
    before = {file.name: file.read_text(encoding="utf-8") for file in [*run.glob("*.yaml"), run / "result.json"]}
    assert main([f"resume={run}", "train.steps=1", "optimizer.lr=0.5"]) == 0
    said = capfd.readouterr().out
    assert "nothing is left to do of 1 steps" in said
    assert {file.name: file.read_text(encoding="utf-8") for file in [*run.glob("*.yaml"), run / "result.json"]} == before


def test_a_run_killed_after_its_last_save_is_closed_by_a_resume(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "callbacks=[checkpoint,jsonl]"]) == 0
    run = newest()
    ended = run.result()
    run.write_result(status="running", reason="", exit_code=None, metrics={})  # as a kill leaves it
    assert main([f"resume={run.path}"]) == 0
    closed = run.result()
    assert (closed["status"], closed["exit_code"], closed["step"]) == ("done", 0, ended["step"])
    assert closed["metrics"] == ended["metrics"]
    assert "training loss" in capfd.readouterr().out


def contents(run: Path) -> dict[str, str]:
    """Of all files but the logs."""
    files = [file for file in run.rglob("*") if file.is_file() and file.parent.name != "logs"]
    return {str(file.relative_to(run)): file.read_text(errors="replace") for file in files}


def test_a_run_without_a_good_checkpoint_is_not_begun_anew(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "callbacks=[checkpoint,jsonl]"]) == 0
    run = newest().path
    for file in run.glob("checkpoints/*/state.json"):
        file.write_text("{}")
    before = contents(run)
    assert main([f"resume={run}", "train.steps=2"]) == 2
    assert "holds no good checkpoint:\nstep-2 is passed over: state.json has 2 bytes instead of" in capfd.readouterr().err
    assert contents(run) == before


def test_a_resume_refused_after_it_put_something_aside_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """The verdict of before would be one of a run that is no more."""
    assert main([*ALONE, "callbacks=[checkpoint,jsonl]", "train.steps=2", "callbacks.checkpoint.every=1"]) == 0
    run = newest().path
    wrong = ["callbacks.checkpoint.monitor=val/nope", "callbacks.checkpoint.keep_best=1", "train.eval_every=1"]
    for number in range(2):
        assert main([f"resume={run}/checkpoints/step-1", *wrong]) == 2
        assert RunFolder(run).result()["status"] == "user_error"
        assert len(list((run / "superseded").iterdir())) == number + 1
        shutil.copytree(run / "checkpoints/step-1", run / "checkpoints/step-2", dirs_exist_ok=True)
    assert "which no evaluation gives" in capfd.readouterr().err
