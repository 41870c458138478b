"""Muon on parts is Muon on whole matrices, and that is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from disttrain.launch.place import alone
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.muon import Muon, WholeMatrices, orthogonal
from disttrain.verify import verb
from tests import tiny
from tests.parallel.ranks import prepared

MUON = {"_target_": "disttrain.parallel.muon.Muon", "lr": 1e-2, "weight_decay": 0.1}


def test_a_step_is_that_of_torch() -> None:
    """torch.optim.Muon with Moonshot's scale for matrices, torch.optim.AdamW for the rest; three steps."""
    generator = torch.Generator().manual_seed(0)
    ours = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in (("block.w", (6, 10)), ("block.b", (6,)))}
    theirs = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in ours.items()}
    layouts = {name: Layout(tuple(parameter.shape)) for name, parameter in ours.items()}
    whole = WholeMatrices({"block": nn.Identity()}, ours, layouts, Mesh())
    muon = Muon([{"params": list(ours.values())}], whole, lr=0.02, weight_decay=0.1)
    matrix = torch.optim.Muon([theirs["block.w"]], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW([theirs["block.b"]], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        for name in ours:
            ours[name].grad = torch.randn(ours[name].shape, generator=generator)
            theirs[name].grad = ours[name].grad.clone()
        for optimizer in (muon, matrix, rest):
            optimizer.step()
    for name in ours:
        rounding = 1e-6 if name == "block.b" else 0.02 * 0.2 * 10**0.5 * 0.05  # torch multiplies in bfloat16 on a CPU too
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=rounding)


def test_orthogonal_takes_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


@pytest.mark.parametrize(
    ("layout", "model"), [({"tp": 2}, tiny.GPT), ({"dp": 2}, tiny.LLAMA), ({"shard": 2}, tiny.LLAMA), ({"tp": 2, "shard": 2}, tiny.GPT)]
)
def test_equal_to_one_device(layout: dict[str, Any], model: dict[str, Any]) -> None:
    proof = verb.prove(tiny.config(model=model, optimizer=MUON, micro_batch_size=2, verify={"steps": 3}, **layout))
    assert proof.equal, (proof.failed, proof.cause)


def test_matrices_are_those_of_the_blocks() -> None:
    trainer = prepared(alone(), optimizer=MUON)
    names = {id(parameter): name for name, parameter in trainer.parameters.items()}
    groups = trainer.update.optimizer.param_groups
    matrices = {names[id(parameter)] for group in groups if group["muon"] for parameter in group["params"]}
    assert matrices == {name for name, p in trainer.parameters.items() if name.startswith("blocks.") and p.dim() == 2}
    assert sum(len(group["params"]) for group in groups) == len(trainer.parameters)
