"""The kept lists of `FusedAdam` against the optimizer's own step, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from disttrain.parallel.fused import FusedAdam

Make = Callable[[list[dict]], torch.optim.Optimizer]
SKIPPED = (3, 4)


def groups(seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (2, 3), (2,))]
    return [{"params": made[::2], "weight_decay": 0.1}, {"params": made[1::2], "weight_decay": 0.0}]


def adamw(given: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given, lr=torch.tensor(1e-2), betas=(0.9, 0.95), fused=True)


def adam(given: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adam(given, lr=1e-2, maximize=True, fused=True)


def all_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_step(optimizer: torch.optim.Optimizer, scale: torch.Tensor, skip: torch.Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = scale, skip
    optimizer.step()


def fill(optimizer: torch.optim.Optimizer, number: int, missing: bool = False) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in all_of(optimizer):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    if missing:
        all_of(optimizer)[1].grad = None


def assert_same(found: torch.optim.Optimizer, wanted: torch.optim.Optimizer) -> None:
    for mine, own in zip(all_of(found), all_of(wanted), strict=True):
        assert torch.equal(mine, own)
        for name, value in wanted.state[own].items():
            assert torch.equal(found.state[mine][name], value), name


@pytest.mark.parametrize("make", [adamw, adam])
def test_steps_are_the_optimizers_own_skipped_ones_too(make: Make) -> None:
    found, wanted = make(groups()), make(groups())
    fused = FusedAdam(found)
    done = []
    for number in range(8):
        scale, skip = torch.tensor(1.0 + number), torch.tensor(float(number in SKIPPED))
        for optimizer in (found, wanted):
            fill(optimizer, number)
            if number == 5:
                optimizer.param_groups[0]["weight_decay"] = 0.3  # as a callback may
        done.append(fused(scale, skip))
        if not done[-1]:
            own_step(found, scale, skip)
        own_step(wanted, scale, skip)
        assert_same(found, wanted)
    assert done == [False] + [True] * 7
    assert [float(state["step"]) for state in found.state.values()] == [8.0 - len(SKIPPED)] * 4


def test_a_loaded_state_and_a_new_group_are_noticed() -> None:
    found, wanted = adamw(groups()), adamw(groups())
    fused, one, go = FusedAdam(found), torch.ones(()), torch.zeros(())

    def both(number: int) -> bool:
        for optimizer in (found, wanted):
            fill(optimizer, number)
        done = fused(one, go)
        if not done:
            own_step(found, one, go)
        own_step(wanted, one, go)
        assert_same(found, wanted)
        return done

    both(0)
    assert both(1)
    kept = copy.deepcopy(found.state_dict())
    assert both(2)
    for optimizer in (found, wanted):
        optimizer.load_state_dict(copy.deepcopy(kept))
        optimizer.param_groups[0]["lr"] = torch.tensor(3e-2)
    assert both(3)
    for optimizer in (found, wanted):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    assert not both(4)  # the new one has no moments yet
    assert both(5)


def test_what_it_does_not_do_is_left_to_the_optimizer() -> None:
    one, go = torch.ones(()), torch.zeros(())

    def begun(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        fill(optimizer, 0)
        own_step(optimizer, one, go)
        fill(optimizer, 1)
        return optimizer

    class Own(torch.optim.AdamW):
        pass

    hooked = begun(adamw(groups()))
    hooked.register_step_pre_hook(lambda *_: None)
    incomplete = begun(adamw(groups()))
    fill(incomplete, 1, missing=True)
    others = [
        hooked,
        incomplete,
        begun(Own(groups(), fused=True)),
        begun(torch.optim.AdamW(groups(), amsgrad=True, fused=True)),
        begun(torch.optim.SGD(groups(), lr=1e-2, fused=True)),
    ]
    for optimizer in others:
        before = [parameter.detach().clone() for parameter in all_of(optimizer)]
        assert not FusedAdam(optimizer)(one, go)
        assert all(torch.equal(was, now) for was, now in zip(before, all_of(optimizer), strict=True))
