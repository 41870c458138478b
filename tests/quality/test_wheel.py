"""A wheel installed elsewhere runs: it carries the config, the experiments and the type marker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quality.source import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel installed in it, and nothing else; the dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"], cwd=ROOT, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", folder / "site", wheel]
    subprocess.run(command, check=True)
    return folder / "site"


def test_the_wheel_carries_what_a_run_reads(site: Path) -> None:
    package = site / "disttrain"
    assert (package / "py.typed").exists()
    for folder in ("conf", "experiments"):
        configs = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.yaml")}
        assert configs or folder == "experiments"
        assert configs == {str(path.relative_to(package)) for path in (package / folder).rglob("*.yaml")}
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"disttrain", "bin"}
    (metadata,) = site.glob("*.dist-info/METADATA")
    assert "License-Expression: Apache-2.0" in metadata.read_text()


@pytest.mark.parametrize("command", [[sys.executable, "-P", "-m", "disttrain"], ["disttrain"]], ids=["module", "script"])
def test_the_wheel_runs_from_another_folder(command: list[str], site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    command = [*command, "--cfg", "job", "train.steps=7"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "steps: 7" in done.stdout
    assert list(tmp_path.iterdir()) == []
