"""What a person is shown before and after a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from disttrain.callbacks.amp import AMP
from disttrain.models.task import Classification
from disttrain.train.progress import diverged
from disttrain.train.summary import MOST_OWN, count, end_table, start_table, warnings_of
from disttrain.train.trainer import Trainer
from tests.train.runs import Samples


class Logits(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.task = Classification(accuracy=False)


def trainer(**changes: Any) -> Trainer:
    """Of one step on one rank."""
    data = Samples(8, lambda numbers: (torch.ones(len(numbers), 2), numbers % 2))
    return Trainer(Logits(), data, steps=1, global_batch_size=8, **changes)


def shown(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_one_is_one_and_two_are_two() -> None:
    assert [count(1, "step"), count(2, "step"), count(2000, "micro-batch", "micro-batches")] == ["1 step", "2 steps", "2,000 micro-batches"]
    said = shown(start_table(trainer()))
    assert "8 samples = 1 micro-batch x 8 x 1 data rank" in said
    assert "1 step; an epoch is 8 samples = 1 step" in said


def test_a_metric_of_the_users_own_stands_in_the_final_table() -> None:
    made = trainer()
    result = made.fit()
    result.metrics |= {"val/f1": 0.25} | {f"val/class_{number}": 1.0 for number in range(100)}
    said = shown(end_table(made, result))
    assert "validation f1" in said
    assert said.count("validation ") == MOST_OWN


def test_what_was_planned_stands_beside_what_was_measured() -> None:
    made = trainer()
    result = made.fit()
    result.metrics |= {"comm/bytes": 4096.0, "perf/step_seconds": 0.5}
    planned = {"comm/grad/all_reduce_bytes": 3072.0, "comm/world/all_reduce_bytes": 1024.0}
    said = shown(end_table(made, result, {**planned, "perf/step_seconds": 0.25}))
    assert "4.0 KiB (planned 4.0 KiB)" in said
    assert "0.5 (planned 0.25)" in said


@pytest.mark.parametrize("has_it", [False, True])
def test_half_types_on_a_cpu_without_them_are_told_to_be_slow(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: has_it, raising=False)
    told = [len(warnings_of(trainer(callbacks=[AMP(precision)]))) for precision in ("fp32", "bf16", "fp16")]
    assert told == ([0, 0, 0] if has_it else [0, 1, 1])


def test_a_run_has_diverged_if_its_last_evaluation_has() -> None:
    assert diverged({"train/loss": 1.0}) is None
    assert diverged({"train/loss": float("nan"), "val/loss": 1.0}) is None  # one bad batch at the end
    told = diverged({"train/loss": 1.0, "val/loss": float("inf"), "train/skipped_updates": 3.0})
    assert told is not None
    assert told.startswith("at the end val/loss is inf, and 3 updates were skipped")
