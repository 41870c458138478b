"""A run that goes on, as it is typed: which one is meant, and what of its words still counts."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain.cli import main
from disttrain.config.frozen import freeze
from tests.cli.words import SMALL


def stored(folder: Path, *words: str, name: str = "tiny") -> Path:
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(words)))
    (folder / "config.yaml").write_text(yaml.safe_dump({"run_name": name}))
    (folder / "checkpoints/step-2").mkdir(parents=True)
    return folder


def test_resume_puts_the_stored_overrides_in_front(jobs: list, elsewhere: Path) -> None:
    run = stored(elsewhere / "outputs/d/t", *SMALL, "seed=5", "+tags=[a]", "~model.bias", "optimizer.lr=0.5")
    assert main([f"resume={run}", "optimizer.lr=0.25", "~model.bias", "+tags=[b]"]) == 0
    assert main(["resume=outputs/d/t/checkpoints/step-2"]) == 0
    first, second = jobs
    assert (first.config.seed, first.config.optimizer["lr"], first.config.tags) == (5, 0.25, ["b"])
    assert (second.config.optimizer["lr"], second.config.tags) == (0.5, ["a"])
    assert (first.resume, second.resume) == (run, run)
    assert second.config.resume == str(run / "checkpoints/step-2")
    assert "seed=5" in first.overrides


@pytest.mark.parametrize(
    ("started", "typed", "left_out"),
    [
        (["~callbacks.wandb"], ["callbacks=minimal"], "~callbacks.wandb"),
        (["~callbacks.wandb"], ["callbacks.wandb.mode=offline"], "~callbacks.wandb"),
        (["~callbacks.wandb"], ["seed=3"], ""),
        (["callbacks.wandb.mode=offline"], ["callbacks=none"], "callbacks.wandb.mode=offline"),
        (["callbacks.wandb.mode=offline"], ["callbacks=[default,ema]"], ""),
        (["callbacks.mine._target_=disttrain.callbacks.ema.EMA"], ["callbacks=none", "callbacks.mine.decay=0.5"], ""),
        (["callbacks.mine._target_=disttrain.callbacks.ema.EMA"], ["callbacks=default"], ""),
        (["debug=sync", "callbacks.replica_check.every=3"], ["debug=fast"], "callbacks.replica_check.every=3"),
        (["scheduler.warmup_steps=1"], ["scheduler=cosine"], ""),
        (["scheduler.warmup_steps=1"], ["scheduler=constant"], "scheduler.warmup_steps=1"),
    ],
)
def test_stored_words_give_way_to_what_is_typed(
    started: list[str], typed: list[str], left_out: str, jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(elsewhere / "outputs/d/t", *(word for word in SMALL if not word.startswith("callbacks")), *started)
    assert main([f"resume={run}", *typed]) == 0
    err = capsys.readouterr().err
    assert err == (f"disttrain: left out of what the run was started with: {left_out}\n" if left_out else "")
    assert (started[-1] in jobs[0].overrides) == (not left_out)


def test_several_jobs_do_not_go_on_in_one_folder(jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(elsewhere / "outputs/d/t", *SMALL)
    for resume in ("auto", str(run)):
        assert main(["-m", *SMALL, f"resume={resume}", "seed=1,2"]) == 2
        assert "try: leave out -m or resume=\n" in capsys.readouterr().err
    assert jobs == []


@pytest.mark.parametrize("name", ["it's", "a$b", "sp ace", "back\\slash", "q\"'", "end\\", "it!"])
def test_a_folder_of_any_name_is_found_by_what_is_suggested(
    name: str, jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(elsewhere / "outputs/d" / name, *SMALL)
    assert main(["resume=nowhere"]) == 2
    (word,) = shlex.split(capsys.readouterr().err.rpartition("try: ")[2])
    assert main(["evaluate", "nowhere"]) == 2
    assert shlex.split(capsys.readouterr().err.rpartition("try: ")[2])[-1] == f"outputs/d/{name}"
    assert main([word]) == 0
    assert (jobs[0].resume, jobs[0].config.resume) == (run, str(run))
    as_in_its_manual = {"it's": f"resume='{run}'".replace("it's", "it\\'s"), "sp ace": f"resume={run}".replace(" ", "\\ ")}
    if name in as_in_its_manual:
        assert main([as_in_its_manual[name]]) == 0


def test_a_resume_means_the_run_or_a_checkpoint_of_it_and_nothing_else(
    jobs: list, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies in a run and is no checkpoint would else begin the run anew, and put its checkpoints aside."""
    run = stored(elsewhere / "outputs/d/t", *SMALL)
    monkeypatch.setenv("HOME", str(elsewhere))
    (run / "checkpoints/best").symlink_to("step-2")
    found = {"~/outputs/d/t": run, "outputs/d/t/checkpoints": run, "outputs/d/t/checkpoints/best": run / "checkpoints/step-2"}
    for word in found:
        assert main([f"resume='{word}'"]) == 0
    assert [(job.resume, job.config.resume) for job in jobs] == [(run, str(meant)) for meant in found.values()]
    (run / "checkpoints/step-2/model").mkdir()
    for word in ("outputs/d/t/config.yaml", "outputs/d/t/checkpoints/step-2/model"):
        (run / "config.yaml").touch()
        assert main([f"resume={word}"]) == 2
        assert "lies in the run outputs/d/t and is no checkpoint\n  try: resume=outputs/d/t\n" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_kept_elsewhere(jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, place = stored(elsewhere / "outputs/d/t", *SMALL), elsewhere / "far/d/t"
    (run / "checkpoints.url").write_text(f"{place}\n")
    assert main([f"resume={run}"]) == 2  # not mounted: to begin anew would be to lose the run
    assert f"outputs/d/t keeps its checkpoints at {place}, and there is no such folder" in capsys.readouterr().err
    (place / "step-2").mkdir(parents=True)
    assert main([f"resume={run}"]) == 0
    for word in (str(run), f"{place}/step-2"):
        assert main([*SMALL, f"init_from={word}"]) == 0
    assert len(jobs) == 3


def test_resume_auto_is_the_run_with_the_newest_checkpoint(jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "resume=auto", "run_name=mine"]) == 0
    assert "so this begins anew" in capsys.readouterr().err
    for age, (name, seed) in enumerate([("mine", 1), ("mine", 2), ("other", 3), ("mine", 4)]):
        run = stored(elsewhere / f"outputs/d/{age}", *SMALL, f"seed={seed}", f"run_name={name}", name=name)
        manifest = run / "checkpoints/step-2/manifest.json"
        manifest.touch()
        os.utime(manifest, (age, age))
    manifest.unlink()  # the newest run was cut off before its first checkpoint was whole
    assert main([*SMALL, "resume=auto", "run_name=mine"]) == 0
    assert [(job.config.seed, job.resume) for job in jobs] == [(0, None), (2, elsewhere / "outputs/d/1")]
    assert jobs[1].config.resume == str(elsewhere / "outputs/d/1")


def test_a_run_that_is_not_there_is_answered_with_those_that_are(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(["d/old", "d/sweep/0", "d/new"]):
        run = stored(elsewhere / "outputs" / name)
        os.utime(run / "overrides.yaml", (age, age))
    for word, newest in (("resume=no/such/run", "d/new"), ("resume=outputs/d/sweep", "d/sweep/0"), ("resume=.", "d/new")):
        assert main([word]) == 2
        assert f"try: resume=outputs/{newest}\n" in capsys.readouterr().err
    assert main(["generate", "no/such/run"]) == 2
    assert "try: python -m disttrain generate outputs/d/new\n" in capsys.readouterr().err


def test_resume_keeps_another_primary_config(jobs: list, elsewhere: Path) -> None:
    (elsewhere / "conf").mkdir()
    (elsewhere / "conf/mine.yaml").write_text("defaults: [disttrain, _self_]\nseed: 9\n")
    assert main(["-cn", "mine", *SMALL]) == 0
    run = stored(elsewhere / "outputs/d/t", *jobs[0].overrides)
    assert main([f"resume={run}"]) == 0
    assert [job.config.seed for job in jobs] == [9, 9]


def test_a_config_folder_that_was_moved_is_typed_again(jobs: list, elsewhere: Path) -> None:
    for name in ("old", "new"):
        (elsewhere / name / "optimizer").mkdir(parents=True)
        (elsewhere / name / "optimizer/own.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.5\n")
    assert main(["-cd", "old", *SMALL, "optimizer=own"]) == 0
    run = stored(elsewhere / "outputs/d/t", *jobs[0].overrides)
    shutil.rmtree(elsewhere / "old")
    assert main([f"resume={run}", "-cd", "new"]) == 0
    assert jobs[1].config.optimizer["lr"] == 0.5


TEXT = [word for word in SMALL if not word.startswith(("model", "dataset"))]


def begun(project: Path, jobs: list, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a project, started in its folder, whose words name data and weights there."""
    stored(project / "outputs/d/source")
    (project / "books").mkdir()
    monkeypatch.chdir(project)
    assert main([*TEXT, "dataset=text", "dataset.paths=[books]", "paths.data=cache", "init_from=outputs/d/source"]) == 0
    run = stored(project / "outputs/d/t", *jobs[-1].overrides)
    (run / "config.yaml").write_text(freeze(jobs[-1].config))
    return run


def where(job: Any) -> list[str]:
    return [*job.config.dataset["paths"], job.config.dataset["data_dir"], job.config.init_from]


def test_a_run_goes_on_from_anywhere_with_the_paths_that_it_had(jobs: list, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = elsewhere / "project"
    run = begun(project, jobs, monkeypatch)
    (project / "cache").mkdir()
    (elsewhere / "other/books").mkdir(parents=True)
    (elsewhere / "other/cache").mkdir()
    monkeypatch.chdir(elsewhere / "other")
    for typed in ([], ["dataset.paths=[books]"], ["paths.data=cache"]):
        assert main([f"resume={run}", *typed]) == 0
    had = [str(project / one) for one in ("books", "cache", "outputs/d/source")]
    here = [str(elsewhere / "other" / one) for one in ("books", "cache")]
    assert where(jobs[0]) == where(jobs[1]) == had
    assert where(jobs[2]) == [here[0], *had[1:]], "what is typed now is meant here"
    assert where(jobs[3]) == [had[0], here[1], had[2]]


def test_a_copied_project_takes_its_own(jobs: list, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(elsewhere / "project", jobs, monkeypatch)
    shutil.copytree(elsewhere / "project", elsewhere / "copy")
    monkeypatch.chdir(elsewhere / "copy")
    assert main(["resume=outputs/d/t"]) == 0
    assert where(jobs[1]) == [str(elsewhere / "copy" / one) for one in ("books", "cache", "outputs/d/source")]


def test_weights_to_start_from_are_not_needed_by_a_run_with_its_own(jobs: list, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(elsewhere, jobs, monkeypatch)
    shutil.rmtree(elsewhere / "outputs/d/source")
    assert main([f"resume={run}"]) == 2
    (run / "checkpoints/step-2/manifest.json").touch()
    assert main([f"resume={run}"]) == 0


def test_choices_of_another_folder_are_looked_for_there(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "project/conf").mkdir(parents=True)
    run = stored(elsewhere / "project/outputs/d/t", "--config-name=mine", *SMALL)
    assert main(["resume=project/outputs/d/t", "seed=3"]) == 2
    said = capsys.readouterr().err
    assert "there is no primary config 'mine.yaml'" in said
    assert f"try: cd {elsewhere}/project && python -m disttrain resume={run} seed=3\n" in said


def test_resume_calls_nothing_that_only_the_stored_run_names(jobs: list, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(elsewhere / "outputs/d/t", "model=custom", "model._target_=torch.load", "model.f=evil", "dataset=synthetic")
    assert main([f"resume={run}"]) == 2
    assert "torch.load" in capsys.readouterr().err
    assert jobs == []
