"""`doctor` alone: every collective against its formula, and a preset that `plan` takes for this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain import cli
from disttrain.config.schema import HardwareConfig
from disttrain.doctor import bench, machine
from disttrain.doctor.preset import half_message, store
from disttrain.plan.network import WIRE, WIRE_FORMULA

FACTORS = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 1.0, "all_to_all": 0.5, "send": 1.0}
"""Of the whole tensor's bytes, what one of two ranks sends: 2(n-1)/n, (n-1)/n, ..."""


def test_a_machine_becomes_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SIZES", {"cpu": (1 << 10, 1 << 16)})
    monkeypatch.setattr(bench, "SECONDS_EACH", 0.0)
    monkeypatch.setattr(bench, "PRODUCT", {"cpu": 128})
    monkeypatch.setattr(bench, "STREAM", {"cpu": 1 << 20})
    monkeypatch.setattr(machine, "MOST_RANKS", 2)
    monkeypatch.setattr(machine, "ON_DISK", 1 << 20)
    assert cli.main(["doctor", "doctor.json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: [row["sent"] for row in rows] for name, rows in found["rates"]["talk"].items()} == {
        name: [factor * (1 << 10), factor * (1 << 16)] for name, factor in FACTORS.items()
    }
    assert all(one["read"] > 0 and one["written"] > 0 for one in found["disk"].values())
    assert found["loader"]["bytes"] == pytest.approx(found["loader"]["batches"] * 64 * 784 * 4)
    assert 0 < found["loader"]["worker"] < 1.5
    assert {"/dev/shm", "open files", "ports", "W&B"} <= {one["what"] for one in found["limits"]}
    for words in ([], ["hardware=here"]):
        assert cli.main(["plan", "plan.json=true", *words]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["hardware"] == "here"
        assert plan["usable_bytes"] > 0
    assert cli.main(["plan", "plan.json=true", "hardware=h100"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "h100"
    print("\n".join(machine.page(found)))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("kind", bench.COLLECTIVES)
def test_the_formula_that_is_shown_is_the_one_that_is_reckoned_with(kind: str) -> None:
    for n in (2, 3, 8):
        assert eval(WIRE_FORMULA[kind].replace("2(", "2*("), {"n": n}) == pytest.approx(WIRE[kind](n))


def test_half_of_the_bandwidth_is_found_between_two_sizes() -> None:
    latency, peak, ramp = 1e-4, 1e9, 1e6
    rows = [{"bytes": n, "sent": n, "seconds": latency + (n + ramp) / peak} for n in (1e3, 1e5, 5e5, 1.5e6, 1e7, 1e8)]
    assert half_message(rows, peak, latency) == pytest.approx(ramp, rel=0.2)  # sizes lie a factor of three apart


def test_a_measured_preset_that_was_spoilt_is_refused_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = HardwareConfig(name="here", matmul_tflops={"fp32": 0.05}, attention_tflops={"flash": 0.02}, memory_bandwidth=8.0)
    file = store(replace(preset, link_bandwidth=1.0, collectives={"all_gather": [1.0, 1.0, 1.0]}), tmp_path)
    file.write_text(file.read_text().replace("all_gather:", "all_gathre:"))
    for words in (["hardware=here"], []):
        assert cli.main(["plan", *words]) == 2
        said = capsys.readouterr().err
        assert "the nearest is 'hardware.collectives.all_gather'" in said
        assert "Traceback" not in said
