"""Closed formulas against numbers worked out by hand or printed in papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disttrain.config.schema import HardwareConfig
from disttrain.plan import compute, pipeline
from disttrain.plan.case import FULL, Layout
from disttrain.plan.closed import Closed, estimate, overlapped
from disttrain.plan.constants import Constants
from disttrain.plan.memory import fullest, layer_bytes, memory
from disttrain.plan.network import WIRE, Message, Span, seconds, spans
from disttrain.plan.shape import Shape
from tests.plan.conftest import LLAMA_70B, case

GPT3 = Shape(96, 12288, 96, 96, 49152, 51200, tied=True, positions=2048, vectors=13 * 12288, last_norm=2 * 12288)


def test_parameters_of_known_models() -> None:
    assert LLAMA_70B.parameters == pytest.approx(70.55e9, rel=1e-3)
    assert GPT3.parameters == pytest.approx(175e9, rel=6e-3)
    mixtral = Shape(32, 4096, 32, 8, 14336, 32000, gated=True, vectors=8192, experts=8, top_k=2)
    assert mixtral.parameters == pytest.approx(46.7e9, rel=2e-3)
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=2e-2)


def test_flops_of_a_forward_are_those_of_narayanan() -> None:
    """24 b s l h^2 (1 + s / (6h)) for a whole square of scores (arXiv:2104.04473, appendix), without the head."""
    layout = Layout(micro_batch=2)
    one = replace(case(layout, GPT3, 2048, 2), software=replace(case(layout).software, kernel="unfused"))
    work = compute.layer_forward(one)
    expected = 24 * 2 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288))
    assert work.flops == pytest.approx(expected, rel=1e-6)


def test_bytes_on_the_wire() -> None:
    assert [WIRE["all_reduce"](n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]
    assert [WIRE["all_gather"](n) for n in (2, 4, 8)] == [0.5, 0.75, 0.875]
    assert WIRE["broadcast"](8) == WIRE["send"](2) == 1.0


def test_groups_as_the_cables_see_them() -> None:
    found = spans(Layout(tp=4, cp=2, dp_shard=16, pp=2), 8)
    assert found["tp"] == Span(4, 4)
    assert found["cp"] == Span(2, 2)
    assert found["dp_shard"] == Span(32, 2)  # with the context axis, as other programs share out states
    assert found["dp_shard"].nodes == 16
    assert spans(Layout(tp=4, cp=2, dp_shard=16, share_context=False), 8)["dp_shard"] == Span(16, 1)
    assert found["pp"].nodes == 2
    assert spans(Layout(tp=16), 8)["tp"].nodes == 2


def test_a_tensor_axis_over_two_nodes_costs_more_than_inside_one(h100: HardwareConfig) -> None:
    message = Message("tp", "all_reduce", 128e6)
    inside = seconds(message, Span(8, 8), h100, Constants())
    over = seconds(message, Span(16, 8), h100, Constants())
    assert over > inside
    assert seconds(message, Span(1, 1), h100, Constants()) == 0.0


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [("gpipe", 1, 9.0), ("1f1b", 1, 9.0), ("interleaved_1f1b", 3, 3.0), ("interleaved_zero_bubble", 1, 3.0), ("zbv", 2, 1.5)],
)
def test_bubbles_of_four_stages_with_equal_times(schedule: str, chunks: int, expected: float) -> None:
    assert pipeline.bubble(schedule, 4, chunks, pipeline.Times(1.0, 1.0, 1.0)) == expected
    assert pipeline.bubble(schedule, 1, chunks, pipeline.Times(1.0, 1.0, 1.0)) == 0.0


def test_micro_batches_in_flight() -> None:
    assert pipeline.in_flight("gpipe", 4, 1, 16, 0) == 16
    assert [pipeline.in_flight("1f1b", 4, 1, 16, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert pipeline.in_flight("1f1b", 4, 1, 2, 0) == 2
    interleaved = pipeline.in_flight("interleaved_1f1b", 8, 3, 64, 0)
    assert interleaved == pytest.approx(8 * (1 + 7 / (8 * 3)), rel=0.01)  # Korthikanti et al. 2022, section 4.3


def test_stages_are_balanced_with_the_head_counted() -> None:
    assert pipeline.balanced(28, 8, 3.56) == (4, 4, 4, 4, 4, 4, 4, 0)
    assert pipeline.balanced(32, 4, 0.0) == (8, 8, 8, 8)
    for layers, stages, head in ((80, 8, 0.9), (7, 4, 1.5), (5, 4, 0.2), (12, 1, 3.0)):
        found = pipeline.balanced(layers, stages, head)
        assert sum(found) == layers
        assert len(found) == stages


def test_activations_are_34_sbh_for_a_gpt_block_under_flash_attention() -> None:
    """34 less two dropout masks of a byte, and the log-sums (Korthikanti et al. 2022, table 2)."""
    one = case(Layout(micro_batch=1), GPT3, 2048, 1)
    assert layer_bytes(one) == pytest.approx(2048 * 12288 * 32, rel=2e-3)
    cut = case(Layout(tp=8, sequence_parallel=True), GPT3, 2048, 1)
    assert layer_bytes(cut) == pytest.approx(2048 * 12288 * 32 / 8, rel=2e-3)
    whole = case(Layout(tp=8), GPT3, 2048, 1)
    assert layer_bytes(whole) > 2 * layer_bytes(cut)


def test_zero_shares_out_states_then_gradients_then_weights() -> None:
    one = memory(case(Layout(dp_replicate=8)), 0)
    for zero, cut in ((1, {"optimizer"}), (2, {"optimizer", "gradients"}), (3, {"optimizer", "gradients", "weights"})):
        other = memory(case(Layout(dp_shard=8, zero=zero)), 0)
        for kind in ("optimizer", "gradients", "weights"):
            assert getattr(other, kind) == pytest.approx(getattr(one, kind) / (8 if kind in cut else 1))


def test_shares_that_rest_in_host_memory_pass_through_the_device_all_the_same() -> None:
    layout = Layout(dp_shard=8, zero=3)
    here, away = memory(case(layout), 0), memory(case(replace(layout, offload=True)), 0)
    assert (away.weights, away.gradients, away.optimizer) == (0.0, 0.0, 0.0)
    assert away.workspace == here.workspace > 0


def test_powersgd_says_less_in_less_time(h100: HardwareConfig) -> None:
    whole, low = (estimate(case(Layout(dp_replicate=64, tp=8, compression=kind)), h100, Constants()) for kind in ("none", "powersgd"))
    assert low.exposed["data"] < 0.1 * whole.exposed["data"]


def test_recomputation_pays_time_for_memory(h100: HardwareConfig) -> None:
    layout = Layout(dp_shard=8, tp=8, zero=1, sequence_parallel=True)
    kept, again = case(layout), case(replace(layout, recompute=FULL))
    assert fullest(again)[1].activations < 0.1 * fullest(kept)[1].activations
    slower = estimate(again, h100, Constants()).step / estimate(kept, h100, Constants()).step
    assert 1.2 < slower < 1.4


def test_the_parts_of_a_step_add_up(h100: HardwareConfig) -> None:
    layout = Layout(dp_shard=16, tp=8, pp=8, zero=1, sequence_parallel=True, recompute=FULL)
    found = estimate(case(layout), h100, Constants())
    parts = (found.products, found.attention, found.memory, found.recompute, found.bubble, found.optimizer, found.overhead)
    assert found.step == pytest.approx(sum(parts) + sum(found.exposed.values()))
    assert min(parts) > 0
    assert set(found.exposed) == {"tp", "pp", "data"}


def test_nothing_is_hidden_at_one_and_all_but_the_longer_at_infinity() -> None:
    assert overlapped(3.0, 2.0, 1.0) == pytest.approx(2.0)
    assert overlapped(3.0, 2.0, 200.0) == pytest.approx(0.0, abs=1e-6)
    assert overlapped(2.0, 3.0, 200.0) == pytest.approx(1.0, abs=1e-6)


def test_counting_once_serves_many_constants(h100: HardwareConfig) -> None:
    closed = Closed(case(Layout(dp_shard=64, tp=8, zero=3)), h100)
    fast, slow = closed.seconds(Constants(matmul=0.9)), closed.seconds(Constants(matmul=0.45))
    assert slow.products > 1.9 * fast.products
