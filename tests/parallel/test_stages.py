"""Where a model is cut: by cost, by name, by its own statement. Cuts by hand."""

from __future__ import annotations

import pytest
from torch import nn

from disttrain.errors import ConfigError
from disttrain.models.gpt import GPT
from disttrain.parallel.layout import Held
from disttrain.parallel.stages import Unit, balanced_starts, held_by, keep_own, make_stages, units_of


def chain(*costs: float, ends: tuple[float, float] | None = None) -> list[Unit]:
    """Blocks of these costs, between what comes first and last."""
    blocks = [Unit((f"blocks.{number}",), None, cost, True) for number, cost in enumerate(costs)]
    return blocks if ends is None else [Unit(("first",), None, ends[0], False), *blocks, Unit(("last",), None, ends[1], False)]


@pytest.mark.parametrize(
    ("units", "stages", "starts"),
    [
        (chain(1, 1, 1, 1), 2, [2]),
        (chain(1, 1, 1, 1, 1), 2, [2]),
        (chain(1, 1, 1, 1, ends=(0, 2)), 2, [4]),  # the head weighs two blocks: 3 | 1 + head
        (chain(5, 1, 1, 1), 2, [1]),
        (chain(1, 1, 1, 1, 1, 1, ends=(0, 1)), 3, [3, 5]),  # 2 | 2 | 2 + head is the least that can be
        (chain(1, 1, ends=(0, 9)), 2, [2]),  # each stage has a block, however heavy the head
        (chain(0, 0, 0, 0), 4, [1, 2, 3]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(units: list[Unit], stages: int, starts: list[int]) -> None:
    assert balanced_starts(units, stages) == starts


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers for 4 pipeline stages"):
        balanced_starts(chain(1, 1, 1, ends=(1, 1)), 4)


def gpt(**fields: int | bool) -> GPT:
    return GPT(**{"num_layers": 3, "num_heads": 1, "hidden_size": 8, "vocab_size": 16, "max_seq_len": 4} | fields)  # type: ignore[arg-type]


def test_a_model_states_its_units() -> None:
    units = units_of(gpt())
    assert [unit.modules for unit in units] == [
        ("tokens", "positions", "dropout"),
        ("blocks.0",),
        ("blocks.1",),
        ("blocks.2",),
        ("norm", "head"),
    ]
    assert units[-1].cost == 2 * 4 * 8 * 16
    assert [unit.modules[0] for unit in units_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))] == ["0", "1"]


def test_cuts_by_name() -> None:
    stages = make_stages(gpt(), (0, 1, 2), ["blocks.0", "norm"])
    assert [[unit.modules[0] for unit in units] for units in stages.units] == [["tokens"], ["blocks.0", "blocks.1", "blocks.2"], ["norm"]]


def test_what_stays_keeps_its_names_and_tied_weights_have_two_homes() -> None:
    model = gpt()
    stages = make_stages(model, (0, 1), [])
    held = held_by(model, stages)
    assert held["tokens.weight"] == Held((0, 1))
    assert held["blocks.2.mlp.up.weight"] == Held((1,))
    keep_own(model, stages, 1, held)
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, at in held.items() if 1 in at.at}
    assert "positions.weight" not in names
    with pytest.raises(RuntimeError, match="another pipeline stage"):
        model.blocks[0](None)


def test_on_a_v_first_and_last_stage_are_one_home() -> None:
    model = gpt(num_layers=4)
    assert held_by(model, make_stages(model, (0, 1, 1, 0), []))["tokens.weight"] == Held((0,))
    untied = gpt(num_layers=4, tie_embeddings=False)
    assert held_by(untied, make_stages(untied, (0, 1), []))["head.weight"] == Held((1,))


class Loose(GPT):
    """Has a parameter that belongs to no part."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, num_heads=1, hidden_size=8, vocab_size=16, max_seq_len=4)
        self.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())


def test_a_parameter_of_no_part_is_refused() -> None:
    model = Loose()
    with pytest.raises(ConfigError, match="'scale' is in none of the modules"):
        held_by(model, make_stages(model, (0, 1), []))
