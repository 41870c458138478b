"""Every command line is typed in a folder of its own, on a machine that shows no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.launch.outcome import Outcome


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


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list:
    """Jobs as they are handed to the launch, which does nothing."""
    handed = []

    def run(job, environment=None) -> Outcome:
        handed.append(job)
        return Outcome(0)

    monkeypatch.setattr("disttrain.launch.job.run", run)
    return handed
