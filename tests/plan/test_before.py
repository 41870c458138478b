"""Predictions in the record of a run; a layout that can't fit is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disttrain import cli
from disttrain.config.compose import compose, composer, parse
from disttrain.errors import ConfigError
from disttrain.launch.environment import detect
from disttrain.plan import before

TINY = ["dataset=text", "model.num_layers=1", "model.hidden_size=32", "train.steps=2", "train.global_batch_size=4", "callbacks=minimal"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    return tmp_path


def test_a_run_records_what_was_predicted_beside_what_it_measured(folder: Path) -> None:
    words = [*TINY, "dataset.paths=[corpus.txt]", "callbacks=[minimal,monitor]", "hydra.run.dir=run", "launch.world_size=1"]
    assert cli.main(words) == 0
    found = json.loads((folder / "run/result.json").read_text())
    assert found["predicted"]["memory/peak_bytes"] > 0
    assert found["measured"]["memory/peak_bytes"] > found["predicted"]["memory/peak_bytes"]  # the interpreter too, on a CPU
    assert not [name for name in found["predicted"] if name.startswith("perf/")]  # nobody has measured this machine


def test_what_cannot_fit_is_refused_with_the_nearest_that_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(before, "machine_bytes", lambda: 2**30)
    words = ["dataset=text", "dataset.paths=[corpus.txt]", "model.max_seq_len=1024", "train.global_batch_size=64", "launch.world_size=2"]
    assert cli.main([*words, "callbacks.grad_accumulation.micro_batch_size=32"]) == 2
    said = capsys.readouterr().err
    assert "needs" in said
    assert "512 MiB" in said
    assert "callbacks.grad_accumulation.micro_batch_size=" in said
    assert "plan.force=true" in said
    assert not (folder / "outputs").exists()
    request = parse([*words, "callbacks.grad_accumulation.micro_batch_size=32", "plan.force=true"])
    with composer(request) as app:
        config = cli.ready(compose(app, request)[1], detect(), str(folder))
    assert before.foresee(config).predicted["memory/peak_bytes"] > 2**29


@pytest.mark.parametrize("knob", ["strategy.offload_activations=true", "strategy=fsdp strategy.offload=true"])
def test_what_waits_in_host_memory_is_predicted_and_checked_too(folder: Path, monkeypatch: pytest.MonkeyPatch, knob: str) -> None:
    words = [*TINY, "dataset.paths=[corpus.txt]", "launch.world_size=2", *knob.split()]
    request = parse(words)
    with composer(request) as app:
        config = cli.ready(compose(app, request)[1], detect(), str(folder))
    found = before.foresee(config).predicted
    assert found["memory/peak_bytes"] > 0
    assert sum(number for name, number in found.items() if name.startswith("comm/")) > 0
    monkeypatch.setattr(before, "machine_bytes", lambda: 2**10)
    with pytest.raises(ConfigError, match="the fullest rank of this layout needs"):
        before.foresee(config)


def test_a_model_without_a_known_shape_trains_without_a_plan(folder: Path) -> None:
    words = [
        "model=transformer_block",
        "dataset=synthetic",
        "train.steps=1",
        "callbacks=minimal",
        "hydra.run.dir=run",
        "launch.world_size=1",
    ]
    assert cli.main(words) == 0
    assert json.loads((folder / "run/result.json").read_text())["predicted"] == {}
