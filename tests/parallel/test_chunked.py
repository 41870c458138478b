"""The loss some tokens at a time: the same numbers, and no tensor as large as whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as start_world
from disttrain.models.block import TransformerBlock
from disttrain.models.gpt import GPT
from disttrain.models.task import IGNORED, LanguageModelling, Regression, token_cross_entropy
from disttrain.parallel.chunked import ChunkedHead, chunk_loss
from disttrain.parallel.mesh import Mesh
from tests import tiny
from tests.parallel.ranks import prepared, run_step

RunWorld = Callable[..., list[Any]]
ALONE = Mesh().axis("tp")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head_and_rows(bias: bool) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A head of 12 classes, 10 rows, their targets (some ignored), and what the losses are weighted with."""
    head = nn.Linear(6, 12, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number) * 30)  # exp alone would overflow float32
    targets = torch.tensor([0, 11, IGNORED, 3, 4, IGNORED, 7, 8, 2, 5])
    return head, draw(10, 6, seed=5).requires_grad_(), targets, draw(10, seed=6)


@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool) -> None:
    head, x, targets, weights = head_and_rows(bias)
    wanted = token_cross_entropy(head(x), targets)
    (wanted * weights).sum().backward()
    right = [x.grad, *(parameter.grad for parameter in head.parameters())]
    x.grad = head.weight.grad = None
    if bias:
        head.bias.grad = None
    found = ChunkedHead(head, ALONE).row_loss(chunk)(x, targets)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for gradient, wanted in zip([x.grad, *(parameter.grad for parameter in head.parameters())], right, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_half_types_stay_as_near_as_whole_logits() -> None:
    head, x, targets, weights = head_and_rows(bias=False)
    exact = token_cross_entropy(head(x), targets)
    (gradient,) = torch.autograd.grad((exact * weights).sum(), x)
    head, x = head.float(), x.detach().float().requires_grad_()
    off = []
    for row_loss in (ChunkedHead(head, ALONE).row_loss(3), lambda rows, targets: token_cross_entropy(head(rows), targets)):
        with torch.autocast("cpu", torch.bfloat16):
            losses = row_loss(x, targets)
        assert losses.dtype == torch.float32
        (found,) = torch.autograd.grad((losses * weights).sum(), x)
        off.append(float((found - gradient).norm() / gradient.norm()))
    assert off[0] < 2 * off[1] + 1e-6


# --- what exists -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest number of elements that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


WIDE = tiny.GPT | {"vocab_size": 512, "num_layers": 1, "num_heads": 2, "hidden_size": 8}
LAYOUTS: dict[str, dict[str, Any]] = {"single": {}, "tp2_sp": {"tp": 2, "sequence_parallel": True}, "cp2": {"cp": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_logits_exist_only_without_chunks(layout: str) -> None:
    """In training and in evaluation; the head's own weight is the largest thing else."""
    arguments = LAYOUTS[layout]
    size = int(tiny.config(**arguments).launch.world_size)
    data = tiny.TOKENS | {"vocab_size": 512}

    def entry(place: Place, chunk: int | None) -> list[int]:
        trainer = prepared(place, model=WIDE, dataset=data, strategy={"loss_chunk": chunk}, **arguments)
        with Largest() as training:
            run_step(trainer, 0)
        with Largest() as evaluating:
            trainer.evaluate()
        return [training.elements, evaluating.elements]

    logits = 8 * tiny.CONTEXT * 512 // size
    chunked = 512 * 8 // arguments.get("tp", 1)  # the weight, and its gradient; a chunk of 4 tokens has 4 * 512
    for found in start_world(entry, size, (None,)):
        assert found == [logits] * 2
    for found in start_world(entry, size, (4,)):
        assert found == [chunked] * 2


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}], ids=["single", "tp2_sp", "cp2", "pp2"])
def test_outputs_and_metrics_are_as_without(layout: dict[str, Any]) -> None:
    """Generation, a user's own call and metrics see logits."""
    import torchmetrics  # noqa: F401  here once, for all forked ranks

    model = tiny.GPT | {"task": {"_target_": "disttrain.models.task.LanguageModelling", "accuracy": True}}
    tokens = torch.randint(tiny.VOCABULARY, (2, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))

    def entry(place: Place, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        trainer = prepared(place, model=model, dtype="float64", micro_batch_size=2, **arguments)
        trainer.model.eval()
        return trainer.strategy.outputs(tokens), trainer.evaluate()

    ((outputs, metrics),) = start_world(entry, 1, ({},))
    assert "val/accuracy" in metrics
    for found, measured in start_world(entry, int(tiny.config(**layout).launch.world_size), (layout | {"strategy": {"loss_chunk": 5}},)):
        torch.testing.assert_close(found, outputs, rtol=1e-12, atol=1e-12)
        assert measured == pytest.approx(metrics, rel=1e-12)


# --- refused ---------------------------------------------------------------------------------------------------------------


class OwnLoss(LanguageModelling):
    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": outputs.flatten(1).sum(1)}


@pytest.mark.parametrize(
    ("model", "task", "plan", "message"),
    [
        (GPT(hidden_size=32), OwnLoss(), {}, "OwnLoss has a loss of its own"),
        (TransformerBlock(hidden_size=32), Regression(), {}, "Regression has a loss of its own"),
        (nn.Sequential(nn.Linear(2, 2)), LanguageModelling(), {}, "the plan of Sequential does not name one head"),
        (GPT(hidden_size=32), LanguageModelling(), {"loss": "whole"}, "the plan of GPT does not name one head"),
    ],
)
def test_other_losses_and_plans_are_refused(model: nn.Module, task: Any, plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        chunk_loss(model, task, dict(getattr(model, "plan", {})) | plan, ALONE, 4)
    assert caught.value.remedy == "strategy.loss_chunk=null"
