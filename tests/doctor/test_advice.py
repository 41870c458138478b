"""What is offered against a verdict, the likeliest first, and which of what was tried is shown first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from disttrain.config.check import ACCUMULATION
from disttrain.config.schema import StrategyConfig
from disttrain.doctor import verb
from disttrain.doctor.advice import Remedy, advise
from disttrain.doctor.budget import Budget
from disttrain.doctor.diagnose import BUBBLE, COMPUTE, EXPOSED, HOST, MEMORY, OPTIMIZER, Verdict
from tests import tiny

MS = 1e-3
ACCUMULATES = {"micro": {"_target_": ACCUMULATION, "micro_batch_size": 16}}


def offered(bottleneck: str, whole: Budget, num_micro: int, **more: Any) -> list[str]:
    config = tiny.config(callbacks=ACCUMULATES | {"mine": {"_target_": "tests.tiny.Mine"}})
    config.train.global_batch_size = 32
    for key, value in more.items():
        setattr(config, key, value)
    remedies = advise(Verdict(bottleneck, 0.5, []), config, whole, {"num_micro": num_micro})
    return [" ".join(remedy.words) for remedy in remedies]


@pytest.mark.parametrize(("dispatch", "wanted"), [(0.0, 1), (1 * MS, 4), (8 * MS, 8)])
def test_the_number_of_micro_batches_is_what_their_operations_leave_worth_while(dispatch: float, wanted: int) -> None:
    """Of (m + p - 1) (W / m + d), W = 100 ms, d that of one of two micro-batches now: the more d, the fewer."""
    pipeline = StrategyConfig(name="pipeline_parallel", pp=2, schedule="1f1b")
    found = offered(BUBBLE, Budget(200 * MS, {"compute": 100 * MS}, dispatch=2 * dispatch), 2, strategy=pipeline)
    assert found[0] == f"callbacks.micro.micro_batch_size={wanted}"


def test_host_overhead_is_met_by_what_saves_the_most() -> None:
    dear = Budget(100 * MS, {"host": 20 * MS}, {"mine": 15 * MS}, dispatch=20 * MS)
    cheap = replace(dear, callbacks={"mine": 2 * MS})
    assert offered(HOST, dear, 2)[:2] == ["~callbacks.mine", "callbacks.micro.micro_batch_size=32"]
    assert offered(HOST, cheap, 2)[0] == "callbacks.micro.micro_batch_size=32"
    assert "~callbacks.mine" not in offered(HOST, replace(dear, callbacks={"mine": 0.5 * MS}), 2)


def on(num_micro: int, bottleneck: str, **changes: Any) -> list[str]:
    """What is offered for a run of 48 samples a step, cut as `changes` say."""
    local = 48 // (changes.get("dp", 1) * changes.get("shard", 1))
    micro = {"_target_": ACCUMULATION, "micro_batch_size": local // num_micro}
    config = tiny.config(callbacks={"micro": micro}, global_batch_size=48, **changes)
    remedies = advise(Verdict(bottleneck, 0.5, []), config, Budget(100 * MS, {"compute": 50 * MS}), {"num_micro": num_micro})
    return [" ".join(remedy.words) for remedy in remedies]


def test_what_is_shared_out_is_shared_out_over_all_data_ranks() -> None:
    assert "strategy.dp_replicate=1 strategy.dp_shard=6 strategy.zero=3" in on(2, MEMORY, dp=2, shard=3)
    assert not [words for words in on(2, OPTIMIZER, dp=2, strategy={"sync_every": 4}) if "dp_shard" in words], "a training refuses it"


def test_a_degree_moves_to_another_in_whole_factors() -> None:
    longer = {"model": tiny.GPT | {"max_seq_len": 24}, "dataset": tiny.TOKENS | {"context": 24}}
    assert "strategy.cp=1 strategy.dp_replicate=3" in on(12, EXPOSED["context"], cp=3, **longer)
    found = on(4, EXPOSED["tensor"], tp=2, sequence_parallel=True)
    assert "strategy.tp=1 strategy.dp_replicate=2 strategy.sequence_parallel=false" in found
    ring = on(4, EXPOSED["context"], cp=2, strategy={"attention": "ring"})
    assert "strategy.cp=1 strategy.dp_replicate=2 strategy.attention=gather" in ring
    assert not [words for words in on(3, EXPOSED["tensor"], dp=16, tp=2) if "dp_replicate" in words], "48 samples are none for 32 ranks"


def test_fewer_micro_batches_divide_the_batch() -> None:
    """Six of a pipeline of four ranks: the fewest are four, and four divide 48 samples; of 54 none between does."""
    assert on(6, EXPOSED["pipeline"], pp=4, model=tiny.GPT | {"num_layers": 4})[0] == "callbacks.micro.micro_batch_size=12"
    assert on(3, EXPOSED["tensor"], tp=2)[0] == "callbacks.micro.micro_batch_size=24"
    assert on(3, MEMORY, tp=2)[1] == "callbacks.micro.micro_batch_size=8"


def test_of_what_was_tried_the_best_comes_first_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {"": 10.0, "a": 12.0, "b": 5.0, "lossy": 1.0}
    seen: list[str] = []

    def window(name: Any) -> str:
        seen.append(name)
        return str(name)

    monkeypatch.setattr(verb, "window", window)
    monkeypatch.setattr(verb, "budget", lambda name: Budget(takes[name]))

    def recompose(words: Sequence[str]) -> Any:
        return words[0]

    remedies = [Remedy(("a",), ""), Remedy(("lossy",), "", is_lossy=True), Remedy(("b",), "")]
    finding = verb.Finding({}, Budget(10.0), Verdict(COMPUTE, 0.5, []), remedies)
    nothing: Any = ""
    tried = verb.try_out(nothing, finding, recompose)
    assert [(trial.remedy.words[0], trial.gain) for trial in tried] == [("b", 2.0), ("a", 10.0 / 12.0)]
    assert seen == ["a", "b", "", "b", "", "b"]
    only_lossy = replace(finding, remedies=remedies[1:2])
    assert [trial.gain for trial in verb.try_out(nothing, only_lossy, recompose)] == [10.0]
    assert verb.try_out(nothing, replace(finding, remedies=[]), recompose) == []
