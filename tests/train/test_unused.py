"""A parameter that takes no part in the loss: named by default, trained around when asked for; the search is off unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain import build
from disttrain.config.compose import compose, composer, parse
from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.models.task import Regression
from disttrain.parallel.data import Reducer
from tests import tiny

RunWorld = Callable[..., list[Any]]


class TwoHeads(nn.Module):
    """Only one of its heads is used."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Regression()
        self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def three_steps(place: Place, find: bool | None) -> tuple[bool, bool, list[bool]]:
    """Whether either head moved, and what each reducer was told."""
    told: list[bool] = []
    original = Reducer.__init__

    def noting(self: Reducer, parameters: Any, axis: Any, bucket_size: float, find_unused: bool, *more: Any) -> None:
        told.append(find_unused)
        original(self, parameters, axis, bucket_size, find_unused, *more)

    Reducer.__init__ = noting  # type: ignore[method-assign]
    config = tiny.config(dp=2, model={"_target_": "tests.train.test_unused.TwoHeads"}, dataset=tiny.VECTORS, steps=3)
    if find is not None:
        config.strategy = replace(config.strategy, find_unused_parameters=find)
    trainer = build.build_trainer(config, None, place)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trainer.fit()
    moved = [not torch.equal(before[name], trainer.parameters[name]) for name in ("used.weight", "unused.weight")]
    return moved[0], moved[1], told


@pytest.mark.world(2)
def test_by_default_the_unused_parameters_are_named(run_world: RunWorld) -> None:
    """C11, J08."""
    with pytest.raises(
        UserError, match=r"took no part in the loss of a step.*: unused\.bias, unused\.weight\n.*find_unused_parameters=true"
    ):
        run_world(three_steps, None)


@pytest.mark.world(2)
def test_asked_for_the_run_trains_and_the_unused_head_stays(run_world: RunWorld) -> None:
    """C11, J08."""
    assert run_world(three_steps, True) == [(True, False, [True])] * 2


def test_the_search_is_off_in_the_config_that_nobody_changed() -> None:
    """J08: it walks all parameters and reads once on the host, each step."""
    request = parse(["strategy=ddp"])
    with composer(request) as app:
        _, config = compose(app, request)
    assert config.strategy.find_unused_parameters is False
