"""A mixture of experts against its formula, one token at a time: routing, balance, capacity, ties, gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.models.experts import ExpertShape, MixtureOfExperts, grouped_linear
from disttrain.models.gpt import GPT
from disttrain.models.micro_batch import MicroBatch, attach, running
from disttrain.models.task import LanguageModelling
from disttrain.models.transformer import BlockShape

SHAPE = BlockShape(8, 2, 2, 12)
EXPERTS = ExpertShape(num_experts=4, top_k=2, intermediate_size=6, balance_weight=0.5)


def mixture(experts: ExpertShape = EXPERTS, shape: BlockShape = SHAPE) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(shape, experts).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def tokens(b: int = 3, t: int = 5) -> Tensor:
    return torch.empty(b, t, 8, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(1)).requires_grad_()


def by_hand(made: MixtureOfExperts, x_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and balance losses, token by token."""
    shape = made.shape
    outputs, balances = [], []
    for x_td in x_btd:
        load, shares = [0] * shape.num_experts, []
        room = [
            math.inf if shape.capacity_factor is None else math.ceil(shape.capacity_factor * len(x_td) * shape.top_k / shape.num_experts)
        ]
        room *= shape.num_experts
        rows = []
        for x in x_td:
            share = (made.router.weight @ x).softmax(0)
            chosen = sorted(range(shape.num_experts), key=lambda e, share=share: (-share[e].item(), e))[: shape.top_k]  # type: ignore[misc]
            total = sum(share[e] for e in chosen) if shape.top_k > 1 else 1.0
            y = torch.zeros_like(x)
            for e in chosen:
                load[e] += 1
                room[e] -= 1
                if room[e] >= 0:
                    y = y + share[e] / total * one_expert(made, e, x)
            rows.append(y if made.shared is None else y + made.shared(x))
            shares.append(share)
        mean = torch.stack(shares).mean(0)
        fractions = torch.tensor(load, dtype=torch.float64) * shape.num_experts / (shape.top_k * len(x_td))
        balances.append(shape.balance_weight * (fractions * mean).sum())
        outputs.append(torch.stack(rows))
    return torch.stack(outputs), torch.stack(balances)


def one_expert(made: MixtureOfExperts, e: int, x: Tensor) -> Tensor:
    up = made.experts.up[e] @ x
    hidden = F.gelu(up) if made.experts.gate is None else F.silu(made.experts.gate[e] @ x) * up
    return made.experts.down[e] @ hidden


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"num_shared": 2},
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.0, "top_k": 1},
        {"balance_weight": 0.0},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_formula(fields: dict[str, Any], mlp: str) -> None:
    made = mixture(replace(EXPERTS, **fields), replace(SHAPE, mlp=mlp))
    x, mine = tokens(), tokens()
    y, balances = by_hand(made, x)
    (y.square().sum() + balances.sum() * 2.0).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in made.named_parameters() if parameter.grad is not None}
    made.zero_grad()
    with running(MicroBatch(weights={"balance": 2.0})) as batch:
        found = made(mine)
        found.square().sum().backward()
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-10, atol=1e-10)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-10)
    if made.shape.balance_weight:
        torch.testing.assert_close(batch.attached["balance"], balances.sum(), rtol=1e-12, atol=0.0)


def test_of_equal_probabilities_the_lower_experts_win() -> None:
    made = mixture()
    torch.nn.init.zeros_(made.router.weight)
    weights_nk, chosen_nk, _ = made.route(tokens())
    assert chosen_nk.tolist() == [[0, 1]] * 15
    assert (weights_nk == 0.5).all()


def test_a_sequence_is_routed_alike_whatever_lies_beside_it() -> None:
    """Capacity and balance are each sequence's own, so micro-batches and ranks change nothing."""
    made = mixture(replace(EXPERTS, capacity_factor=0.75))
    x = tokens(4)
    whole = made(x)
    torch.testing.assert_close(torch.cat([made(part) for part in x.split(1)]), whole, rtol=1e-14, atol=1e-14)
    balance_b = made.route(x)[2]
    torch.testing.assert_close(torch.cat([made.route(part)[2] for part in x.split(2)]), balance_b, rtol=1e-14, atol=0.0)


def test_the_router_computes_in_float32_under_autocast() -> None:
    made = mixture().float()
    with torch.autocast("cpu", torch.bfloat16):
        weights_nk, _, balance_b = made.route(tokens().float())
        assert made(tokens().float()).shape == (3, 5, 8)
    assert weights_nk.dtype == balance_b.dtype == torch.float32
    exact, _, _ = made.route(tokens().float())
    torch.testing.assert_close(weights_nk, exact, rtol=0, atol=0)


def test_an_attached_loss_passes_values_and_adds_its_weighted_gradient() -> None:
    x, per_sample = torch.randn(3, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    valid = torch.tensor([True, False, True])
    with running(MicroBatch(valid, {"extra": torch.tensor(0.5, dtype=torch.float64)})) as batch:
        y = attach(attach(x, "extra", per_sample), "extra", per_sample * 2)
        assert torch.equal(y, x)
        y.sum().backward()
    assert x.grad is not None
    assert (x.grad == 1).all()
    assert per_sample.grad is not None
    assert per_sample.grad.tolist() == [1.5, 0.0, 1.5]
    assert float(batch.attached["extra"]) == 6.0
    assert attach(x, "extra", per_sample) is x
    with running(MicroBatch()), pytest.raises(ConfigError, match="the model attaches the loss term 'extra'"):
        attach(x, "extra", per_sample)


def test_a_recomputed_block_counts_its_balance_once() -> None:
    from torch.utils.checkpoint import checkpoint

    made = mixture()
    grads, sums = [], []
    for again in (False, True):
        x = tokens()
        with running(MicroBatch(weights={"balance": 1.0})) as batch:
            y = checkpoint(made, x, use_reentrant=False) if again else made(x)
            y.sum().backward()
        grads.append(x.grad)
        sums.append(batch.attached["balance"])
    assert torch.equal(sums[0], sums[1])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_grouped_products_and_the_kernel_for_gpus_agree() -> None:
    x, weight = torch.randn(10, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    counts = torch.tensor([3, 0, 7])
    kernel = F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    torch.testing.assert_close(grouped_linear(x, counts, weight), kernel, rtol=2e-2, atol=2e-2)


def test_every_second_block_has_experts_and_the_plan_names_what_is_there() -> None:
    def model(every: int, **fields: Any) -> GPT:
        return GPT(num_layers=4, hidden_size=16, num_heads=2, max_seq_len=8, experts=replace(EXPERTS, every=every), **fields)

    assert [isinstance(block.mlp, MixtureOfExperts) for block in model(2).blocks] == [False, True, False, True]
    assert "blocks.*.mlp.up" in model(2).plan
    assert "blocks.*.mlp.up" not in model(1).plan
    assert isinstance(model(1).task, LanguageModelling)
    assert model(1).task.attached == ("balance",)  # type: ignore[attr-defined]
    dense = GPT(num_layers=4, hidden_size=16, num_heads=2, max_seq_len=8)
    assert model(2).flops() - dense.flops() == 3 * 2 * (
        EXPERTS.flops(model(2).shape, 8) - (dense.shape.flops(8) - dense.shape.attention_flops(8))
    )


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k=5 is more than model\.experts\.num_experts=4"):
        ExpertShape(num_experts=4, top_k=5)
