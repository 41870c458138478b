"""A run folder is data: what it names is called only if it was typed again, or is plainly a component."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain import cli
from disttrain.config.components import IN_ITS_FOLDER
from disttrain.config.trust import check_stored, check_words
from disttrain.errors import CheckpointError

MINE = """
import torch
from pathlib import Path
from disttrain.train.hooks import Callback
Path(__file__).with_suffix(".imported").touch()
class Net(torch.nn.Linear): pass
class Rows(torch.utils.data.Dataset): pass
class Watch(Callback): pass
class Steps(torch.optim.SGD): pass
class Rate:
    def __init__(self, num_steps): pass
    def __call__(self, update): return 1.0
class Loss:
    def losses(self, outputs, targets): pass
    def counts(self, targets): pass
    def metrics(self): return {}
class Runs:
    def __init__(self, *arguments, **options): Path("pwned").touch()
def make(**options): Path("pwned").touch()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module of one's own, and a run folder in it that holds the same module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trusted_mine.py").write_text(MINE)
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "outputs" / "run" / "evil.py").write_text(MINE)
    (tmp_path / "outputs" / "run" / "package").mkdir()
    (tmp_path / "outputs" / "run" / "package" / "__init__.py").write_text(MINE)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("trusted_mine", "outputs"))]:
        del sys.modules[name]


def nested(place: str, target: str) -> dict[str, Any]:
    values: Any = {"_target_": target}
    for name in reversed(place.split(".")):
        values = {name: values}
    return dict(values)


GOOD = [
    ("model", "trusted_mine.Net"),
    ("model", "torch.nn.Linear"),
    ("model", "disttrain.models.gpt.GPT"),
    ("model.task", "trusted_mine.Loss"),
    ("model.task", "disttrain.models.task.Classification"),
    ("dataset", "trusted_mine.Rows"),
    ("dataset", "disttrain.data.text.PythonStdlib"),
    ("dataset.train", "trusted_mine.Rows"),
    ("optimizer", "trusted_mine.Steps"),
    ("optimizer", "torch.optim.AdamW"),
    ("optimizer", "torch.optim.Adagrad"),
    ("scheduler", "trusted_mine.Rate"),
    ("scheduler", "disttrain.train.optimizer.Cosine"),
    ("callbacks.watch", "trusted_mine.Watch"),
    ("callbacks.ema", "disttrain.callbacks.ema.EMA"),
    ("metrics.f1", "torchmetrics.MeanMetric"),
    ("hydra.launcher", "hydra._internal.core_plugins.basic_launcher.BasicLauncher"),
]
BAD = [
    ("model", "os.system"),
    ("model", "subprocess.Popen"),
    ("model", "torch.load"),
    ("model", "torch.hub.load"),
    ("model", "trusted_mine.make"),
    ("model", "trusted_mine.Runs"),
    ("model", "trusted_mine.Rows"),
    ("model", "torch.multiprocessing.Process"),
    ("model", "torch.optim.AdamW"),
    ("model", "trusted_mine.missing"),
    ("model", "no_such_module.Net"),
    ("model", "Net"),
    ("model", "../evil.Net"),
    ("model", "${oc.env:HOME}"),
    ("model", "disttrain.launch.wire.load"),
    ("model", "disttrain.launch.wire.SharedFile"),
    ("model", "disttrain.models.gpt.nobody"),
    ("callbacks.watch", "disttrain.launch.local.Supervisor"),
    ("callbacks.watch", "trusted_mine.Net"),
    ("dataset", "trusted_mine.Net"),
    ("optimizer", "trusted_mine.Net"),
    ("scheduler", "trusted_mine.Runs"),
    ("scheduler", "torch.nn.Linear"),
    ("model.task", "trusted_mine.Runs"),
    ("dataset.train.deeper", "trusted_mine.Runs"),
    ("metrics.f1", "trusted_mine.Net"),
    ("hydra.callbacks.mine", "os.system"),
    ("hydra.callbacks.mine", "trusted_mine.Watch"),
    ("hydra.launcher", "hydra.core.utils.run_job"),
]


@pytest.mark.parametrize(("place", "target"), GOOD)
def test_a_component_of_its_places_kind_is_used(here: Path, place: str, target: str) -> None:
    check_stored(nested(place, target), [], here / "outputs" / "run")


@pytest.mark.parametrize(("place", "target"), BAD)
def test_anything_else_is_refused_unless_it_is_typed_again(here: Path, place: str, target: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_stored(nested(place, target), [], here / "outputs" / "run")
    assert f"{place}._target_={target}" in caught.value.message
    is_there = not target.startswith("no_such_module")
    assert caught.value.remedy == (f"{place}._target_={target}, if you trust it" if is_there else IN_ITS_FOLDER)
    check_stored(nested(place, target), [f"{place}._target_={target}"], here / "outputs" / "run")
    assert not (here / "pwned").exists()


@pytest.mark.parametrize("target", ["outputs.run.evil.Net", "outputs.run.package.Net"])
def test_a_module_in_the_run_folder_is_not_even_imported(here: Path, target: str) -> None:
    with pytest.raises(CheckpointError, match="lies in the run folder"):
        check_stored(nested("model", target), [], here / "outputs" / "run")
    assert not list((here / "outputs").rglob("*.imported"))


def test_what_stands_in_a_list_is_looked_at_too(here: Path) -> None:
    values = {"dataset": {"_target_": "trusted_mine.Rows", "parts": [{"_target_": "os.system", "command": "x"}]}}
    with pytest.raises(CheckpointError, match=r"dataset\.parts\.0\._target_=os\.system"):
        check_stored(values, [], here / "outputs" / "run")


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("NCCL_ALGO", "Ring", True),
        ("OMP_NUM_THREADS", "1", True),
        ("LD_PRELOAD", "evil.so", False),
        ("PYTHONPATH", ".", False),
        ("WANDB_BASE_URL", "http://elsewhere", False),
        ("NCCL_NET_PLUGIN", "/tmp/evil.so", False),
    ],
)
def test_environment_variables_that_may_load_code_are_typed_again(here: Path, name: str, value: str, harmless: bool) -> None:
    values = {"launch": {"env": {name: value}}}
    if not harmless:
        with pytest.raises(CheckpointError, match=name):
            check_stored(values, [], here)
    check_stored(values, [f"launch.env.{name}={value}"] if not harmless else [], here)


@pytest.mark.parametrize("word", ["hydra.callbacks.x._target_=os.system", "+hydra/launcher=mine", "hydra.job.env_set.LD_PRELOAD=x"])
def test_hydras_own_part_is_not_taken_from_a_run(here: Path, word: str) -> None:
    with pytest.raises(CheckpointError, match="Hydra's own"):
        check_words(["train.steps=3", word], [], here)


@pytest.mark.parametrize("folder", ["/", "outputs/run/conf"])
def test_a_config_folder_from_elsewhere_is_not_searched(here: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match="config folder"):
        check_words([], [folder], here / "outputs" / "run")
    check_words([], ["conf"], here / "outputs" / "run")


# --- from the command line ------------------------------------------------------------------------------------------


def hostile(run: Path, *words: str) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"run_name": "x", "model": {"_target_": "trusted_mine.Runs"}}))
    (run / "overrides.yaml").write_text(yaml.safe_dump(list(words)))


@pytest.mark.parametrize(
    "words",
    [
        ["model=custom", "model._target_=os.system", "model.command=touch pwned"],
        ["model=custom", "model._target_=trusted_mine.Runs"],
        ["model=custom", "model._target_=trusted_mine.make"],
        ["model=custom", "model._target_=outputs.run.evil.Net"],
        ["+callbacks.x._target_=trusted_mine.Runs"],
        ["hydra.callbacks.x._target_=trusted_mine.Runs"],
        ["--config-dir=outputs/run"],
        ["launch.env.LD_PRELOAD=outputs/run/evil.so"],
    ],
    ids=str,
)
def test_a_hostile_run_is_not_resumed(here: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    hostile(here / "outputs" / "run", *words)
    before = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts and path.suffix != ".imported")
    assert cli.main([f"resume={here}/outputs/run", "dataset=synthetic"]) == 2
    assert capsys.readouterr().err.startswith("disttrain: the stored run")
    after = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts and path.suffix != ".imported")
    assert after == before, "neither run nor written to"
    assert not list((here / "outputs").rglob("*.imported"))


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_nor_read_by_the_other_verbs(here: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(here / "outputs" / "run")
    assert cli.main([verb, str(here / "outputs" / "run")]) == 2
    assert "model._target_=trusted_mine.Runs" in capsys.readouterr().err
    assert not (here / "pwned").exists()
