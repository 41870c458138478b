"""Watchers see every collective and action in order, and who came late is found by arrival, whatever the clocks say."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from disttrain.launch.place import Place
from disttrain.parallel import collectives, timing
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.timing import HostClock, Recorder, Timed
from disttrain.parallel.watch import unwatch, watch

CPU = torch.device("cpu")
SLEEP = 0.25


def recorded(place: Place, skew: float = 0.0, several_hosts: bool = False) -> list[Timed]:
    """Rank 1 comes late to an all-reduce, then rank 0 to the wait for one under way. `skew`: rank 1's clock is off by so much."""
    mesh = Mesh({"dp_replicate": 2}, place.rank)
    axis = mesh.axis("grad")
    collectives.barrier(axis)
    clock = time.perf_counter
    if place.rank == 1 and skew:
        time.perf_counter = lambda: clock() + skew
    if several_hosts:
        timing.platform.node = lambda: f"host-{place.rank}"  # type: ignore[attr-defined]
    recorder = Recorder(HostClock())
    watch(recorder)
    time.sleep(SLEEP * place.rank)
    collectives.all_reduce_(torch.ones(4), axis)
    time.sleep(SLEEP * (1 - place.rank))
    pending = collectives.start_all_reduce(torch.ones(4), axis)
    pending.wait()
    unwatch(recorder)
    collectives.all_reduce_(torch.ones(4), axis)
    found = recorder.settled(mesh, CPU)
    time.perf_counter = clock
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("skew", [0.0, 100.0])
def test_who_came_late(run_world: Any, skew: float) -> None:
    first, second = run_world(recorded, skew, skew > 0)
    for calls in (first, second):
        assert [(call.collective, call.axis, call.num_bytes) for call in calls] == [("all_reduce", "grad", 16)] * 2
        assert [call.last_rank for call in calls] == [1, 0]
    assert first[0].late == pytest.approx(SLEEP, abs=SLEEP / 2)
    assert second[1].late == pytest.approx(SLEEP, abs=SLEEP / 2)
    assert max(first[1].late, second[0].late) < SLEEP / 4
    assert all(call.exposed < SLEEP / 2 and call.seconds < SLEEP / 2 for call in (*first, *second))


def test_nobody_is_told_without_watching() -> None:
    recorder = Recorder(HostClock())
    collectives.all_reduce_(torch.ones(2), Mesh().axis("grad"))
    assert recorder.calls == []
