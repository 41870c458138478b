"""Tensor-parallel layers against plain ones: what moves, what is saved, what each rank holds and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.models.projections import Projections
from disttrain.models.task import IGNORED
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.parallel.plan import apply_tensor_plan
from disttrain.parallel.random import Streams
from disttrain.parallel.tensor import ColumnLinear, RowLinear
from disttrain.parallel.vocabulary import VocabEmbedding, vocab_cross_entropy
from tests import tiny
from tests.parallel.ranks import prepared, run_step, sizes

RunWorld = Callable[..., list[Any]]
CPU = torch.device("cpu")
NOBODY = Axis("tp", 3, 0, (0, 1, 2))
"""An axis of three ranks that no process stands on."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- what moves ------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_moves_what_the_page_says(sequence_parallel: bool, run_world: RunWorld) -> None:
    """M2: two all-reduces forward and two backward, no all-gather; under sequence parallelism their halves."""

    def count(place: Place) -> list[dict[str, list[int]]]:
        trainer = prepared(place, tp=2, model=tiny.GPT | {"num_layers": 1}, sequence_parallel=sequence_parallel)
        block, axis = trainer.model.blocks[0], trainer.mesh.axis("tp")  # type: ignore[index]
        x = torch.ones(2, tiny.CONTEXT // (2 if sequence_parallel else 1), 32, requires_grad=True)
        axis.traffic.clear()
        y = block(x)
        forward = {name: list(calls) for name, calls in axis.traffic.items()}
        axis.traffic.clear()
        y.sum().backward()
        return [forward, axis.traffic]

    whole = 2 * tiny.CONTEXT * 32 * 4
    forward, backward = run_world(count)[0]
    if not sequence_parallel:
        assert forward == backward == {"all_reduce": [2, 2 * whole]}
    else:
        assert forward == {"all_gather": [2, 2 * whole], "reduce_scatter": [2, 2 * whole]}
        # Backward of the row maps gathers twice; the column maps' inputs are gathered again instead of kept.
        assert backward == {"all_gather": [4, 4 * whole], "reduce_scatter": [2, 2 * whole]}


@pytest.mark.world(4)
def test_each_rank_does_its_share_of_the_arithmetic() -> None:
    """M8: heads are local, so attention and feed-forward cost 1/tp on each rank."""

    def flops(place: Place) -> int:
        trainer = prepared(place, tp=place.world_size, model=tiny.BLOCK)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products the counter knows
            trainer.strategy.module.outputs(torch.ones(2, tiny.CONTEXT, 32, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    (one,), two, four = sizes(flops, 1, 2, 4)
    tokens, hidden = 2 * tiny.CONTEXT, 32
    products = 12 * hidden * hidden + 2 * tiny.CONTEXT * hidden  # multiply-adds a token: q, k, v, out, up, down; scores and values
    assert one == 3 * 2 * tokens * products
    assert [2 * n for n in two] == [one] * 2
    assert [4 * n for n in four] == [one] * 4


# --- gradients and replicas ----------------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_has_a_gradient_and_replicas_agree_to_the_bit(sequence_parallel: bool, run_world: RunWorld) -> None:
    """M1, M3, M13, C07: also after twenty updates."""

    def replicated(place: Place) -> list[dict[str, list[float]]]:
        trainer = prepared(place, tp=2, sequence_parallel=sequence_parallel, optimizer=tiny.SGD, steps=20)
        seen = []
        for number in range(20):
            report = run_step(trainer, number)
            assert all(parameter.grad is not None for parameter in trainer.parameters.values())
            whole = {name: p for name, p in trainer.parameters.items() if trainer.layouts[name].replicas() == 2}
            if number == 0:
                seen.append({name: p.grad.flatten().tolist() for name, p in whole.items()})  # type: ignore[union-attr]
            trainer.update(report)
        return [*seen, {name: p.flatten().tolist() for name, p in whole.items()}]

    first, second = run_world(replicated)
    assert first == second
    assert {"norm.weight", "blocks.0.attention_norm.bias", "blocks.1.mlp.down.bias", "positions.weight"} <= set(first[0])


@pytest.mark.world(4)
def test_the_norm_counts_every_element_once() -> None:
    """M14, C05: a model rich in norms and biases, in every tensor degree, against torch's own norm on one device."""

    def norm(place: Place) -> tuple[float, float]:
        trainer = prepared(place, tp=place.world_size, dtype="float64")
        report = run_step(trainer, 0)
        own = torch.nn.utils.get_total_norm([p.grad for p in trainer.parameters.values() if p.grad is not None])
        return float(report.grad_norm), float(own)

    (one,), two, four = sizes(norm, 1, 2, 4)
    assert one[0] == pytest.approx(one[1], rel=1e-12)
    assert [found for found, _ in (*two, *four)] == pytest.approx([one[1]] * 6, rel=1e-12)


# --- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_column_then_row_equals_two_plain_layers(run_world: RunWorld) -> None:
    """M5 too: a random bias is added once, on every rank alike, and its gradient is whole on each."""

    def check(place: Place) -> tuple[list[Any], list[str]]:
        axis = Mesh({"tp": 2}, place.rank).axis("tp")
        up, down = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate((*up.parameters(), *down.parameters())):
                parameter.copy_(draw(*parameter.shape, seed=number))
        x = draw(2, 4, 6, seed=9).requires_grad_()
        wanted = down(F.relu(up(x)))
        wanted.square().sum().backward()
        assert x.grad is not None
        whole = {"x": x.grad.clone(), "up": up.weight.grad, "down": down.weight.grad, "bias": down.bias.grad}

        mine = slice(4 * place.rank, 4 * place.rank + 4)
        up_part, down_part = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        with torch.no_grad():
            up_part.weight.copy_(up.weight[mine])
            up_part.bias.copy_(up.bias[mine])
            down_part.weight.copy_(down.weight[:, mine])
            down_part.bias.copy_(down.bias)
        x.grad = None
        column, row = ColumnLinear(up_part, axis, False), RowLinear(down_part, axis, False)
        y = row(F.relu(column(x)))
        y.square().sum().backward()
        for found, right in (
            (y, wanted),
            (x.grad, whole["x"]),
            (up_part.weight.grad, whole["up"][mine]),  # type: ignore[index]
            (down_part.weight.grad, whole["down"][:, mine]),  # type: ignore[index]
            (down_part.bias.grad, whole["bias"]),
        ):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        return y.tolist(), list(row.state_dict())

    first, second = run_world(check)
    assert first == second


@pytest.mark.world(2)
def test_a_gathered_column_output_goes_on_alike_everywhere(run_world: RunWorld) -> None:
    """I04: with a loss that is the same on all ranks, the gradients of input and weight are the plain layer's."""

    def check(place: Place) -> None:
        axis = Mesh({"tp": 2}, place.rank).axis("tp")
        whole, x = draw(8, 6), draw(2, 3, 6, seed=1).requires_grad_()
        weights = draw(2, 3, 8, seed=2)
        part = nn.Linear(6, 4, bias=False, dtype=torch.float64)
        with torch.no_grad():
            part.weight.copy_(whole[4 * place.rank :][:4])
        y = ColumnLinear(part, axis, False, gather=True)(x)
        (y * weights).sum().backward()
        torch.testing.assert_close(y, F.linear(x, whole))
        assert x.grad is not None
        assert part.weight.grad is not None
        torch.testing.assert_close(x.grad, weights @ whole)
        by_hand = weights.flatten(0, 1).t() @ x.detach().flatten(0, 1)
        torch.testing.assert_close(part.weight.grad, by_hand[4 * place.rank :][:4])

    run_world(check)


def test_a_row_layer_fed_a_whole_input_says_both_sizes() -> None:
    row = RowLinear(nn.Linear(256, 512), NOBODY, False)
    with pytest.raises(ValueError, match=r"256 input features.*fed 512"):
        row(torch.zeros(2, 512))


@pytest.mark.world(2)
@pytest.mark.parametrize("peak", [1.0, 300.0], ids=["small", "would overflow"])
def test_cross_entropy_over_a_cut_vocabulary_is_torchs(peak: float, run_world: RunWorld) -> None:
    def check(place: Place) -> None:
        axis = Mesh({"tp": 2}, place.rank).axis("tp")
        whole = (draw(6, 8) * peak).requires_grad_()
        targets = torch.tensor([0, 7, IGNORED, 3, 4, IGNORED])
        weights = draw(6, seed=1)
        wanted = F.cross_entropy(whole, targets, reduction="none", ignore_index=IGNORED)
        (wanted * weights).sum().backward()
        part = whole.detach().chunk(2, 1)[place.rank].clone().requires_grad_()
        found = vocab_cross_entropy(axis, IGNORED)(part, targets)
        (found * weights).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part.grad, whole.grad.chunk(2, 1)[place.rank], rtol=1e-12, atol=1e-12)
        assert found[2] == found[5] == 0.0

    run_world(check)


@pytest.mark.world(2)
def test_a_token_that_no_rank_holds_is_an_error(run_world: RunWorld) -> None:
    """As on one device: it would count as nothing, and training would go on."""

    def check(place: Place) -> None:
        axis = Mesh({"tp": 2}, place.rank).axis("tp")
        with pytest.raises(RuntimeError, match="not among the 16 of the vocabulary"):
            VocabEmbedding(nn.Embedding(8, 4), axis, sequence=False)(torch.tensor([[3, 16]]))
        with pytest.raises(RuntimeError, match="not among the 16 of the vocabulary"):
            vocab_cross_entropy(axis, IGNORED)(draw(2, 8), torch.tensor([IGNORED, 16]))

    run_world(check)


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_the_same_forward_and_backward(dtype: torch.dtype, run_world: RunWorld) -> None:
    """D10: one half type in both passes, gradients in the parameters' type."""

    def check(place: Place) -> set[str]:
        axis = Mesh({"tp": 2}, place.rank).axis("tp")
        seen: set[str] = set()
        matmul = {"mm", "bmm", "addmm", "linear", "matmul"}

        class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if func.__name__.split(".")[0] in matmul:
                    seen.update(str(x.dtype) for x in (*args, out) if isinstance(x, Tensor))
                return out

        up, down = nn.Linear(6, 4), nn.Linear(4, 6)
        x = torch.ones(2, 3, 6, requires_grad=True)
        with Recorder():
            with torch.autocast("cpu", dtype):
                y = RowLinear(down, axis, False)(ColumnLinear(up, axis, False)(x))
            y.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert {p.grad.dtype for layer in (up, down) for p in layer.parameters() if p.grad is not None} == {torch.float32}
        assert all(p.grad is not None for layer in (up, down) for p in layer.parameters())
        return seen

    assert run_world(check) == [{str(dtype)}] * 2


# --- plans ---------------------------------------------------------------------------------------------------------------


def streams() -> Streams:
    return Streams(0, CPU)


def test_heads_that_do_not_divide_are_refused_with_a_degree_that_does() -> None:
    """M15."""
    model = nn.ModuleDict({"qkv": Projections(32, {"q": 32, "k": 32, "v": 32}, bias=True, merged=True)})
    with pytest.raises(ConfigError, match=r"32 output features of 'qkv' are not divisible by strategy.tp=3") as caught:
        apply_tensor_plan(model, {"qkv": "column"}, NOBODY, False, streams())
    assert caught.value.remedy == "strategy.tp=2"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"linear": "rows"}, "style 'rows' of 'linear' is unknown"),
        ({"line*r.weight": "row"}, "no module is named"),
        ({"linear": "vocab_embedding"}, "does not fit 'linear', a Linear"),
    ],
)
def test_plans_that_mean_nothing_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_tensor_plan(nn.ModuleDict({"linear": nn.Linear(3, 3)}), plan, NOBODY, False, streams())
