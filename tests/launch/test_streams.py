"""Standard streams that are closed, or can't say what is printed: the program goes on."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from disttrain.record import RunFolder
from tests.cli.words import BARE
from tests.quality.source import ROOT

PRINTS = """
import os, sys
from disttrain.launch.streams import settle_streams
settle_streams()
file = os.open("opened", os.O_RDWR | os.O_CREAT)
print("\\u00e9", flush=True)
print("\\u2713", file=sys.stderr, flush=True)
os._exit(file)
"""


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of the shell, `python` being this one."""
    command = command.replace("python", sys.executable)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True)


def test_a_file_opened_later_is_not_taken_for_a_closed_stream(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS, encoding="utf-8")
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert run(f"python prints.py {closed}", tmp_path).returncode > 2
        assert (tmp_path / "opened").read_text(encoding="utf-8") == ""


def test_what_an_encoding_lacks_is_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS, encoding="utf-8")
    found = run("python prints.py", tmp_path, PYTHONIOENCODING="ascii")
    assert (found.stdout, found.stderr) == ("?\n", "?\n")


def test_ranks_train_without_a_stream(tmp_path: Path) -> None:
    found = run(f"python -m disttrain {shlex.join([*BARE, 'strategy=ddp', 'launch.world_size=2'])} >&-", tmp_path)
    assert found.returncode == 0, found.stderr
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert RunFolder(folder).result()["step"] == 2
