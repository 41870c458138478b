"""What a training refuses is planned as the nearest that it takes, and said."""

from __future__ import annotations

import json

import pytest

from disttrain import cli


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert cli.main(["plan", "plan.json=true", "hardware=h100", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said", "layout"),
    [
        (
            ["strategy=pipeline_parallel", "strategy.schedule=zbv", "launch.world_size=4"],
            "strategy.pp=4 times 2 stages a rank is more than the 4 layers; planned with strategy.pp=2",
            {"pp": 2, "virtual": 2, "stages": [2, 2], "dp_replicate": 2},
        ),
        (
            ["strategy=context_parallel", "launch.world_size=3", "dataset.context=100"],
            "strategy.cp=3 does not cut dataset.context=100 into two chunks a rank; planned with strategy.cp=1",
            {"cp": 1, "dp_replicate": 3},
        ),
        (
            ["strategy.sequence_parallel=true", "strategy.tp=2", "launch.world_size=2", "dataset.context=63"],
            "strategy.tp=2 does not divide the tokens; planned without",
            {"tp": 2, "sequence_parallel": False},
        ),
        (["model.hidden_size=130"], "model.hidden_size=130 is not divisible by model.num_heads=4; planned with 132", {}),
        (["model.num_kv_heads=3"], "model.num_heads=4 is not divisible by model.num_kv_heads=3; planned with 2", {}),
        (
            ["strategy=fsdp", "strategy.pp=2", "launch.world_size=4"],
            "planned with strategy.zero=1",
            {"pp": 2, "dp_shard": 2, "zero": 1},
        ),
        (
            ["strategy=fsdp", "strategy.compression=bf16", "launch.world_size=2"],
            "planned with strategy.compression=none",
            {"dp_shard": 2, "zero": 3},
        ),
        (["launch.nodes=4", "launch.world_size=2"], "launch.nodes=4 does not divide 2 ranks; planned with launch.nodes=2", {}),
        *(
            (
                ["strategy=pipeline_parallel", "launch.world_size=2", f"strategy.stage_split=[{split}]"],
                f"strategy.stage_split=[{split}] does not cut 4 layers into 2 stages",
                {"pp": 2, "stages": [2, 2]},
            )
            for split in ("blocks.9", "blocks.1,blocks.2", "head.2")
        ),
        (
            ["strategy=pipeline_parallel", "strategy.schedule=zbv", "strategy.stage_split=[blocks.2]", "launch.world_size=2"],
            "strategy.stage_split=[blocks.2] does not cut 4 layers into 4 stages",
            {"stages": [2, 2]},
        ),
    ],
)
def test_what_a_training_refuses(words: list[str], said: str, layout: dict, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *words)
    assert any(said in note for note in found["notes"]), found["notes"]
    assert {name: found["layout"][name] for name in layout} == layout


def test_named_stages_are_shared_out_as_the_schedule_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["strategy=pipeline_parallel", "strategy.schedule=zbv", "launch.world_size=2", "model.num_layers=8"]
    found = planned(capsys, *words, "strategy.stage_split=[blocks.1,blocks.2,blocks.3]")
    assert found["layout"]["stages"] == [6, 2], "the first and last of four, and those between"
    assert not any("stage_split" in note for note in found["notes"])


def test_what_no_layout_divides_is_told_with_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch.world_size=4", "strategy=pipeline_parallel", "train.global_batch_size=2", "model.num_heads=1", "dataset.context=15"]
    words += ["hardware=h100", "plan.search=true"]
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert "no layout on 4 ranks divides" in error
    assert "try: train.global_batch_size=4" in error
    assert cli.main(["plan", *words, "train.global_batch_size=4"]) == 0
    capsys.readouterr()
    found = planned(capsys, *words, "plan.search=false", "hardware.memory_gib=0.001")
    assert any("no layout on 4 ranks divides" in note for note in found["notes"])


@pytest.mark.parametrize("number", ["inf", "nan", "1e400", "1e300", "-3", "0", "many"])
def test_a_size_is_a_number_of_parameters(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"model.parameters={number}", "hardware=h100"]) == 2
    assert "is no number of parameters" in capsys.readouterr().err


def test_so_many_tokens_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model.parameters=1e18", "plan.tokens=1e300", "hardware=h100"]) == 2
    assert "try: plan.tokens=15e12" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan.search=true", "plan.dry=true"], ["plan.search=true", "model.parameters=1e9"]])
def test_of_two_answers_one_is_given(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "hardware=h100", *words]) == 2
    assert "plan.search=true" in capsys.readouterr().err


def test_a_size_needs_neither_model_nor_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "hardware=h100", "model=custom", "model._target_=a.B"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "plan knows the shape of disttrain.models.gpt.GPT and not of a.B" in error
    assert "try: model.parameters=1e9" in error
    assert cli.main([*words, "model.parameters=1e9"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "callbacks.amp.precision=bf16"),
        (["callbacks=none"], "callbacks=[none,amp] callbacks.amp.precision=bf16"),
        (["callbacks=[minimal,monitor]"], "callbacks=[minimal,monitor,amp] callbacks.amp.precision=bf16"),
    ],
)
def test_half_precision_is_named_by_overrides_that_give_it(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *words)
    assert f"planned with {said}, as one trains on h100; fp32 is planned if asked for" in found["notes"]
    assert not planned(capsys, *words, *said.split())["notes"]
