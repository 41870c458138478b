"""Composition: every choice, the current folder's conf/, experiments, values that arrive as they were typed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from disttrain.config.compose import composer, parse
from disttrain.config.frozen import freeze, thaw
from disttrain.config.schema import Config
from disttrain.config.sources import package_folder
from disttrain.errors import ConfigError

Make = Callable[..., Config]
GROUPS = ("strategy", "model", "dataset", "optimizer", "scheduler", "callbacks", "launch", "hardware", "debug")
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((package_folder("conf") / group).glob("*.yaml"))]
CHOICES += [f"experiment={file.parent.name}" for file in sorted(package_folder("experiments").glob("*/config.yaml"))]
NEEDS = {
    "model=simple_cnn": ["dataset=digits"],
    "model=resnet18": ["dataset=digits"],
    "strategy=expert_parallel": ["model=moe_tiny"],
    "model=transformer_block": ["dataset=synthetic"],
    "model=custom": ["model._target_=torch.nn.Linear", "model.in_features=3", "model.out_features=1", "dataset=synthetic"],
    "dataset=digits": ["model=simple_cnn"],
    "dataset=fashion_mnist": ["model=simple_cnn"],
    "dataset=synthetic": ["model=transformer_block"],
    "dataset=text": ["dataset.paths=[books,notes.txt]"],
    "dataset=custom": ["dataset._target_=torch.utils.data.TensorDataset"],
    "optimizer=custom": ["optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1"],
    "scheduler=custom": ["scheduler._target_=disttrain.train.optimizer.Constant"],
    "callbacks=custom": ["callbacks.custom._target_=disttrain.callbacks.ema.EMA"],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_passes_the_check(checked: Make, choice: str) -> None:
    config = checked(choice, *NEEDS.get(choice, []))
    assert isinstance(config.launch.world_size, int)
    assert thaw(freeze(config)) == config


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["callbacks=[default,ema,early_stopping,nan_guard,tensorboard]"], {"wandb", "ema", "early_stopping", "nan_guard", "tensorboard"}),
        (["callbacks=[minimal,profile]"], {"progress", "profile"}),
        (["callbacks.wandb.project=x"], {"wandb"}),
        (["callbacks=minimal", "debug=sync"], {"progress", "replica_check"}),
        (["debug=collectives", "callbacks=[default,replica_check]"], {"wandb", "replica_check", "collective_check"}),
    ],
)
def test_callbacks_are_a_keyed_mapping(checked: Make, words: list[str], keys: set[str]) -> None:
    assert keys <= checked(*words).callbacks.keys()


def test_debug_sync_checks_everything_at_every_step(checked: Make) -> None:
    found = checked("debug=sync", "callbacks=[default,replica_check]").callbacks["replica_check"]
    assert (found["every"], found["what"]) == (1, ["batches", "random", "gradients", "weights"])


def test_one_callback_can_be_left_out(checked: Make) -> None:
    assert "wandb" not in checked("~callbacks.wandb").callbacks
    assert checked("callbacks=none").callbacks == {}


def test_an_own_callback_needs_no_file(checked: Make) -> None:
    config = checked("callbacks.mine._target_=disttrain.callbacks.ema.EMA", "callbacks.mine.decay=0.5")
    assert config.callbacks["mine"] == {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.5}


def test_an_own_class_takes_its_arguments_without_a_plus(checked: Make) -> None:
    words = ["model=custom", "model._target_=torch.nn.Linear", "model.in_features=3", "model.out_features=2", "model.bias=false"]
    config = checked(*words, "dataset=synthetic")
    assert config.model == {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2, "bias": False}


def test_environment_variables_and_plans_are_open_mappings(checked: Make) -> None:
    config = checked("launch.env.NCCL_DEBUG=INFO", "strategy.plan={head.*:column}")
    assert config.launch.env == {"NCCL_DEBUG": "INFO"}
    assert config.strategy.plan == {"head.*": "column"}


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_conf_in_the_current_folder_adds_and_shadows(checked: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "conf/model/mine.yaml", "defaults: [tiny_gpt]\nnum_layers: 7\n")
    write(tmp_path / "conf/optimizer/sgd.yaml", "_target_: torch.optim.SGD\nlr: 0.5\n")
    monkeypatch.chdir(tmp_path)
    config = checked("model=mine", "optimizer=sgd")
    assert (config.model["num_layers"], config.model["hidden_size"]) == (7, 128)
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}


@pytest.mark.parametrize("name", ["disttrain", "config"])
def test_conf_in_the_current_folder_does_not_replace_the_primary_config(
    checked: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / f"conf/{name}.yaml", "seed: 77\nsome: {other: project}\n")
    monkeypatch.chdir(tmp_path)
    assert checked().seed == 0


def test_another_primary_config_and_folder_by_name(checked: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "conf/mine.yaml", "defaults: [disttrain, _self_]\nseed: 5\n")
    write(tmp_path / "other/optimizer/adam.yaml", "_target_: torch.optim.Adam\nlr: 0.25\n")
    monkeypatch.chdir(tmp_path)
    config = checked("-cn", "mine", "-cd", "other", "optimizer=adam")
    assert (config.seed, config.optimizer["lr"]) == (5, 0.25)


def test_an_experiment_is_a_folder(checked: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# @package _global_\ndefaults:\n  - override /strategy: tensor_parallel\nseed: 3\n"
    write(tmp_path / "experiments/wide/config.yaml", text)
    monkeypatch.chdir(tmp_path)
    config = checked("experiment=wide")
    assert (config.seed, config.strategy.tp, config.launch.world_size) == (3, 2, 2)
    with pytest.raises(ConfigError, match="experiment=wid: there is no such choice"):
        checked("experiment=wid")


def test_hydras_resolvers_are_resolved_once(checked: Make) -> None:
    config = checked("run_name=${now:%H%M%S}-${hydra:job.name}-${hydra:runtime.choices.model}")
    time, job, model = config.run_name.split("-")
    assert (len(time), job, model) == (6, "disttrain", "tiny_gpt")
    assert thaw(freeze(config)).run_name == config.run_name


HARD = [
    "50% [v=1] a=b",
    "x: y",
    "a,b",
    "'",
    '"',
    "ü 中\u0085\u2028",
    " lead",
    "trail ",
    "1e3",
    "null",
    "no",
    "- a",
    "#c",
    "{a}",
    "\\n",
    "${x",
    "~",
]


@pytest.mark.parametrize("text", HARD)
def test_values_are_byte_identical_on_all_ranks(settled: Make, text: str) -> None:
    config = settled()
    config.run_name, config.tags = text, [text, "x: y"]
    back = thaw(freeze(config))
    assert (back.run_name, back.tags) == (text, [text, "x: y"])


def test_quoted_values_arrive_as_typed(checked: Make) -> None:
    config = checked('tags=["a,b","x: y"]', "run_name='50% [v=1] a=b'")
    assert (config.tags, config.run_name) == (["a,b", "x: y"], "50% [v=1] a=b")


def test_hydras_global_state_is_as_before() -> None:
    with composer(parse([])):
        assert GlobalHydra.instance().is_initialized()
    assert not GlobalHydra.instance().is_initialized()
