"""`verify` as it is typed: exit code, table, what was made small, the first parameter that is off."""

from __future__ import annotations

import pytest

from disttrain.cli import main
from disttrain.verify.shrink import one_device, shrunk
from tests import tiny

TINY = [
    "verify",
    "strategy=tensor_parallel",
    "strategy.sequence_parallel=true",
    "dataset=synthetic",
    "dataset.kind=tokens",
    "dataset.context=64",
    "dataset.vocab_size=32",
    "model.vocab_size=32",
    "model.num_layers=1",
    "model.hidden_size=32",
    "verify.steps=1",
    "launch.device=cpu",
]


@pytest.mark.world(2)
def test_an_equal_layout_exits_0_and_says_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out
    assert "tensor_parallel (tp 2) against one device, float64, steps: 1\n" in lines
    said = " ".join(lines.split())
    for word in ("gradient", "gradient norm", "loss", "update", "samples", "made small: sequence 64 -> 32", "The same training"):
        assert word in said


@pytest.mark.world(2)
def test_an_unequal_one_exits_1_and_names_what_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "verify.tolerance=1e-18"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Not the same training." in said
    assert "Likely cause:" in said
    assert "blocks.0." in said


@pytest.mark.world(2)
def test_a_lossy_layout_says_so_and_how_far_it_drifts(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = [word for word in TINY if not word.startswith("strategy")]
    assert main([*lossy, "strategy=ddp", "strategy.compression=bf16"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Not the same training, by design: strategy.compression=bf16. Largest relative drift: gradient 0.0" in said


@pytest.mark.world(2)
def test_local_sgd_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in TINY if not word.startswith(("strategy", "verify.steps"))]
    assert main([*words, "strategy=ddp", "strategy.sync_every=2", "verify.steps=2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Not the same training, by design: strategy.sync_every=2. Largest relative drift: gradient " in said
    assert "inf" not in said


def test_micro_batches_are_those_of_the_callback_whatever_it_is_called() -> None:
    accumulation = {"_target_": "disttrain.callbacks.grad_accumulation.GradAccumulation", "micro_batch_size": 1}
    config, _ = shrunk(tiny.config(dp=2, callbacks={"mine": accumulation}, verify={"shrink": False}))
    sizes = [[callback["micro_batch_size"] for callback in side.callbacks.values()] for side in (config, one_device(config))]
    assert sizes == [[1], [2]]
