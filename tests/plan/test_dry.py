"""The dry run against real ranks, and the closed form against the dry run, to the byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from disttrain import cli
from disttrain.config.compose import compose, composer, parse
from disttrain.config.schema import Config
from disttrain.data.dataset import Position
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.plan import beside, dry, pipeline, rehearsal
from disttrain.plan.case import Case
from disttrain.plan.constants import Constants
from disttrain.plan.planned import Plan, make
from disttrain.plan.settle import settle
from tests import tiny
from tests.parallel.ranks import prepared
from tests.plan.conftest import hardware

BF16 = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "bf16"}}
FOUR, LLAMA_FOUR = tiny.GPT | {"num_layers": 4}, tiny.LLAMA | {"num_layers": 4}

Counted = dict[str, dict[str, list[float]]]


def real(place: Place, **config: Any) -> tuple[Counted, int]:
    """What a rank calls in its second step, and the elements that it holds."""
    trainer = prepared(place, micro_batch_size=2, **config)
    strategy = trainer.strategy
    first, second = trainer.feed.steps(iter([(number, Position(0, number)) for number in range(2)]))
    strategy.count(first)
    trainer.update(strategy.finish(strategy.forward_backward(first), first, following=second))
    for axis in trainer.mesh.axes():
        axis.traffic.clear()
    trainer.update(strategy.finish(strategy.forward_backward(second), second, following=second))
    traffic = {axis.name: {kind: list(map(float, entry)) for kind, entry in axis.traffic.items()} for axis in trainer.mesh.axes()}
    return {axis: kinds for axis, kinds in traffic.items() if kinds}, sum(one.numel() for one in trainer.parameters.values())


def rehearsed(config: Config, case: Case) -> list[dry.Counts]:
    """A dry run of every pipeline rank."""

    def entry(place: Place) -> list[dry.Counts]:
        entering = dry.leaving(config) if case.layout.pp > 1 else None
        ranks = [stage * (case.layout.world // case.layout.pp) for stage in range(case.layout.pp)]
        return [dry.run(config, rank, case.micro_batches, entering) for rank in ranks]

    return run_world(entry, 1, warm=rehearsal.WARM)[0]  # type: ignore[no-any-return]


LAYOUTS: Mapping[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "fsdp": {"shard": 2, "strategy": {"zero": 3}},
    "cp": {"cp": 2, "model": tiny.LLAMA},
    "pp": {"pp": 2},
    "4d": {"shard": 2, "tp": 2, "cp": 1, "pp": 2, "strategy": {"zero": 1}, "callbacks": BF16},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_calls_what_real_ranks_call(name: str) -> None:
    config = tiny.config(micro_batch_size=2, **LAYOUTS[name])
    case = settle(config).case
    ranks = run_world(lambda place: real(place, **LAYOUTS[name]), case.layout.world, warm=rehearsal.WARM)
    for counts in rehearsed(config, case):
        assert counts.traffic == ranks[counts.rank][0]
        assert counts.parameters == ranks[counts.rank][1]


# --- the closed form --------------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {},
    {"dp": 4, "model": tiny.LLAMA, "callbacks": BF16},
    {"dp": 2, "strategy": {"bucket_size": 0.02}},
    {"dp": 2, "strategy": {"compression": "bf16"}},
    {"dp": 2, "tp": 2, "cp": 2, "callbacks": BF16},
    {"dp": 2, "strategy": {"sync_every": 2}},
    {"tp": 4, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True, "model": tiny.LLAMA, "callbacks": BF16},
    {"tp": 2, "sequence_parallel": True, "model": FOUR, "strategy": {"recompute": "full", "recompute_every": 2}},
    {"tp": 2, "sequence_parallel": True, "strategy": {"recompute": "selective"}},
    {"tp": 2, "sequence_parallel": True, "strategy": {"loss_chunk": 8}},
    {"shard": 4, "model": tiny.LLAMA, "strategy": {"zero": 2}},
    {"shard": 2, "callbacks": BF16, "strategy": {"zero": 3, "gather_dtype": "bf16"}},
    {"dp": 2, "shard": 2, "tp": 2, "sequence_parallel": True, "strategy": {"zero": 3}},
    {"cp": 2, "model": tiny.LLAMA, "callbacks": BF16, "strategy": {"attention": "ring", "recompute": "full"}},
    {"pp": 2, "shard": 2, "micro": 1, "model": FOUR, "strategy": {"zero": 1}},
    {"pp": 4, "model": LLAMA_FOUR, "strategy": {"schedule": "gpipe"}},
    {"pp": 2, "model": FOUR, "strategy": {"schedule": "interleaved_1f1b"}},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "model": FOUR, "strategy": {"schedule": "interleaved_zero_bubble"}},
    {"pp": 2, "tp": 2, "model": FOUR, "strategy": {"schedule": "zbv"}},
    {"pp": 2, "model": LLAMA_FOUR, "strategy": {"schedule": "dualpipev"}},
]


@pytest.mark.parametrize("of", CASES, ids=lambda of: "-".join(str(word) for word in of) or "one")
def test_the_formulas_are_what_is_counted(of: dict[str, Any]) -> None:
    """Calls and bytes of every axis and kind, parameters and the optimizer's state: equal, on every pipeline rank."""
    given = dict(of)
    config = tiny.config(micro_batch_size=given.pop("micro", 2), **given)
    settled = settle(config)
    assert not settled.notes
    plan = make(settled.case, hardware("cpu"), Constants())
    for stage, counts in enumerate(rehearsed(config, settled.case)):
        for axis, kind, (_, calls, seen), (_, moved, counted) in beside.traffic_lines(plan, stage, counts):
            assert (calls, moved) == pytest.approx((seen, counted), abs=1e-6), (axis, kind)
        lines = {name: (by_formula, counted) for name, by_formula, counted in beside.memory_lines(plan, stage, counts)}
        for name in ("parameters", "weights at rest", "optimizer state"):
            by_formula, counted = lines[name]
            assert by_formula == counted, name


MIDDLING = {"num_heads": 8, "hidden_size": 256, "vocab_size": 2048, "max_seq_len": 128}
"""Large enough that what is kept outweighs what passes."""
TOKENS = tiny.TOKENS | {"context": 128, "vocab_size": 2048}
PEAKS: Mapping[str, tuple[dict[str, Any], float]] = {
    # what the formula leaves out, as a share of the peak: a few vectors (the step's, the schedule's, weights of the norm)
    "gpt": ({}, 1e-3),
    "gpt in bf16": ({"callbacks": BF16}, 1e-3),
    "llama": ({"model": tiny.LLAMA | MIDDLING}, 1e-3),
    "llama in bf16": ({"model": tiny.LLAMA | MIDDLING, "callbacks": BF16}, 1e-3),
    "zero 1": ({"shard": 2, "strategy": {"zero": 1}}, 2e-3),
    # and: parts of a row padded for the exchange, its copy laid out for it
    "tp": ({"tp": 2}, 0.01),
    "sp": ({"tp": 2, "sequence_parallel": True}, 0.03),
    # and: where a block's backward is the fullest moment, which of its gradients are there together
    "cp": ({"cp": 2}, 0.03),
    "recompute": ({"strategy": {"recompute": "full"}}, 0.03),
    "zero 3": ({"shard": 2, "strategy": {"zero": 3}}, 0.05),
    "pp": ({"pp": 2}, 0.02),
    "zero 3, gathered in bf16": ({"shard": 2, "callbacks": BF16, "strategy": {"gather_dtype": "bf16"}}, 0.05),
    # and: powersgd's P and Q on their way
    "powersgd": ({"dp": 2, "strategy": {"compression": "powersgd"}}, 0.03),
    # as if all stayed on the device: a dry run has no other memory
    "weights in host memory": ({"shard": 2, "strategy": {"offload": True}}, 0.05),
    "activations in host memory": ({"strategy": {"offload_activations": True}}, 0.03),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_fullest_moment_is_the_formula_s(name: str) -> None:
    given, tolerance = PEAKS[name]
    config = tiny.config(micro_batch_size=2, dataset=TOKENS, **{"model": tiny.GPT | MIDDLING} | given)
    case = settle(config).case
    plan = make(case, hardware("cpu"), Constants())
    for stage, counts in enumerate(rehearsed(config, case)):
        *_, (_, by_formula, counted) = beside.memory_lines(plan, stage, counts)
        assert by_formula == pytest.approx(counted, rel=tolerance)


def test_an_optimizer_that_reads_its_rate_on_the_host_can_be_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "plan.dry=true", "plan.json=true", "model.num_layers=1", "hardware=h100", "optimizer=muon"]) == 0
    assert json.loads(capsys.readouterr().out)["dry_run"]["stages"]["0"]["peak"]["optimizer"] > 0


# --- which ranks, how many micro-batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [{"shard": 2, "strategy": {"zero": 3}}, {"pp": 2}, {"pp": 2, "model": FOUR, "strategy": {"schedule": "interleaved_1f1b"}}],
    ids=["zero 3", "1f1b", "interleaved"],
)
def test_more_micro_batches_lie_on_a_line(of: dict[str, Any]) -> None:
    config = tiny.config(micro_batch_size=1, global_batch_size=16, **of)
    case = settle(config).case
    run = rehearsal.micro_batches_run(case.layout.schedule if case.layout.pp > 1 else "", case.layout.pp, case.micro_batches)
    assert len(run) == 2

    def entry(place: Place) -> list[dry.Counts]:
        entering = dry.leaving(config) if case.layout.pp > 1 else None
        return [dry.run(config, 0, number, entering) for number in (*run, case.micro_batches)]

    few, more, whole = run_world(entry, 1, warm=rehearsal.WARM)[0]
    reckoned = rehearsal.further(few, more, case.micro_batches)
    assert reckoned.traffic == whole.traffic
    assert sum(reckoned.peak.values()) == pytest.approx(sum(whole.peak.values()), rel=0.02)


def test_ranks_between_are_run_once_for_each_number_of_layers() -> None:
    config = tiny.config(pp=8, micro_batch_size=1, model=tiny.GPT | {"num_layers": 13})
    case = settle(config).case
    assert pipeline.layers_of(case) == (1, 1, 2, 2, 2, 2, 2, 1)
    assert rehearsal.kinds(case) == [0, 1, 2, 7]


def test_the_verb_prints_the_dry_run_beside_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "plan.dry=true", "strategy=tensor_parallel", "hardware=h100"]
    assert cli.main(words) == 0
    page = capsys.readouterr().out
    assert "Dry run" in page
    assert page.count(" equal") >= 5
    assert cli.main([*words, "plan.json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dry_run"]["stages"]["0"]["traffic"]["tp"]["all_reduce"][1] == found["traffic"]["0"]["tp"]["all_reduce"]["bytes"]
    assert cli.main(["plan", "plan.dry=true", "model=moe_tiny"]) == 2
    assert "router" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (8, "cp=2,tp=2,pp=2"),
        (64, "dp_shard=2,cp=2,tp=8,pp=2"),
        (1024, "dp_shard=4,cp=2,tp=8,pp=16"),
        (16384, "dp_shard=64,cp=2,tp=8,pp=16"),
    ],
)
def test_405_billion_parameters_on_any_world(world: int, degrees: str) -> None:
    """In a minute of two processors and 8 GiB, whatever else this machine does; every call and byte is the formula's."""
    samples = {8: 2, 64: 4, 1024: 64, 16384: 1024}[world]
    words = ["model=llama3_405b", "hardware=b200", "strategy=single", "strategy.zero=1", "strategy.sequence_parallel=true"]
    words += [f"strategy.{degree}" for degree in degrees.split(",")]
    words += [f"launch.world_size={world}", f"train.global_batch_size={samples}", "callbacks.grad_accumulation.micro_batch_size=1"]
    plan, found = _planned(words)
    assert found.processor_seconds < 120
    assert found.host_bytes < 8 * 2**30
    for stage, counts in found.counts.items():
        for axis, kind, (_, calls, seen), (_, moved, counted) in beside.traffic_lines(plan, stage, counts):
            assert (calls, moved) == pytest.approx((seen, counted), rel=1e-12), (axis, kind)
        assert plan.memories[stage].total == pytest.approx(sum(counts.peak.values()), rel=0.05)


def _planned(words: list[str]) -> tuple[Plan, rehearsal.Rehearsal]:
    request = parse(words)
    with composer(request) as app:
        config = compose(app, request)[1]
    settled = settle(config, "bf16")
    assert not settled.notes
    return make(settled.case, hardware("b200"), Constants()), rehearsal.rehearse(config, settled.case)
