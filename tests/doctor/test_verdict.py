"""A budget adds up to its step, and the verdict names what was put into it: on records written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from disttrain.doctor.budget import budget, quiet_steps
from disttrain.doctor.diagnose import diagnose

MS = 1e-3
IN_BOTH = {"forward_backward": 10 * MS, "finish": 0.5 * MS, "update": 0.5 * MS, "between": 0.5 * MS, "cpu/forward_backward": 10 * MS}


def record(ranks: list[Mapping[str, float]], late_for: Mapping[int, Mapping[str, Mapping[str, float]]] | None = None, **more: Any) -> Any:
    """What a window finds of a step with these columns, in seconds, on each rank."""
    found = [
        {
            "rank": rank,
            "host": "here",
            "at": {},
            "columns": {name: [seconds] * 2 for name, seconds in (IN_BOTH | columns | {"step": step_of(IN_BOTH | columns)}).items()},
            "talk": {},
            "late_for": {
                axis: {other: [seconds] * 2 for other, seconds in by_rank.items()}
                for axis, by_rank in (late_for or {}).get(rank, {}).items()
            },
            "actions": [],
            "samples": {"targets": 8.0, "positions": 8.0, "void": 0.0},
            "reads": [],
            "used": {"cpu_seconds": 12 * MS, "preempted": 0.0, "page_faults": 0.0},
            "memory": {"peak": 1.0, "has": 100.0},
        }
        for rank, columns in enumerate(ranks)
    ]
    return {"degrees": {"pp": 1, "dp_replicate": len(ranks)}, "device": "cpu", "num_micro": 1, "steps": 2, "ranks": found} | more


def step_of(columns: Mapping[str, float]) -> float:
    return sum(columns[phase] for phase in ("forward_backward", "finish", "update", "between"))


CASES: dict[str, tuple[Any, str]] = {
    "nothing else": (record([{}, {}]), "compute-bound"),
    "a slow loader": (record([{"between": 9 * MS, "input": 8 * MS}] * 2), "input"),
    "a callback": (record([{"between": 6 * MS, "callbacks/mine/between": 5 * MS}] * 2), "host overhead"),
    "a slow update": (record([{"update": 12 * MS}] * 2), "optimizer"),
    "exposed gradients": (record([{"finish": 8.5 * MS, "exposed/grad/finish": 8 * MS}] * 2), "exposed data-axis communication"),
    "exposed activations": (
        record([{"forward_backward": 20 * MS, "exposed/tp/forward_backward": 10 * MS}] * 2),
        "exposed tensor-axis communication",
    ),
    "a late rank": (
        record(
            [{"finish": 10.5 * MS, "late/grad/finish": 10 * MS}, {"forward_backward": 20 * MS, "cpu/forward_backward": 20 * MS}],
            {0: {"grad": {"1": 10 * MS}}},
        ),
        "imbalance between ranks",
    ),
    "now this rank is late, now that": (
        record([{"finish": 8.5 * MS, "late/grad/finish": 8 * MS}] * 2, {0: {"grad": {"1": 8 * MS}}, 1: {"grad": {"0": 8 * MS}}}),
        "exposed data-axis communication",
    ),
    "others hold the cores": (record([{"forward_backward": 40 * MS}] * 2), "host overhead"),
    "many small operations": (record([{}, {}], rates=[{"operations": 4000.0, "operation": 1e-6, "product": 1e9}] * 2), "host overhead"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bottleneck_is_named(case: str) -> None:
    found, wanted = CASES[case]
    whole = budget(found)
    assert sum(whole.parts.values()) == pytest.approx(whole.step)
    verdict = diagnose(found, whole)
    assert verdict.bottleneck == wanted
    assert verdict.evidence
    assert verdict.rank == (1 if wanted == "imbalance between ranks" else None)


def pipeline(seconds: Mapping[int, float], micro: int) -> Any:
    """Two ranks under 1F1B-like order, a stage each, whose forward and backward take `seconds` and twice that; messages take no time."""
    first = [("F", 0, 0), *(one for m in range(1, micro) for one in (("F", 0, m), ("B", 0, m - 1))), ("B", 0, micro - 1)]
    last = [one for m in range(micro) for one in (("F", 1, m), ("B", 1, m))]
    from disttrain.parallel.clock import step_time

    takes = {(kind, stage): seconds[stage] * (2 if kind == "B" else 1) for kind in "FB" for stage in (0, 1)}
    span = step_time([first, last], lambda action: takes[action[0], action[1]])
    ranks = []
    for order in (first, last):
        begin, actions = 0.0, []
        for kind, stage, m in order:
            actions += [[step, kind, stage, m, begin, begin + takes[kind, stage]] for step in (0, 1)]
            begin += takes[kind, stage]
        ranks.append((actions, span))
    found = record([{"forward_backward": span, "cpu/forward_backward": span}] * 2, degrees={"pp": 2}, num_micro=micro)
    for index, (actions, _) in enumerate(ranks):
        found["ranks"][index] |= {"actions": sorted(actions, key=lambda one: (one[0], one[4])), "at": {"pp": index}}
        found["ranks"][index]["columns"]["cpu/forward_backward"] = [sum(a[5] - a[4] for a in actions) / 2] * 2
    return found


@pytest.mark.parametrize(
    ("seconds", "micro", "wanted"),
    [
        ({0: 2 * MS, 1: 2 * MS}, 2, "bubble"),
        ({0: 2 * MS, 1: 2 * MS}, 32, "compute-bound"),
        ({0: 1 * MS, 1: 4 * MS}, 32, "imbalance between stages"),
    ],
)
def test_what_a_pipeline_waits_for(seconds: Mapping[int, float], micro: int, wanted: str) -> None:
    found = pipeline(seconds, micro)
    whole = budget(found)
    assert diagnose(found, whole).bottleneck == wanted
    assert sum(whole.parts.values()) == pytest.approx(whole.step)
    assert whole.parts["pipeline"] == pytest.approx(0.0, abs=1e-6)
    if wanted == "bubble":  # (p - 1) / (m + p - 1) of the time from the first action to the last
        assert whole.parts["bubble"] == pytest.approx(found["ranks"][0]["columns"]["forward_backward"][0] / 3)


def test_waits_count_less_where_a_machine_is_crowded() -> None:
    columns = {"finish": 8.5 * MS, "exposed/grad/finish": 8 * MS, "between": 6 * MS, "callbacks/mine/between": 5 * MS}
    quiet, crowded = (record([columns] * 2) for _ in range(2))
    for one in crowded["ranks"]:
        one["memory"] |= {"cores": 2.0, "load": 12.0}
    assert diagnose(quiet, budget(quiet)).bottleneck == "exposed data-axis communication"
    verdict = diagnose(crowded, budget(crowded))
    assert verdict.bottleneck == "host overhead"
    assert "12 processes want the 2 cores" in " ".join(verdict.evidence)


def test_a_rank_that_is_always_late_is_late_by_what_it_usually_is() -> None:
    """Not by what it was in the steps that waited the least for it; noise of another kind still chooses the steps."""
    waits = [8 * MS, 1 * MS, 9 * MS, 10 * MS, 8 * MS, 9 * MS]
    noise = [0.0, 30 * MS, 20 * MS, 20 * MS, 0.0, 20 * MS]
    found = record([{}, {}])
    for one in found["ranks"]:
        one["columns"] = {name: values[:1] * 6 for name, values in one["columns"].items()}
    waiting = found["ranks"][0]
    waiting["late_for"] = {"grad": {"1": waits}}
    waiting["columns"] |= {"late/grad/finish": waits, "exposed/world/finish": noise}
    waiting["columns"]["finish"] = [0.5 * MS + a + b for a, b in zip(waits, noise, strict=True)]
    assert quiet_steps(found) == [0, 4]
    whole = budget(found)
    assert whole.late_rank == 1
    assert whole.parts["ranks"] == pytest.approx(8 * MS)
