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
from disttrain.doctor.diagnose import BUBBLE, COMPUTE, HOST, Verdict
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
