"""DeepSpeed's JSON beside a config: what fits is handed on, what is said twice or can't be had is told before any rank starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain.cli import main
from disttrain.config.check import check
from disttrain.config.deepspeed import AMP, Batch, check_deepspeed, filled_in, must_be_installed
from disttrain.config.paths import anchored
from disttrain.config.schema import Config
from disttrain.errors import ConfigError, MissingExtraError
from tests import tiny

Make = Callable[..., Config]
ENGINE = ["strategy=deepspeed", "launch.world_size=2"]


@pytest.fixture
def with_json(settled: Make, no_gpus: None, tmp_path: Path) -> Callable[..., Config]:
    """The config checked with this as DeepSpeed's JSON, in a file `ds.json`."""

    def make(said: Any, *words: str) -> Config:
        (tmp_path / "ds.json").write_text(said if isinstance(said, str) else json.dumps(said), encoding="utf-8")
        return check(anchored(settled(*ENGINE, "strategy.deepspeed=ds.json", *words), str(tmp_path)))

    return make


def test_it_is_looked_for_and_not_imported(checked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checked(*ENGINE)
    monkeypatch.setattr("disttrain.config.deepspeed.find_spec", lambda name: object())
    must_be_installed(config)
    monkeypatch.setattr("disttrain.config.deepspeed.find_spec", lambda name: None)
    must_be_installed(checked("strategy=ddp"))
    with pytest.raises(
        MissingExtraError, match=r"(?s)strategy=deepspeed needs the package 'deepspeed'.*pip install 'disttrain\[deepspeed\]'"
    ):
        must_be_installed(config)
    assert "deepspeed" not in sys.modules


def test_without_it_a_run_ends_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("disttrain.config.deepspeed.find_spec", lambda name: None)
    assert main([*ENGINE, "launch.device=cpu"]) == 2
    assert main(["verify", *ENGINE, "launch.device=cpu"]) == 2
    said = capfd.readouterr().err
    assert said.count("pip install 'disttrain[deepspeed]'") == 2
    assert "Traceback" not in said
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("changed", "found", "remedy"),
    [
        ({"dp": 1}, "strategy.dp_replicate is 1", "strategy=single"),
        ({"tp": 2}, "whole layers", "strategy=ddp_tensor_parallel"),
        ({"pp": 2}, "whole depth", "strategy=pipeline_parallel"),
        ({"cp": 2}, "whole sequences", "strategy=context_parallel"),
        ({"shard": 2}, "whole weights", "strategy=fsdp"),
        ({"strategy": {"zero": 3}}, "no rank holds a whole parameter", "strategy=fsdp strategy.zero=3"),
        ({"strategy": {"compression": "bf16"}}, "does not compress", "strategy=ddp"),
        ({"strategy": {"sync_every": 4}}, "strategy.sync_every=4", "strategy.sync_every=1"),
        ({"strategy": {"find_unused_parameters": True}}, "as if its gradient were zero", "strategy=ddp"),
        ({"strategy": {"bucket_size": 10.0}}, "zero_optimization.reduce_bucket_size", "strategy.bucket_size=25.0"),
        ({"dtype": "float64"}, "master weights in float32", "train.dtype=float32"),
        ({"callbacks": {"half": {"_target_": AMP, "precision": "fp16"}}}, "loss scale", "callbacks.half.precision=bf16"),
        ({"optimizer": {"_target_": "disttrain.parallel.muon.Muon"}}, "orthogonalises whole matrices", "strategy.zero=0"),
        ({"strategy": {"deepspeed": "nowhere.json"}}, "strategy.deepspeed=nowhere.json can't be read", "JSON file"),
    ],
)
def test_what_the_engine_can_not_do_is_refused_with_its_reason(changed: dict[str, Any], found: str, remedy: str) -> None:
    knobs = {"zero": 1, "deepspeed": {}} | changed.get("strategy", {})
    with pytest.raises(ConfigError) as refused:
        check_deepspeed(tiny.config(**{"dp": 2} | changed | {"strategy": knobs}))
    assert found in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("said", "found", "remedy"),
    [
        ({"train_batch_size": 64}, "ds.json says train_batch_size=64, and train.global_batch_size=32", "train.global_batch_size=64"),
        ({"train_micro_batch_size_per_gpu": 4}, "callbacks.grad_accumulation.micro_batch_size=8", "micro_batch_size=4"),
        (
            {"gradient_accumulation_steps": 4},
            "train.global_batch_size and callbacks.grad_accumulation.micro_batch_size make 2",
            "it follows",
        ),
        ({"gradient_clipping": 0.5}, "ds.json says gradient_clipping=0.5, and train.clip_norm=1.0", "train.clip_norm=0.5"),
        ({"gradient_clipping": 0}, "train.clip_norm=1.0", "train.clip_norm=null"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2, and strategy.zero=1", "strategy.zero=2"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
            "strategy=fsdp strategy.offload",
        ),
        ({"bf16": {"enabled": True}}, "callbacks.amp.precision is autocast", "callbacks.amp.precision=bf16"),
        ({"fp16": {"enabled": True}}, "callbacks.amp.precision is autocast", "callbacks.amp.precision=bf16"),
        ({"optimizer": {"type": "AdamW"}}, "ds.json says optimizer: optimizer= says", "optimizer=adamw"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler= says", "scheduler=cosine"),
        ({"gradient_allreduce_op": "sum"}, "what the loss is scaled for", "leave it out of ds.json"),
        ({"sparse_attention": {"mode": "fixed"}}, "says sparse_attention, which is not handed on", "leave it out"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients, which is not handed on", "leave it out"),
        ({"zero_optimization": 2}, "is a section with keys of its own", "leave it out"),
    ],
)
def test_what_its_json_says_otherwise_is_refused_naming_both(said: dict[str, Any], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        filled_in(said, "ds.json", Batch(32, 8, 2), 1.0, 1)
    assert found in str(refused.value)
    assert remedy in str(refused.value)


def test_its_file_is_read_before_ranks_start(with_json: Make) -> None:
    for said, found in (
        ({"gradient_accumulation_steps": 4}, "ds.json says gradient_accumulation_steps=4"),
        ("{'stage': 1}", "ds.json is no JSON"),
        ([1], "holds no JSON object"),
    ):
        with pytest.raises(ConfigError) as refused:
            with_json(said)
        assert found in str(refused.value)


def test_what_agrees_or_is_left_to_others_is_taken_and_the_record_holds_it(with_json: Make) -> None:
    said = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": None,
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "none"}},
        "prescale_gradients": True,
    }
    strategy = with_json(said, "strategy.zero=2").strategy
    assert strategy.deepspeed["zero_optimization"]["overlap_comm"] is False
    assert "auto" not in str(strategy.deepspeed)
    assert filled_in(strategy.deepspeed, "", Batch(32, 8, 2), 1.0, 2) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
    }


def test_keys_can_be_typed_instead_of_a_file(checked: Make) -> None:
    strategy = checked(*ENGINE, "+strategy.deepspeed.zero_optimization.reduce_bucket_size=1000000").strategy
    assert strategy.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000000}}
    assert checked("strategy=ddp").strategy.deepspeed is None
