"""Traces of several ranks, read back: one file, one clock, and names of steps, micro-batches, actions and collectives by axis."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import build
from disttrain.callbacks import trace
from disttrain.callbacks.profile import Profile
from disttrain.callbacks.ranges import Ranges
from disttrain.callbacks.trace import Span
from disttrain.errors import ConfigError
from disttrain.launch.place import Place, alone
from disttrain.launch.world import run_world
from disttrain.parallel.pipeline import Pipeline
from disttrain.parallel.step import Report
from disttrain.record import RunFolder
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.callbacks.fakes import FakeTrainer
from tests.train.runs import WARM

PIPELINING = ("torch.distributed.pipelining",)

PROFILE = {"_target_": "disttrain.callbacks.profile.Profile", "start": 1, "steps": 2}


class Clears(Callback):
    """Sets the ledger to nothing where the window begins."""

    def on_train_step_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 1:
            for name in ("tp", "dp_replicate", "grad"):
                trainer.mesh.axis(name).traffic.clear()

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if trainer.progress.step == 3:
            self.traffic = {
                name: {kind: list(found) for kind, found in trainer.mesh.axis(name).traffic.items()}
                for name in ("tp", "dp_replicate", "grad")
            }


def profiled(tmp_path: Path, profile: dict[str, Any] | None = None, **config: Any) -> tuple[dict[str, Any], list[Any]]:
    """The merged trace of a run's steps 2 and 3; by rank (actions of a step, the ledger of both steps)."""
    callbacks = {"clears": {"_target_": "tests.callbacks.test_profile.Clears"}, "profile": PROFILE | (profile or {})}

    def entry(place: Place) -> Any:
        trainer = build.build_trainer(tiny.config(callbacks=callbacks, steps=4, **config), RunFolder(tmp_path), place)
        trainer.fit()
        runner = trainer.strategy.runner
        return runner.actions if isinstance(runner, Pipeline) else [], trainer.callbacks["clears"].traffic  # type: ignore[attr-defined]

    by_rank = run_world(
        entry,
        int(tiny.config(**config).launch.world_size),
        warm=WARM if config.get("shard", 1) > 1 else PIPELINING if config.get("pp", 1) > 1 else (),
    )
    return trace.read(tmp_path / "profile" / "trace.json.gz"), by_rank


def tracks_of(found: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Events of our own tracks by (rank, track), in time order."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X" and event["tid"] >= 1 << 30:
            tracks[event["pid"] // 1000, names[event["pid"], event["tid"]]].append(event)
    return {key: sorted(events, key=lambda event: event["ts"]) for key, events in tracks.items()}


@pytest.mark.world(4)
def test_one_trace_of_four_ranks_names_actions_and_collectives(tmp_path: Path) -> None:
    found, by_rank = profiled(tmp_path, pp=2, tp=2, micro_batch_size=2)
    labels = {e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert labels == {f"rank {2 * pp + tp} (pp {pp}, tp {tp})" for pp in (0, 1) for tp in (0, 1)}
    tracks = tracks_of(found)
    words = {"F": "forward", "B": "backward"}
    for rank, (actions, traffic) in enumerate(by_rank):
        of_a_step = [f"{words[kind]} of stage {stage}, micro-batch {micro}" for kind, stage, micro in actions]
        assert [event["name"] for event in tracks[rank, "pipeline"]] == of_a_step * 2
        assert [event["name"] for event in tracks[rank, "step"]] == ["step 2", "step 3"]
        over_tp = Counter(event["name"] for event in tracks[rank, "collectives over tp"])
        assert over_tp.pop("wait: all_reduce over tp") >= 2 * 2 * 4  # a block's two column matrices sum behind their backward
        assert over_tp == {f"{kind} over tp": calls for kind, (calls, _) in traffic["tp"].items()}
        assert sum(e["args"].get("bytes", 0) for e in tracks[rank, "collectives over tp"]) == sum(
            size for _, size in traffic["tp"].values()
        )
        borders = Counter(event["name"] for event in tracks[rank, "collectives over pp"])
        assert borders == {"send over pp": 8, "receive over pp": 8}
    ends = {rank: tracks[rank, "pipeline"][0]["ts"] + tracks[rank, "pipeline"][0]["dur"] for rank in (0, 2)}
    assert tracks[2, "pipeline"][0]["ts"] > tracks[0, "pipeline"][0]["ts"], "stage 1 begins after stage 0"
    assert ends[2] > ends[0]
    assert all(event["ts"] >= 0 for event in found["traceEvents"] if "ts" in event)
    flows = [event["id"] for event in found["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == len(set(flows)) > 0, "arrows of one rank don't end on another's"
    assert all(isinstance(event[key], int) for event in found["traceEvents"] for key in ("pid", "tid", "id") if key in event)


@pytest.mark.world(2)
def test_data_parallel_ranks_show_micro_batches_waits_and_memory(tmp_path: Path) -> None:
    found, by_rank = profiled(tmp_path, {"memory": True, "ranks": [1]}, dp=2, micro_batch_size=2)
    tracks = tracks_of(found)
    assert {rank for rank, _ in tracks} == {1}
    assert [event["name"] for event in tracks[1, "micro-batch"]] == [
        f"{direction} of micro-batch {micro}" for micro in (0, 1) for direction in ("forward", "backward")
    ] * 2
    names = Counter(event["name"] for event in tracks[1, "collectives over grad"])
    calls = by_rank[1][1]["grad"]["all_reduce"][0]
    assert names == {"all_reduce over grad": calls, "wait: all_reduce over grad": calls}
    counters = [event for event in found["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory of host"}
    assert max(event["args"]["bytes"] for event in counters) > 4 * tiny.VOCABULARY * 32, "more than one weight"


@pytest.mark.world(4)
def test_what_fsdp_sums_by_itself_is_named_too(tmp_path: Path) -> None:
    found, _ = profiled(tmp_path, dp=2, shard=2)
    tracks = tracks_of(found)
    units = 3  # two blocks and the root
    for rank in range(4):
        assert Counter(event["name"] for event in tracks[rank, "collectives over replicate"]) == {"all_reduce over replicate": 2 * units}
        assert {"all_gather over dp_shard", "reduce_scatter over dp_shard"} <= {
            e["name"] for e in tracks[rank, "collectives over dp_shard"]
        }


def write_trace(path: Path, clock_ns: int, events: list[tuple[str, float]]) -> Path:
    """A trace as torch writes one, whose own time 0 is this moment of the rank's clock; events (name, microseconds)."""
    body = [{"ph": "X", "pid": 7, "tid": 7, "ts": 1000.0, "dur": 0.5, "name": trace.clock_mark(clock_ns)}]
    body += [{"ph": "X", "pid": 7, "tid": 7, "ts": 1000.0 + at, "dur": 5.0, "name": name} for name, at in events]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": body}).encode()))
    return path


def test_clocks_that_are_off_are_set_right(tmp_path: Path) -> None:
    """Rank 1's clock is 2 s ahead; both do 'b' at one moment, 30 us after rank 0's 'a'."""
    step = Span("step", "b").mark()
    zero = write_trace(tmp_path / "0.json.gz", 10**18, [("a", 10.0), (step, 40.0)])
    one = write_trace(tmp_path / "1.json.gz", 10**18 + 2 * 10**9 + 5000, [(step, 35.0)])
    trace.merge([trace.Rank(0, "a", zero), trace.Rank(1, "b", one, behind=-2.0)], tmp_path / "all.json.gz")
    events = trace.read(tmp_path / "all.json.gz")["traceEvents"]
    assert {(e["name"], e["pid"], e["ts"]) for e in events if e["ph"] == "X"} == {("a", 0, 0.0), ("b", 0, 30.0), ("b", 1000, 30.0)}
    zero.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(ValueError, match="no mark of its clock"):
        trace.merge([trace.Rank(0, "a", zero)], tmp_path / "all.json.gz")


def test_ranges_for_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names, as NVTX ranges. What nsys makes of them needs a GPU."""
    seen: list[str] = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", seen.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: seen.append("end"))
    ranges = Ranges("nvtx")
    ranges.passes("forward", 0)
    ranges.acts(("W", 1, 2))
    ranges.acted(("W", 1, 2))
    ranges.passed("forward", 0)
    assert seen == ["forward of micro-batch 0", "backward for weights of stage 1, micro-batch 2", "end", "end"]


def test_wrong_values_are_named(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    with pytest.raises(ConfigError, match="'perf'; it may be torch, nvtx"):
        Profile(tool="perf")
    with pytest.raises(ConfigError, match=r"ranks names \[3\], and the ranks are 0 to 0"):
        Profile(ranks=[3]).on_fit_start(trainer)
    with pytest.raises(ConfigError, match="for nsys, and the run is on cpu"):
        Profile(tool="nvtx").on_fit_start(trainer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_stand_beside_and_memory_is_kept_with_its_code(tmp_path: Path) -> None:
    config = tiny.config(callbacks={"profile": PROFILE | {"memory": True}}, steps=4)
    config.launch.device = "cuda"
    build.build_trainer(config, RunFolder(tmp_path), alone()).fit()
    events = trace.read(tmp_path / "profile" / "trace.json.gz")["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert any(event["ph"] == "C" and event["name"] == "memory of device 0" for event in events)
    snapshot = trace.read(tmp_path / "profile" / "rank-0.memory.json.gz")
    assert any(entry["action"] == "alloc" and entry["frames"] for of_device in snapshot["device_traces"] for entry in of_device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_ranges_for_nsys_cost_nothing_when_nobody_records(tmp_path: Path) -> None:
    config = tiny.config(callbacks={"profile": PROFILE | {"tool": "nvtx"}}, steps=4)
    config.launch.device = "cuda"
    assert build.build_trainer(config, RunFolder(tmp_path), alone()).fit().step == 4
    assert not (tmp_path / "profile").exists()
