"""The verb: tables, JSON, the nearest legal plan, a size instead of a shape, the search."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from disttrain import cli
from disttrain.build import build_model
from disttrain.config.check import check
from disttrain.config.compose import compose, composer, parse
from disttrain.config.schema import Config, HardwareConfig
from disttrain.plan.devices import preset_of, resolve
from disttrain.plan.settle import GPT as TARGET
from disttrain.plan.settle import settle, shape_of
from disttrain.plan.table import columns
from tests.quality.source import ROOT

MODELS = sorted(file.stem for file in (ROOT / "conf/model").glob("*.yaml") if TARGET in file.read_text())
LARGE = ["model=llama3_70b", "hardware=h100", "launch.world_size=64", "train.global_batch_size=64"]


def settled(*words: str) -> Config:
    request = parse(list(words))
    with composer(request) as app:
        return compose(app, request)[1]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert cli.main(["plan", "plan.json=true", *words]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_has_the_parameters_of_the_model_it_speaks_of(name: str) -> None:
    config = settled(f"model={name}")
    model = config.model
    with torch.device("meta"):
        built = build_model(config)
    assert shape_of(model).parameters == pytest.approx(sum(parameter.numel() for parameter in built.parameters()), rel=1e-12)


@pytest.mark.parametrize("wide", [60, 80, 100])
def test_a_page_fits_a_terminal(wide: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(wide))
    assert cli.main(["plan", *LARGE, "strategy.tp=8", "strategy.pp=4", "callbacks.grad_accumulation.micro_batch_size=1"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= wide
    for heading in ("Time of a step", "Memory of the fullest rank", "Sent by a rank", "Walls", "Who holds what", "One step", "Assumed"):
        assert heading in page
    assert "experiments/planner/page.md" in page


def test_what_does_not_divide_is_planned_as_the_nearest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=llama3_8b", "hardware=b200", "launch.world_size=6", "strategy.tp=4")
    assert found["layout"]["tp"] == 2
    assert found["layout"]["world"] == 6
    assert any("strategy.tp=4" in note for note in found["notes"])
    assert any("train.global_batch_size=32" in note for note in found["notes"])


def test_what_does_not_fit_is_planned_as_the_nearest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *LARGE, "strategy.tp=8", "strategy.pp=4", "callbacks.grad_accumulation.micro_batch_size=16")
    assert found["fits"]
    assert (found["layout"]["tp"], found["layout"]["pp"]) == (8, 4)
    assert any("planned is the nearest that fits" in note for note in found["notes"])


def test_nothing_fits_one_small_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=llama3_405b", "hardware=a100", "launch.world_size=1")
    assert not found["fits"]
    assert any("more ranks" in note for note in found["notes"])
    assert cli.main(["plan", "plan.search=true", "model=llama3_405b", "hardware=a100", "launch.world_size=1"]) == 2


def test_a_tensor_axis_over_nodes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt3_175b", "hardware=h100", "launch.world_size=128", "strategy.tp=32", "train.global_batch_size=128"]
    found = planned(capsys, *words)
    assert any("strategy.tp=32 leaves the node" in note for note in found["notes"])


def test_a_size_without_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model.parameters=100e9", "hardware=h100"]) == 0
    page = capsys.readouterr().out
    assert "200 GB" in page
    assert "1.6 TB to 1.8 TB" in page
    assert f"{math.ceil(1.6e12 / (79.6 * 2**30 * 0.94))} of h100" in page
    assert cli.main(["plan", "model.parameters=many"]) == 2


def test_the_search_ranks_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan.search=true", "model=llama3_8b", "hardware=h100", "launch.world_size=16", "train.global_batch_size=64", "plan.top=5"]
    started = time.monotonic()
    found = planned(capsys, *words)
    assert time.monotonic() - started < 30
    times = [one["seconds"]["step"] for one in found]
    assert times == sorted(times)
    assert len(times) == 5
    for one in found:
        assert one["fits"]
        assert one["layout"]["world"] == 16
        assert 64 % (one["layout"]["micro_batch"] * one["layout"]["dp_shard"] * one["layout"]["dp_replicate"]) == 0
    assert cli.main(["plan", *words]) == 0
    assert "The first is asked for with:" in capsys.readouterr().out


def test_a_model_of_unknown_shape_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model=simple_cnn", "dataset=digits"]) == 2
    assert "model.parameters=1e9" in capsys.readouterr().err


def test_a_table_is_as_wide_as_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("a name of so many words that there is no room for it", *["123456789"] * 3), ("short", *["1"] * 3)]
    lines = columns(rows, ("what", "first", "second", "third"), [40, 10])
    assert max(map(len, lines)) <= 60
    assert lines[2].split() == ["a", "name", "of", "so", "many", "words", *["123456789"] * 3]
    assert lines[3].startswith("    that there is")
    assert lines[-1] == "short" + 22 * " " + 2 * (10 * " " + "1") + 10 * " " + "1"
    beneath = columns([("a", *[9 * "x"] * 7)], ("what", *"1234567"))
    assert max(map(len, beneath)) <= 60
    assert [line.split()[0] for line in beneath if line] == ["what", "-" * 4, "a"] * 2


def test_hardware_by_the_drivers_name() -> None:
    assert preset_of("NVIDIA H100 80GB HBM3").name == "h100"
    assert preset_of("NVIDIA A100-SXM4-80GB").name == "a100"
    assert preset_of("NVIDIA B200").name == "b200"
    assert preset_of("NVIDIA H200").name == "h200"
    unknown = preset_of("Matrix 3000")
    assert not unknown.matmul_tflops
    auto = settled("hardware=auto").hardware
    assert resolve(auto, 1).name in ("cpu", *(file.stem for file in (ROOT / "conf/hardware").glob("*.yaml")))


def test_more_ranks_than_were_measured_share_out_a_machine() -> None:
    here = HardwareConfig(name="here", devices_per_node=2, matmul_tflops={"fp32": 0.05}, link_bandwidth=1.0, link_latency=50.0)
    alone, crowded = resolve(here, 2), resolve(replace(here, collectives={"all_reduce": [0.4, 0.1, 20.0]}), 4)
    assert alone.matmul_tflops == {"fp32": 0.05}
    assert (crowded.devices_per_node, crowded.matmul_tflops, crowded.link_bandwidth, crowded.link_latency) == (4, {"fp32": 0.025}, 0.5, 100)
    assert crowded.collectives == {"all_reduce": [0.2, 0.1, 40.0]}
    assert crowded.memory_gib == pytest.approx(alone.memory_gib / 2)
    assert "4 ranks share out" in crowded.source
    gpus = replace(here, device="H100", memory_gib=80.0)
    assert resolve(gpus, 16) == gpus  # two nodes of eight


def test_precision_of_products_is_bf16_on_a_gpu_unless_asked_for() -> None:
    config = settled("model=llama3_8b", "hardware=h100", "callbacks.amp.precision=fp16")
    assert settle(config).case.software.precision == "bf16"
    assert settle(config).case.numbers.compute == 2.0
    assert settle(settled("model=llama3_8b")).case.numbers.compute == 4.0


def test_experts_are_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=mixtral_8x7b",
        "hardware=h100",
        "launch.world_size=16",
        "train.global_batch_size=16",
        "strategy.tp=2",
        "strategy.dp_shard=-1",
    ]
    words += ["strategy.dp_replicate=1", "strategy.zero=1", "strategy.recompute=full", "callbacks.grad_accumulation.micro_batch_size=1"]
    whole, shared = planned(capsys, *words), planned(capsys, *words, "strategy.ep=8")
    assert shared["layout"]["ep"] == 8
    assert shared["memory_bytes"]["0"]["weights"] < 0.2 * 4 * shared["model"]["parameters"] / 2
    moments = 8 * 46.7e9 / 2 / 8  # two of float32, over two tensor ranks and eight data ranks, experts by ep and the rest by ZeRO-1
    assert shared["memory_bytes"]["0"]["optimizer"] == pytest.approx(moments, rel=0.01)
    assert set(shared["traffic"]["0"]) >= {"ep", "tp", "dp_shard"}
    assert "ep" not in whole["traffic"]["0"] or whole["layout"] != shared["layout"]


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
def test_what_the_search_offers_passes_the_check_of_a_training(capsys: pytest.CaptureFixture[str], model: str) -> None:
    words = [f"model={model}", "launch.world_size=16", "train.global_batch_size=64"]
    for one in planned(capsys, "plan.search=true", "hardware=b200", "plan.top=15", *words):
        config = settled(*words, *one["overrides"], "strategy=single", "launch.device=cpu", "callbacks.amp.precision=bf16")
        check(config)
        assert settle(config).notes == []
        assert settle(config).case.layout.world == 16


@pytest.mark.parametrize(
    "base",
    [
        ["strategy=hybrid_3d"],
        ["strategy=hsdp", "strategy.gather_dtype=bf16", "callbacks.amp.precision=bf16"],
        ["strategy=tensor_parallel", "strategy.sequence_parallel=true", "strategy.recompute=full", "strategy.recompute_every=2"],
        ["strategy=context_parallel", "strategy.attention=ring", "strategy.loss_chunk=16"],
        ["strategy=pipeline_parallel", "strategy.stage_split=[blocks.1,blocks.2,blocks.3]"],
        ["strategy=hybrid_3d", "strategy.schedule=interleaved_1f1b", "strategy.virtual_stages=2", "strategy.dp_replicate=1"],
        ["strategy=ddp", "strategy.compression=bf16", "callbacks=none"],
        ["strategy=ddp", "strategy.sync_every=4", "train.eval_every=4", "strategy.offload_activations=true", "~callbacks.checkpoint"],
        ["strategy=fsdp", "strategy.offload=true"],
        ["strategy=expert_parallel", "model=moe_tiny"],
        ["strategy=deepspeed"],
    ],
    ids=lambda base: "-".join(base[:2]),
)
def test_behind_the_same_command_a_suggestion_gives_the_layout_that_was_ranked(capsys: pytest.CaptureFixture[str], base: list[str]) -> None:
    words = ["hardware=h100", "model=tiny_gpt", "launch.world_size=4", "train.global_batch_size=32", *base]
    found = planned(capsys, "plan.search=true", "plan.top=50", *words)
    for one in (found[0], found[len(found) // 2], found[-1]):
        check(settled(*words, *one["overrides"], "launch.device=cpu"))
        again = planned(capsys, *words, *one["overrides"])
        for part in ("layout", "memory_bytes", "traffic", "seconds"):
            assert again[part] == one[part]


def test_a_search_keeps_what_it_does_not_search(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hardware=h100", "launch.world_size=4", "train.eval_every=4", "plan.search=true", "plan.top=50", "strategy=ddp"]
    for one in planned(capsys, *words, "strategy.sync_every=4", "~callbacks.checkpoint", "strategy.loss_chunk=16"):
        assert one["layout"]["sync_every"] == 4
        assert one["layout"]["loss_chunk"]
        assert (one["layout"]["pp"], one["layout"]["dp_shard"]) == (1, 1)  # replicas that train by themselves
    assert {one["layout"]["zero"] for one in planned(capsys, *words, "strategy.compression=bf16")} == {0}
    assert cli.main(["plan", *words, "strategy.sync_every=3"]) == 2
    assert "is no multiple of strategy.sync_every=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("hardware.link_bandwidth=-1", "hardware.link_bandwidth=-1"),
        ("hardware.memory_gib=inf", "hardware.memory_gib=inf"),
        ("hardware.devices_per_node=0", "hardware.devices_per_node=0"),
        ("hardware.matmul_tflops={fp32: 0}", "hardware.matmul_tflops.fp32=0.0 is no rate"),
        ("hardware.matmul_tflops={bf61: 1}", "the nearest is 'hardware.matmul_tflops.bf16'"),
        ("hardware.network_by_nodes={two: 1}", "'two' is none"),
        ("hardware.collectives=3", "try: hardware.collectives={<name>: <a list of numbers>}"),
        ("hardware.collectives={all_redcue: [1, 1, 1]}", "the nearest is 'hardware.collectives.all_reduce'"),
        ("hardware.collectives={all_reduce: 0.4}", "hardware.collectives.all_reduce=0.4 is not allowed: it takes a list of numbers"),
        ("hardware.collectives={all_gather: [1]}", "hardware.collectives.all_gather"),
        ("hardware.collectives={all_gather: [0, 1, 1]}", "hardware.collectives.all_gather"),
        ("hardware.collectives={all_gather: [1, -1, 1]}", "hardware.collectives.all_gather"),
    ],
)
def test_hardware_that_cant_be_reckoned_with_is_one_message(word: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "hardware=h100", word]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "missing"),
    [
        ("hardware.link_bandwidth=0", "link_bandwidth"),
        ("hardware.memory_bandwidth=0", "memory_bandwidth"),
        ("~hardware.matmul_tflops.fp32", "matmul_tflops.fp32"),
        ("~hardware.attention_tflops.flash", "attention_tflops.flash"),
    ],
)
def test_without_a_rate_there_are_no_times_and_no_search(word: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hardware=cpu", word, "launch.world_size=2"]
    for more in ([], ["hardware.memory_gib=0.025"]):  # nor in the nearest that fits
        found = planned(capsys, *words, *more)
        assert "seconds" not in found
        assert any(f"no times: hardware.{missing}" in note for note in found["notes"])
    assert cli.main(["plan", "plan.search=true", *words]) == 2
    assert f"hardware.{missing}" in capsys.readouterr().err


def test_whoever_reads_a_page_may_leave() -> None:
    """As `| head` does: no traceback."""
    with subprocess.Popen([sys.executable, "-m", "disttrain", "plan"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == b""
    assert running.returncode == 141
