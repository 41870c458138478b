"""Every command line is typed in a folder of its own, on a machine that shows no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command is typed in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("disttrain.config.world.num_gpus", lambda: 0)
    return tmp_path


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """Where ranks write what they see."""
    folder = tmp_path / "seen"
    folder.mkdir()
    return folder
