"""The ledger counts what torch's own profiler sees on the wire, in eight layouts; and its totals are a run's metrics."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import pytest
import torch

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from tests import tiny
from tests.parallel.ranks import prepared, run_step
from tests.train.runs import WARM, notes_of, rows, trainer_of, world_size

SIZES = {"float": 4, "double": 8, "long int": 8}
WHOLE = {"c10d::_allgather_base_": ("all_gather", 0), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1)}
"""Where, of the shapes that torch notes of an operation, that of the whole tensor stands."""
SENT = {"gloo:send": "send", "gloo:all_to_all": "all_to_all", "gloo:broadcast": "broadcast"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "cp 2, gather": {"cp": 2, "model": tiny.LLAMA},
    "cp 2, ring": {"cp": 2, "model": tiny.LLAMA, "strategy": {"attention": "ring"}},
    "dp_shard 2": {"shard": 2, "micro_batch_size": 2},
    "pp 2": {"pp": 2, "micro_batch_size": 2},
}


def seen(events: Any) -> Counter[str]:
    """Bytes of whole tensors by collective. gloo makes a reduce-scatter of an all-reduce of the whole; rings shift by sends."""
    found: Counter[str] = Counter()
    for event in events:
        if event.name in WHOLE:
            kind, place = WHOLE[event.name]
            num_bytes = math.prod(event.input_shapes[place]) * SIZES[event.input_dtypes[place]]
            found[kind] += num_bytes
            found["all_reduce"] -= num_bytes if kind == "reduce_scatter" else 0
        elif event.name == "gloo:all_reduce" or event.name in SENT:
            kind = SENT.get(event.name, "all_reduce")
            found[kind] += sum(math.prod(shape) * SIZES[dtype] for shape, dtype in zip(event.input_shapes, event.input_dtypes, strict=True))
    return Counter({kind: number for kind, number in found.items() if number})


def both(place: Place, config: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """(the ledger's count, the profiler's) of a second step on this rank."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    trainer = prepared(place, **config)
    trainer.update(run_step(trainer, 0))
    for axis in trainer.mesh.axes():
        axis.traffic.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run_step(trainer, 1)
    counted: Counter[str] = Counter()
    for axis in trainer.mesh.axes():
        for kind, (_, num_bytes) in axis.traffic.items():
            counted["send" if kind == "shift" else kind] += num_bytes if kind != "receive" else 0
    return +counted, seen(profiler.events())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_profiler_counts_the_same(layout: str) -> None:
    config = LAYOUTS[layout]
    warm = [*WARM, "torch.distributed.pipelining"] if "pp" in config or "shard" in config else []
    for counted, profiled in run_world(both, world_size(config), (config,), warm=warm):
        assert counted == profiled
        assert counted


def test_totals_are_metrics_of_steps_alone() -> None:
    ledger = {"ledger": {"_target_": "disttrain.callbacks.ledger.Ledger"}}
    last = rows(dp=2, callbacks=ledger, log_every=2, eval_every=1)[0][-1]
    d, layers = 32, 2
    parameters = (tiny.VOCABULARY + tiny.CONTEXT) * d + layers * (12 * d * d + 13 * d) + 2 * d
    assert last["comm/grad/all_reduce_bytes"] == last["comm/grad/all_reduce_bytes_max"] == 4 * parameters  # 2 (n-1)/n with n = 2
    assert last["comm/bytes"] == last["comm/grad/bytes"] + last["comm/world/bytes"]
    assert "comm/seen/bytes" not in last


def test_a_stop_between_two_log_points_leaves_the_totals_as_they_were() -> None:
    """Its row has no measurements, and none are made up."""

    def entry(place: Place) -> tuple[bool, list[float]]:
        trainer = trainer_of(place, {"ledger": {"_target_": "disttrain.callbacks.ledger.Ledger"}}, dp=2, steps=8, log_every=2)
        trainer._stop_requested = lambda: "SIGTERM" if trainer.progress.step == 3 else None
        trainer.fit()
        rows = notes_of(trainer).rows
        return "comm/bytes" in rows[-1], [rows[-2]["comm/bytes"], trainer.metrics["comm/bytes"]]

    for is_new, (before, after) in run_world(entry, 2):
        assert not is_new
        assert after == before > 0


def test_what_is_said_only_every_so_many_steps_is_a_metric_too() -> None:
    """Replicas meet after four steps, and there is a row every two: each round is shared out over its steps."""
    ledger = {"ledger": {"_target_": "disttrain.callbacks.ledger.Ledger"}}
    found = rows(dp=2, callbacks=ledger, steps=8, log_every=2, eval_every=None, strategy={"sync_every": 4})[0]
    sent = [row.get("comm/dp_replicate/bytes") for row in found]
    assert sent[:3] == [None, None, None]
    assert sent[3] == sent[4] == pytest.approx(27_008, rel=1e-3), "of 4 bytes a parameter a round"
