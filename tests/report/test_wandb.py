"""What goes to W&B: the dashboard as W&B would store it, a sweep's file, checkpoints and ranks. Nothing here has a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain import cli
from disttrain.callbacks.wandb import WandB
from disttrain.errors import ConfigError
from tests.callbacks.fakes import FakeTrainer, config
from tests.callbacks.wandb_file import Read, runs
from tests.cli.words import TINY
from tests.report import records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


def panels(spec: dict[str, Any], section: str) -> list[dict[str, Any]]:
    found = spec["spec"]["section"]["panelBankConfig"]["sections"]
    return next(one["panels"] for one in found if one["name"] == section)


def test_the_dashboard_is_written_and_how_to_send_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = records.sweep(tmp_path / "12-00-00-k3f9", steps=20)
    (sweep / "0" / "wandb" / "offline-run-1-abc").mkdir(parents=True)
    assert cli.main(["report", str(sweep), "report.figures=false", "report.wandb=true", "report.project=mine"]) == 0
    said = capsys.readouterr().out
    assert "wandb login" in said
    assert f"wandb sync {sweep}/0/wandb/offline-run-1-abc" in said
    spec = json.loads((sweep / "report" / "wandb-dashboard.json").read_text())
    assert (spec["project"], spec["displayName"]) == ("mine", "disttrain sweep 12-00-00-k3f9")
    names = [one["name"] for one in spec["spec"]["section"]["panelBankConfig"]["sections"]]
    assert names == ["Loss", "Throughput", "Memory", "Communication", "Plan and measurement", "Sweep"]

    (table,) = spec["spec"]["section"]["runSets"]
    assert [key["name"] for key in table["grouping"]] == ["strategy.value.name"]
    (only,) = table["filters"]["filters"]
    assert (only["key"]["name"], only["value"]) == ("group", "12-00-00-k3f9")
    shown = [name for name, is_pinned in table["runFeed"]["columnPinned"].items() if is_pinned]
    assert {"config:optimizer.value.lr", "config:strategy.value.name", "summary:val/loss"} <= set(shown)

    assert {panel["config"]["groupBy"] for panel in panels(spec, "Loss")} == {"strategy.value.name"}
    assert [panel["config"]["metrics"] for panel in panels(spec, "Communication")] == [["comm/grad/all_reduce_bytes"]]
    assert [panel["config"]["metrics"] for panel in panels(spec, "Plan and measurement")] == [
        [f"summary_metrics.predicted/{key}", f"summary_metrics.{key}"] for key in ("perf/step_seconds", "comm/grad/all_reduce_bytes")
    ]
    (curves, *_) = panels(spec, "Sweep")
    assert {"accessor": "config:optimizer.value.lr"}.items() <= curves["config"]["columns"][0].items()


def test_without_the_package_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = records.job(tmp_path / "one", "ddp", 1e-3, [], steps=4)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert cli.main(["report", str(job), "report.figures=false", "report.wandb=true"]) == 2
    assert "pip install 'disttrain[dashboard]'" in capsys.readouterr().err


def test_a_sweeps_agent_types_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own code makes the command of one point; it trains, under the id that the agent gave."""
    from wandb.sdk.launch.sweeps import utils

    text = yaml.safe_load((ROOT / "experiments/wandb_sweep/sweep.yaml").read_text())
    point = {"strategy": {"value": "ddp"}, "optimizer.lr": {"value": 0.0021}, "scheduler.warmup_steps": {"value": 20}}
    assert point.keys() == text["parameters"].keys()
    typed = utils.create_sweep_command_args({"args": point})["args_no_hyphens"]
    words = [word for part in utils.create_sweep_command(text["command"]) for word in (typed if part == "${args_no_hyphens}" else [part])]
    assert words[1:4] == ["python", "-m", "disttrain"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "given1")
    offline = [word for word in words[4:] if not word.startswith("callbacks.wandb.mode")]
    assert cli.main([*TINY, *offline, "train.steps=20", "train.eval_every=20"]) == 0
    (folder,) = tmp_path.glob("outputs/*/*")
    (run,) = runs(folder)
    assert run.run.run_id == "given1"
    assert run.config["optimizer"]["lr"] == 0.0021
    assert run.config["scheduler"]["warmup_steps"] == 20


@pytest.mark.parametrize(("which", "sent"), [(True, [4]), ("all", [2, 4]), (False, [])])
def test_checkpoints_become_artifacts_if_asked(tmp_path: Path, which: bool | str, sent: list[int]) -> None:
    folder = tmp_path / "12-00-00-k3f9"
    folder.mkdir()
    trainer, callback = FakeTrainer(folder, config=config()), WandB(log_model=which)
    callback.on_fit_start(trainer)
    for step in (2, 4):
        place = folder / "checkpoints" / f"step-{step}"
        place.mkdir(parents=True)
        (place / "state.json").write_text("{}")
        (place / "manifest.json").write_text("{}")
        trainer.progress.step = step
        callback.on_log(trainer, {"train/loss": 1.0})
    callback.on_fit_end(trainer)
    (run,) = runs(folder)
    artifacts = [record.artifact for record in run.all if record.HasField("artifact")]
    artifacts += [
        record.request.log_artifact.artifact for record in run.all if record.HasField("request") and record.request.HasField("log_artifact")
    ]
    assert [json.loads(one.metadata)["step"] for one in artifacts] == sent
    assert all(one.name == f"model-{callback.id}" and one.type == "model" for one in artifacts)


def test_every_rank_has_a_run_if_asked(tmp_path: Path) -> None:
    folder = tmp_path / "12-00-00-k3f9"
    folder.mkdir()
    ids = []
    for rank in (0, 1):
        trainer, callback = FakeTrainer(folder, rank=rank, config=config(run_name="mine")), WandB(all_ranks=True)
        callback.load_state_dict({"id": "abc"})  # as a resume does on every rank
        callback.on_fit_start(trainer)
        callback.on_log(trainer, {"train/loss": 1.0})
        callback.on_fit_end(trainer)
        ids.append(callback.id)
    lead, other = sorted(runs(folder), key=lambda run: run.run.run_id)
    assert (lead.run.run_id, other.run.run_id) == ("abc", "abc-1")
    assert {lead.run.run_group, other.run.run_group} == {folder.name}
    assert (other.run.job_type, other.run.display_name, len(other.history)) == ("rank", "mine-rank-1", 0)
    assert len(lead.history) == 1
    assert isinstance(lead, Read)


def test_another_word_for_log_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="true, false, all"):
        WandB(log_model="some")
