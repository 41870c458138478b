"""What ranks keep for themselves, in a run that really happens: eight ranks, data x tensor x pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import build
from disttrain.callbacks import by_rank
from disttrain.config.frozen import freeze
from disttrain.launch.world import run_world
from disttrain.parallel.watch import _watchers
from disttrain.record import RunFolder
from disttrain.report.read import Run
from disttrain.report.timelines import WORK, histograms, timeline
from tests import tiny

WATCHED = {
    "by_rank": {"_target_": "disttrain.callbacks.by_rank.ByRank"},
    "jsonl": {"_target_": "disttrain.callbacks.jsonl.JSONL"},
}


def trained(folder: Path, callbacks: Mapping[str, Any] | None = None, **config: Any) -> RunFolder:
    """The record of a tiny run."""
    made = tiny.config(callbacks=WATCHED | dict(callbacks or {}), **config)

    def entry(place: Any) -> list[Any]:
        trainer = build.build_trainer(made, RunFolder(folder), place)
        trainer.fit()
        assert not _watchers
        return getattr(trainer.strategy.runner, "actions", [])

    run_world(entry, int(made.launch.world_size))
    RunFolder(folder).store_config(freeze(made), [])
    return RunFolder(folder)


@pytest.mark.world(8)
def test_a_hybrid_runs_timeline_is_physically_possible(tmp_path: Path) -> None:
    folder = trained(tmp_path, dp=2, tp=2, pp=2, micro_batch_size=1, steps=5, log_every=2, eval_every=3)
    assert folder.ranks() == list(range(8))
    run = Run(tmp_path, {}, config={"strategy.pp": 2, "strategy.schedule": "1f1b"}, ranks=[folder.of_rank(rank) for rank in range(8)])
    found = timeline(run)
    assert found is not None
    assert found.step == 3
    assert found.names[5] == "pp 1, dp 0, tp 1"
    at = {(bar.rank, bar.kind, bar.micro): bar for bar in found.bars}
    for rank in range(4):  # rank + 4 holds the second stage of the same samples
        assert [(bar.kind, bar.micro) for bar in found.bars if bar.rank == rank + 4][:8] == [(k, m) for m in range(4) for k in "FB"]
        for micro in range(4):
            assert at[rank + 4, "F", micro].start >= at[rank, "F", micro].end - 1e-4
            assert at[rank, "B", micro].start >= at[rank + 4, "B", micro].end - 1e-4
        own = [bar for bar in found.bars if bar.rank == rank]
        assert all(before.end <= after.start + 1e-6 for before, after in pairwise(own))
        assert [bar.kind for bar in own][-2:] == ["reduce", "update"]
    assert 0 < found.waited < 1
    assert [one.num_steps for one in histograms(run)] == [4] * 8  # the first step stands apart
    elapsed = [row["perf/elapsed_seconds"] for row in folder.read()]
    assert elapsed == sorted(elapsed)
    assert sum(one.quantile(0.5) * one.num_steps for one in histograms(run)[:1]) < elapsed[-1]


@pytest.mark.world(1)
def test_without_a_pipeline_each_direction_of_each_micro_batch_is_seen(tmp_path: Path) -> None:
    folder = trained(tmp_path, micro_batch_size=4, steps=2)
    (rank,) = folder.ranks()
    spans = folder.of_rank(rank)["timeline"]["spans"]
    assert [(kind, micro) for kind, _, micro, _, _ in spans] == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("reduce", -1), ("update", -1)]
    assert set(by_rank.PASSES.values()) <= set(WORK)


@pytest.mark.world(1)
def test_a_run_that_goes_on_adds_to_its_step_times(tmp_path: Path) -> None:
    trained(tmp_path, steps=4)
    folder = trained(tmp_path, steps=6)
    assert sum(folder.of_rank(0)["step_seconds"]["counts"].values()) == 3 + 5


@pytest.mark.gpu
def test_on_a_gpu_spans_are_the_devices_not_the_hosts() -> None:
    """Products that the host launches in no time; the second row of them is sixteen times the work."""
    device = torch.device("cuda")
    small, large = (torch.ones(n, n, device=device) for n in (2048, 4096))
    for x in (small, large):
        x @ x
    found = by_rank.OneStep(device)
    for micro, (x, times) in enumerate(((small, 10), (large, 20))):
        found.acts(("F", 0, micro))
        for _ in range(times):
            x @ x
        found.acted(("F", 0, micro))
    found.until_now("reduce")
    (_, _, _, start, end), (_, _, _, then, last), (kind, *_) = found.spans()
    assert 0 <= start < end <= then < last
    assert kind == "reduce"
    assert last - then > 4 * (end - start)
