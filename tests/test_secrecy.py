"""No secret is written down, and nothing that everybody may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from disttrain import cli
from disttrain.secrecy import REDACTED, redacted

TINY = [
    "strategy=ddp",
    "launch.device=cpu",
    "dataset=synthetic",
    "model=transformer_block",
    "model.hidden_size=16",
    "model.num_heads=2",
    "dataset.shape=[8,16]",
    "dataset.num_samples=64",
    "train.steps=2",
    "~callbacks.progress",
]


@pytest.mark.parametrize(
    "text",
    [
        "launch.env.HF_TOKEN=sesame",
        "- launch.env.WANDB_API_KEY=sesame",
        "  WANDB_API_KEY: sesame",
        "launch.env={A:1,WANDB_API_KEY:sesame,B:2}",
        '"password": "sesame"',
        "aws_secret_access_key = 'sesame'",
        "callbacks.mine.api_key=sesame",
    ],
)
def test_a_secret_is_known_by_its_name(text: str) -> None:
    assert redacted(text) == text.replace("sesame", REDACTED)


@pytest.mark.parametrize(
    "text",
    [
        "dataset.bos_tokens=5",
        "token_count: 7",
        "model.pad_token=3",
        "eos_token: 2",
        "num_tokens: 3",
        "password: null",
        "perf/tokens_per_second: 9",
    ],
)
def test_what_only_sounds_like_one_stays(text: str) -> None:
    assert redacted(text) == text


def test_a_secret_of_the_environment_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "open-sesame-40")
    monkeypatch.setenv("SOME_TOKEN", "ab")
    assert redacted("run_name: x-open-sesame-40-ab") == f"run_name: x-{REDACTED}-ab"


def test_in_code_a_name_is_often_a_variables() -> None:
    assert redacted("token = tokenizer.next()", code=True) == "token = tokenizer.next()"
    assert redacted("token = 'sesame'", code=True) == f"token = '{REDACTED}'"


@pytest.mark.world(2)
def test_a_whole_run_writes_no_secret_and_nothing_for_all_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MY_API_KEY", "sesame-of-the-environment")
    before = os.umask(0)  # a careless user
    try:
        typed = ["launch.env.HF_TOKEN=sesame-that-was-typed", "tags=[${oc.env:MY_API_KEY}]", "callbacks=[default]"]
        assert cli.main([*TINY, *typed]) == 0
    finally:
        assert os.umask(before) == 0, "as it was"
    (run,) = (tmp_path / "outputs").glob("*/*")
    files = [path for path in run.rglob("*") if path.is_file() and "wandb" not in path.relative_to(run).parts]
    assert {"config.yaml", "overrides.yaml", "environment.json", "result.json", "manifest.json"} <= {path.name for path in files}
    for path in files:
        assert b"sesame" not in path.read_bytes(), path
    for path in [run, *run.rglob("*")]:
        assert not path.lstat().st_mode & stat.S_IWOTH or path.is_symlink(), path
    assert cli.main([f"resume={run}", "train.steps=3"]) == 0, "and it goes on without them"
