"""Sequences cut over ranks: who holds which tokens, attention against the plain one, what is refused, what comes out whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as start_world
from disttrain.models.gpt import GPT
from disttrain.models.task import Classification, LanguageModelling, Regression
from disttrain.parallel import ring
from disttrain.parallel.context import ATTENTION, apply_context_plan, head_tail
from disttrain.parallel.mesh import Axis, Mesh
from tests import tiny
from tests.parallel.ranks import prepared

RunWorld = Callable[..., list[Any]]


def nobody(index: int, size: int = 4) -> Axis:
    """An axis that no process stands on."""
    return Axis("cp", size, index, tuple(range(size)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- who holds what ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_out_the_sequence_and_the_causal_work(size: int) -> None:
    length = 4 * size
    held = [head_tail(nobody(index, size), 1).positions(length // size, torch.device("cpu")) for index in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert len({int((positions + 1).sum()) for positions in held}) == 1, "a query at position p attends to p + 1 keys"
    sequence = torch.arange(length)[None]
    for index, positions in enumerate(held):
        assert head_tail(nobody(index, size), 1).part(sequence)[0].tolist() == positions.tolist()


@pytest.mark.world(3)
def test_parts_make_the_whole_in_its_order(run_world: RunWorld) -> None:
    x = draw(2, 12, 5)

    def entry(place: Place) -> Tensor:
        cut = head_tail(Mesh({"cp": 3}, place.rank).axis("cp"), 1)
        return cut.whole(cut.part(x))

    assert all(torch.equal(found, x) for found in run_world(entry))


@pytest.mark.parametrize(
    ("batch", "message", "remedy"),
    [
        (torch.zeros(2), r"shape \(2,\), which has no tokens", "strategy=ddp"),
        (torch.zeros(2, 13), "13 tokens are not divisible by 8", "dataset.context=16"),
    ],
)
def test_what_cannot_be_cut_is_told(batch: Tensor, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        head_tail(nobody(0), 1).part(batch)
    assert caught.value.remedy == remedy


# --- attention -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_attention_over_ranks_is_plain_attention(size: int, causal: bool) -> None:
    """Values and gradients, in float64, of grouped-query heads: two key-value heads for six."""
    length = 4 * size
    q, k, v = (draw(2, heads, length, 8, seed=heads + number).requires_grad_() for number, heads in enumerate((6, 2, 2)))
    weights = draw(2, 6, length, 8, seed=9)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    (wanted * weights).sum().backward()

    def entry(place: Place, attention: str) -> None:
        cut = head_tail(Mesh({"cp": size}, place.rank).axis("cp"), 1)

        def mine(x: Tensor | None) -> Tensor:
            assert x is not None
            return cut.part(x.detach().transpose(1, 2)).transpose(1, 2)

        parts = [mine(x).requires_grad_() for x in (q, k, v)]
        y = ATTENTION[attention](cut.axis)(*parts, causal, 0.0)
        (y * mine(weights)).sum().backward()
        torch.testing.assert_close(y, mine(wanted), rtol=1e-12, atol=1e-12)
        for found, whole in zip(parts, (q, k, v), strict=True):
            torch.testing.assert_close(found.grad, mine(whole.grad), rtol=1e-12, atol=1e-12)

    for attention in ATTENTION:
        start_world(entry, size, (attention,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "causal"), [(12, True), (6, False)], ids=["triangle", "rectangle"])
def test_a_blocks_formulas_are_its_fused_kernel(rows: int, causal: bool, dtype: torch.dtype) -> None:
    q, k, v, grad = draw(2, 4, rows, 8), draw(2, 2, 12, 8, seed=1), draw(2, 2, 12, 8, seed=2), draw(2, 4, rows, 8, seed=3)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    out, lse = ring.block_forward(q, k, v, causal)
    fused = [out, lse, *ring.block_backward(grad, q, k, v, out, lse, causal)]
    written = [*ring.written_forward(q, k, v, causal), *ring.written_backward(grad, q, k, v, out, lse, causal)]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    for found, wanted in zip(written, fused, strict=True):
        torch.testing.assert_close(found.to(torch.float64), wanted.to(torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "causal"), [(64, True), (32, False)], ids=["triangle", "rectangle"])
def test_a_block_on_a_gpu_is_its_formulas(rows: int, causal: bool, dtype: torch.dtype) -> None:
    shapes = [(2, 4, rows, 16), (2, 2, 64, 16), (2, 2, 64, 16), (2, 4, rows, 16)]
    q, k, v, grad = (draw(*shape, seed=number).to("cuda", dtype) for number, shape in enumerate(shapes))
    out, lse = ring.block_forward(q, k, v, causal)
    fused = [out, lse, *ring.block_backward(grad, q, k, v, out, lse, causal)]
    written = [*ring.written_forward(q, k, v, causal), *ring.written_backward(grad, q, k, v, out, lse, causal)]
    for found, wanted in zip(written, fused, strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=3e-2, atol=3e-2)


def test_the_ring_refuses_dropout_of_the_weights() -> None:
    with pytest.raises(ConfigError, match="without dropout") as caught:
        ring.ring_attention(nobody(0))(*(torch.zeros(1, 1, 2, 4),) * 3, True, 0.1)
    assert caught.value.remedy == "strategy.attention=gather"


# --- refused ---------------------------------------------------------------------------------------------------------------


def gpt() -> GPT:
    return GPT(num_layers=1, num_heads=2, hidden_size=16, vocab_size=16, max_seq_len=8)


class OwnCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v


class OwnLoss(LanguageModelling):
    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": outputs.flatten(1).logsumexp(1)}


class OwnTokenLoss(OwnLoss):
    by_token = True

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": outputs.flatten(1).sum(1)}


def with_core(model: GPT) -> GPT:
    model.blocks[0].attention.core = OwnCore()  # type: ignore[union-attr, assignment]
    return model


def with_more(model: GPT, module: nn.Module) -> GPT:
    model.more = module
    return model


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4)), Regression(), "names no attention"),
        (with_core(gpt()), LanguageModelling(), "'blocks.0.attention.core' .* OwnCore, whose forward takes no `positions`"),
        (gpt(), OwnLoss(), r"OwnLoss.losses may need whole sequences"),
        (
            with_more(gpt(), nn.MultiheadAttention(4, 2)),
            LanguageModelling(),
            "'more' is a MultiheadAttention and would see one rank's tokens",
        ),
        (with_more(gpt(), nn.Embedding(4, 4)), LanguageModelling(), "does not say whether 'more', an Embedding, is of positions"),
    ],
)
def test_models_and_tasks_that_need_whole_sequences_are_refused(model: Any, task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_context_plan(model, task, getattr(model, "plan", {}), head_tail(nobody(0), 1), "gather")


@pytest.mark.parametrize("task", [LanguageModelling(), Classification("tokens"), OwnTokenLoss()])
def test_tasks_that_are_sums_over_tokens_are_taken(task: Classification) -> None:
    apply_context_plan(gpt(), task, gpt().plan, head_tail(nobody(0), 1), "gather")


# --- whole on every rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 2, "tp": 2, "sequence_parallel": True}], ids=["cp2", "cp2_tp2_sp"])
def test_outputs_are_whole_and_in_order_on_every_rank(layout: dict[str, Any]) -> None:
    """What metrics and generation see."""
    tokens = torch.randint(tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))

    def entry(place: Place, arguments: dict[str, Any]) -> Tensor:
        trainer = prepared(place, model=tiny.LLAMA, dtype="float64", **arguments)
        return trainer.strategy.outputs(tokens)  # type: ignore[no-any-return]

    (alone,) = start_world(entry, 1, ({},))
    for found in start_world(entry, int(tiny.config(**layout).launch.world_size), (layout,)):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


def test_evaluation_and_its_metrics_are_one_devices() -> None:
    import torchmetrics  # noqa: F401  here once, for all forked ranks

    model = tiny.GPT | {"task": {"_target_": "disttrain.models.task.LanguageModelling", "accuracy": True}}

    def entry(place: Place, arguments: dict[str, Any]) -> dict[str, float]:
        return prepared(place, model=model, dtype="float64", dataset=tiny.TOKENS | {"uneven": True}, **arguments).evaluate()

    (alone,) = start_world(entry, 1, ({},))
    assert {"val/loss", "val/accuracy"} <= alone.keys()
    for layout in ({"cp": 2}, {"cp": 2, "dp": 2, "strategy": {"attention": "ring"}}):
        for found in start_world(entry, int(tiny.config(**layout).launch.world_size), (layout,)):  # type: ignore[arg-type]
            assert found == pytest.approx(alone, rel=1e-12)
