"""Every command of the README is run: as it stands where it is cheap, else with fewer steps and less data."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain import cli
from tests.quality.source import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [part for block in blocks("bash") for line in block.splitlines() for part in re.sub(r"\s+#\s.*", "", line).split(" && ")]
OURS = [command for command in COMMANDS if command.startswith("python -m disttrain")]
SLOW = {
    "torchrun --standalone --nproc-per-node 2 -m disttrain": ["train.steps=2"],
    "python experiments/start_cost/measure.py": ["--repeats", "1", "--warm", "0", "--json", "/dev/null"],
    "python experiments/loop_cost/measure.py": [
        *("--case", "one process", "tensor parallel", "--repeats", "1", "--steps", "20", "--warmup", "20", "--json", "/dev/null"),
    ],
    "python experiments/async_save/measure.py": ["--saves", "2", "--every", "40", "--width", "64", "--json", "/dev/null"],
}
"""Command -> what makes it cheap. They start processes of their own."""

RUN_ELSEWHERE = {
    "pip install .": "test_wheel.py installs the wheel",
    "pip install -e '.[test]'": ".ci/run",
    "pip install -e '.[test,dev]'": ".ci/run",
    "pre-commit install": "changes the clone; its hooks are steps of .ci/run",
    "bash .ci/run": "runs this test",
    "python experiments/planner/judge.py": "tests/plan/test_published.py compares its numbers",
    "python -m pytest -n 2": "runs this test",
    "RUN=$(dirname $(ls -t outputs/*/*/config.yaml | head -1))": "test_the_newest_run_is_found_beside_a_sweep",
    "python experiments/reference_loop/train.py $RUN": "test_reference_loop below",
}

TINY_TEXT = ["dataset=text", "dataset.paths=[corpus.txt]"]
FEW = ["train.steps=2", "train.global_batch_size=8", "callbacks.grad_accumulation.micro_batch_size=2", "~callbacks.wandb"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: `mine.py` as the README prints it, and a little text."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text("\n".join(blocks("python")))
    (folder / "corpus.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 200)
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> str:
    """A finished run's folder, relative to the project."""
    before, others = os.getcwd(), set(project.glob("outputs/*/*"))
    os.chdir(project)
    try:
        assert cli.main([*TINY_TEXT, *FEW]) == 0
    finally:
        os.chdir(before)
    (folder,) = set(project.glob("outputs/*/*")) - others
    return str(folder.relative_to(project))


def cheap(words: list[str]) -> list[str]:
    """The same command, with fewer steps and less data."""
    verb = words[0] if words and words[0] in ("verify", "generate", "evaluate", "doctor") else "train"
    if words[:1] in (["plan"], ["report"]) or words == ["doctor"] or verb in ("generate", "evaluate") or "--help" in words:
        return words
    resumes = any(word.startswith("resume=") for word in words)
    own_data = resumes or any(word.startswith("dataset=") for word in words)
    few = ["train.steps=3"] if resumes else FEW
    return [*words, *([] if own_data else TINY_TEXT), *few, *{"verify": ["verify.steps=1"], "doctor": ["doctor.steps=2"]}.get(verb, [])]


@pytest.mark.parametrize("command", OURS)
def test_command(command: str, project: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("WANDB_MODE", "offline")  # whoever runs this may be logged in
    words = shlex.split(command.replace("$RUN", run))[3:]
    assert cli.main(cheap(words)) == 0


@pytest.mark.service
@pytest.mark.parametrize("command", SLOW)
def test_command_with_processes_of_its_own(command: str, project: Path) -> None:
    assert command in COMMANDS
    words = [*shlex.split(command), *SLOW[command]]
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:], *TINY_TEXT, *FEW]
    else:
        words = [sys.executable, str(ROOT / words[1]), *words[2:]]
    done = subprocess.run(words, cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.service
def test_reference_loop(project: Path) -> None:
    os.chdir(project)
    try:
        assert cli.main([*TINY_TEXT, *FEW, "hydra.run.dir=by_hand"]) == 0  # a run that nobody has resumed
    finally:
        os.chdir(ROOT)
    run = "by_hand"
    script = ROOT / "experiments/reference_loop/train.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script), run], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_newest_run_is_found_beside_a_sweep(tmp_path: Path) -> None:
    """The sweep's folder is newer, and is no run."""
    for age, name in enumerate(["d/old", "d/new", "d/sweep/0"]):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (file := tmp_path / "outputs" / name / "config.yaml").touch()
        os.utime(file, (age, age))
    (line,) = [command for command in COMMANDS if command.startswith("RUN=")]
    assert subprocess.run(["bash", "-c", f"{line}; echo $RUN"], cwd=tmp_path, capture_output=True, text=True).stdout == "outputs/d/new\n"


def test_no_command_is_left_out() -> None:
    known = {*OURS, *SLOW, *RUN_ELSEWHERE}
    assert [command for command in COMMANDS if command and command not in known] == []


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []


def test_every_choice_of_a_group_is_named() -> None:
    for folder in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        line = next(line for line in README.splitlines() if line.startswith(f"| `{folder.name}` |"))
        if folder.name == "callbacks":
            continue  # named one by one on the page that --help prints
        missing = [path.stem for path in folder.glob("*.yaml") if f"`{path.stem}`" not in line]
        assert not missing, f"{folder.name}: {missing}"
