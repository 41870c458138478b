"""Schedules against their formulas; which parameters decay; how optimizers are made."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.block import TransformerBlock
from disttrain.models.cnn import SimpleCNN
from disttrain.models.gpt import GPT
from disttrain.train.optimizer import Constant, Cosine, Schedule, WarmupStableDecay, build_optimizer, from_torch, parameter_groups, tabulate
from tests import tiny
from tests.train.runs import EVERY_STEP, trainer_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [
        (Constant(10), [1.0] * 10),
        (Constant(10, warmup_steps=4), [0.25, 0.5, 0.75, *[1.0] * 7]),
        (Cosine(10, min_factor=0.1), [0.1 + 0.45 * (1 + math.cos(math.pi * n / 10)) for n in range(10)]),
        (Cosine(10, 2, 0.0), [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(8))]),
        (WarmupStableDecay(10, 2, 4), [0.5, 1.0, *[1.0] * 4, 1.0, 0.75, 0.5, 0.25]),
        (WarmupStableDecay(10), [*[1.0] * 9, 0.5]),
        (WarmupStableDecay(10, 0, 5, 0.5), [*[1.0] * 6, 0.9, 0.8, 0.7, 0.6]),
    ],
)
def test_schedules_follow_their_formulas(schedule: Schedule, by_hand: list[float]) -> None:
    assert [schedule(update) for update in range(10)] == pytest.approx(by_hand, rel=1e-12)
    assert tabulate(schedule, 10, CPU)[:10].tolist() == pytest.approx(by_hand, rel=1e-12)


def test_schedules_that_do_not_fit_into_a_run_are_refused() -> None:
    for make in (Constant, Cosine, WarmupStableDecay):
        with pytest.raises(ConfigError, match="warmup_steps=11 does not lie within the run's 10 steps"):
            make(10, 11)
    with pytest.raises(ConfigError, match="decay_steps=6 exceed") as caught:
        WarmupStableDecay(10, 5, 6)
    assert caught.value.remedy == "scheduler.decay_steps=5"


@pytest.mark.parametrize(
    ("make", "by_hand"),
    [
        (partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=4), [0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]),
        (partial(lr_scheduler.LinearLR, start_factor=0.5, total_iters=4), [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]),
    ],
)
def test_torchs_schedulers_follow_their_formulas(make: Any, by_hand: list[float]) -> None:
    num_steps = len(by_hand) - 1
    assert tabulate(from_torch(make, 0.1)(num_steps), num_steps, CPU).tolist() == pytest.approx(by_hand, abs=1e-12)


def test_what_a_table_of_rates_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="follows a metric"):
        from_torch(lr_scheduler.ReduceLROnPlateau, 0.1)(4)
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=4)
    with pytest.raises(ConfigError, match="moves momentum too"):
        tabulate(from_torch(one_cycle, 0.1)(3), 3, CPU)
    with pytest.raises(ConfigError, match="ends before the run's 9 steps"):
        tabulate(from_torch(partial(one_cycle, cycle_momentum=False), 0.1)(9), 9, CPU)
    with pytest.raises(ConfigError, match="after 2 updates is nan"):
        tabulate(lambda update: math.nan if update == 2 else 1.0, 4, CPU)


def decayed(model: nn.Module) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, dict(model.named_parameters()), 0.1)
    assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


def test_matrices_decay_and_nothing_else() -> None:
    small: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 8, "max_seq_len": 8}
    block = {f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    assert decayed(GPT(**small)) == block
    assert decayed(GPT(**small, tie_embeddings=False)) == block | {"head.weight"}
    assert decayed(TransformerBlock(hidden_size=8, num_heads=2)) == block
    assert decayed(SimpleCNN()) == {f"{name}.weight" for name in ("conv1", "conv2", "hidden", "head")}


def test_frozen_parameters_are_given_to_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model, dict(model.named_parameters()), 0.1)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model[1].parameters()}


@pytest.mark.world(2)
def test_groups_are_the_same_under_tensor_parallelism() -> None:
    def names(place: Place) -> list[set[str]]:
        trainer = trainer_of(place, tp=place.world_size, sequence_parallel=place.world_size > 1)
        by_id = {id(p): name for name, p in trainer.parameters.items()}
        return [{by_id[id(p)] for p in group["params"]} for group in trainer.update.optimizer.param_groups]

    (one,) = run_world(names, 1)
    assert run_world(names, 2) == [one, one]


def test_optimizers_are_fused_where_they_offer_it() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0}]
    for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        assert build_optimizer(partial(make, lr=0.1), groups).defaults["fused"] is True
    assert "fused" not in build_optimizer(partial(torch.optim.RMSprop, lr=0.1), groups).defaults


def test_the_rate_that_is_logged_is_the_one_used() -> None:
    """SGD moves by rate x gradient, so the rate can be read off the weights."""

    def rates(place: Place) -> tuple[list[float], list[float]]:
        trainer = trainer_of(
            place,
            steps=5,
            optimizer=tiny.SGD,
            scheduler={"_target_": "disttrain.train.optimizer.Cosine", "warmup_steps": 2},
            clip_norm=None,
            dtype="float64",
            **EVERY_STEP,
        )
        used: list[float] = []
        parameter = trainer.parameters["norm.weight"]
        seen: dict[str, torch.Tensor] = {}

        def before(t: Any, report: Any) -> None:
            assert parameter.grad is not None
            seen.update(weight=parameter.detach().clone(), grad=parameter.grad.clone())

        def after(t: Any, report: Any) -> None:
            moved = seen["weight"] - parameter.detach()
            used.append(float((moved @ seen["grad"]) / (seen["grad"] @ seen["grad"])))

        trainer._on["on_before_optimizer_step"].append(before)
        trainer._on["on_train_step_end"].append(after)
        trainer.fit()
        notes: Any = trainer.callbacks["notes"]
        return used, notes.column("train/lr")

    ((used, logged),) = run_world(rates, 1)
    assert logged == pytest.approx(used, rel=1e-6)
    assert logged == pytest.approx([0.05, 0.1, *(0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi * n / 3))) for n in range(3))], rel=1e-6)
