"""What a pipeline can't be is said before any rank starts, with the nearest thing that it can be. Numbers by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.schedules import SCHEDULES, bubble, holders, nearest, stages_a_rank, takes
from disttrain.config.schema import Config
from disttrain.errors import ConfigError

Make = Callable[..., Config]
PIPELINE = "strategy=pipeline_parallel"


def test_two_ranks_an_axis_without_gpus(checked: Make) -> None:
    assert checked(PIPELINE).strategy.pp == 2
    hybrid = checked("strategy=hybrid_3d")
    assert (hybrid.launch.world_size, hybrid.strategy.dp_replicate, hybrid.strategy.tp, hybrid.strategy.pp) == (8, 2, 2, 2)


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (["strategy.pp=4", "model.num_layers=3"], "model.num_layers=3: fewer than strategy.pp=4", "model.num_layers=4"),
        (["strategy.schedule=zbv", "model.num_layers=3"], "strategy.pp=2 times 2 stages a rank", "model.num_layers=4"),
        (["~callbacks.grad_accumulation"], "no callback says how large", "callbacks=[none,grad_accumulation]"),
        (
            ["strategy.pp=4", "callbacks.grad_accumulation.micro_batch_size=16"],
            "at least 4 micro-batches a step, one a rank",
            "micro_batch_size=8",
        ),
        (
            ["strategy.schedule=dualpipev", "callbacks.grad_accumulation.micro_batch_size=16"],
            "at least 4 micro-batches a step, one a stage",
            "callbacks.grad_accumulation.micro_batch_size=8",
        ),
        (
            ["strategy.schedule=interleaved_1f1b", "train.global_batch_size=10", "callbacks.grad_accumulation.micro_batch_size=2"],
            "make 5; nearest",
            "callbacks.grad_accumulation.micro_batch_size=5",
        ),
        (
            ["train.global_batch_size=7", "callbacks.grad_accumulation.micro_batch_size=7"],
            "make 1; nearest: 7",
            "callbacks.grad_accumulation.micro_batch_size=1",
        ),
        (["train.global_batch_size=1", "callbacks.grad_accumulation.micro_batch_size=1"], "nearest: 2", "train.global_batch_size=2"),
        (["strategy.schedule=zbv", "strategy.virtual_stages=3"], "takes exactly 2 a rank", "strategy.virtual_stages=2"),
        (["strategy.schedule=interleaved_1f1b", "strategy.virtual_stages=1"], "takes 2 or more a rank", "strategy.virtual_stages=2"),
        (["strategy.virtual_stages=2"], "strategy.schedule=1f1b takes exactly 1 a rank", "strategy.virtual_stages=1"),
        (["strategy.schedule=zbv", "strategy.dp_shard=2"], "strategy.zero=3 under strategy.pp=2", "strategy.zero=1"),
        (["strategy.dp_shard=2", "strategy.zero=1", "strategy.find_unused_parameters=true"], "which gradients it made", "=false"),
        (["strategy.schedule=2f2b"], "strategy.schedule=2f2b", ""),
    ],
)
def test_what_does_not_fit_is_refused_with_its_remedy(checked: Make, words: list[str], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(PIPELINE, *words)
    assert found in caught.value.message
    assert remedy in (caught.value.remedy or "")


def test_what_a_refusal_advises_is_accepted(checked: Make) -> None:
    checked(PIPELINE, "strategy.pp=4", "callbacks.grad_accumulation.micro_batch_size=8")
    checked(PIPELINE, "strategy.schedule=interleaved_1f1b", "train.global_batch_size=10", "callbacks.grad_accumulation.micro_batch_size=5")
    checked(PIPELINE, "callbacks=[none,grad_accumulation]")


def test_knobs_of_a_pipeline_need_one(checked: Make) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.stage_split=.* needs strategy\.pp"):
        checked("strategy=ddp", "strategy.stage_split=[blocks.1]")


def test_where_stages_lie() -> None:
    assert holders("1f1b", 4, 4) == (0, 1, 2, 3)
    assert holders("interleaved_1f1b", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert holders("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert [stages_a_rank(name, None) for name in SCHEDULES] == [1, 1, 2, 2, 2, 2]


def test_what_schedules_take() -> None:
    assert [n for n in range(1, 11) if takes("1f1b", n, 4)] == [4, 5, 6, 7, 8, 9, 10]
    assert [n for n in range(1, 13) if takes("interleaved_1f1b", n, 4)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert [n for n in range(1, 10) if takes("dualpipev", n, 4)] == [8, 9]
    assert nearest("1f1b", 2, 4, divides=32) == 4
    assert nearest("dualpipev", 3, 2, divides=3) is None


def test_bubbles_of_the_papers() -> None:
    assert bubble("gpipe", 4, 4, 1) == 3 / 7
    assert bubble("interleaved_1f1b", 8, 4, 2) == 3 / 19
    assert bubble("zbv", 8, 4, 2) == 3 / 51
