"""What torch's flop counter leaves in the environment is this folder's to take away."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compiler_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The counter imports the compiler, which sets this variable for good where it is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
