"""Models that draw random numbers: dropout by whatever name is found and set to zero, other draws are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from disttrain.models.task import Regression
from disttrain.parallel.plan import rates
from disttrain.verify import verb
from tests import tiny


class Masked(nn.Module):
    """Dropout that no key of the config names."""

    plan = {"up": "column", "mask": "heads", "down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mask, self.down = nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)
        self.task = Regression()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.mask(self.up(x).relu()))
        return y


class Noisy(Masked):
    """Random numbers that no attribute tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1))


def prove(name: str) -> verb.Proof:
    model = {"_target_": f"tests.verify.test_random.{name}"}
    return verb.prove(tiny.config(tp=2, model=model, dataset=tiny.VECTORS, micro_batch_size=4, verify={"steps": 1}))


@pytest.mark.world(2)
def test_dropout_that_the_config_does_not_name_is_found() -> None:
    proof = prove("Masked")
    assert proof.equal, (proof.failed, proof.cause)
    assert proof.notes[-1] == "dropout 0.5: equality shown at 0, masks compared over the tensor group at 0.5"


@pytest.mark.world(2)
def test_other_draws_are_told() -> None:
    assert "random numbers by more than the dropout" in prove("Noisy").notes[-1]


def test_a_rate_is_told_from_other_numbers() -> None:
    assert rates(nn.Dropout(0.1)) == {"p": 0.1}
    assert rates(nn.MultiheadAttention(4, 2, dropout=0.2)) == {"dropout": 0.2}
    assert rates(nn.LSTM(4, 4, 2, dropout=0.3)) == {"dropout": 0.3}
    assert rates(nn.PairwiseDistance(p=1.0)) == rates(nn.LayerNorm(4)) == rates(nn.Dropout(0.0)) == {}
