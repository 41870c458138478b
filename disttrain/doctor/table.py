"""A verdict as text that fits a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from disttrain.doctor.advice import Remedy
from disttrain.doctor.budget import Budget
from disttrain.doctor.diagnose import Verdict, mfu
from disttrain.plan.planned import Plan
from disttrain.plan.table import columns, facts, show_seconds, title
from disttrain.plan.walls import show_bytes

if TYPE_CHECKING:
    from disttrain.doctor.verb import Trial

WORDS = {
    "input": "waits for the next batch",
    "callbacks": "callbacks",
    "host": "host: asking for operations, the loop",
    "taken": "without a processor, or asleep",
    "compute": "forward and backward",
    "data": "exposed communication, data axes",
    "tensor": "exposed communication, tensor axis",
    "context": "exposed communication, context axis",
    "expert": "exposed communication, expert axis",
    "pipeline": "exposed communication, pipeline",
    "bubble": "pipeline bubble",
    "stages": "imbalance between stages",
    "ranks": "waits for the late rank",
    "optimizer": "optimizer, norm and clipping",
}
WIDE = 24


def planned(plan: Plan) -> dict[str, float]:
    """Seconds of a step by part, as `plan` predicts them."""
    own = plan.seconds
    if own is None:
        return {}
    found = {"compute": own.products + own.attention + own.memory + own.recompute, "optimizer": own.optimizer, "host": own.overhead}
    named = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}
    for axis, seconds in own.exposed.items():
        found[named.get(axis, "data")] = found.get(named.get(axis, "data"), 0.0) + seconds
    return found | ({"bubble": own.bubble} if own.bubble else {})


def parts(whole: Budget, plan: Plan | None, found: str = "measured") -> list[str]:
    """Where the step's time goes, as `found` says, and planned."""
    beside = planned(plan) if plan is not None else {}
    rows = []
    for name, words in WORDS.items():
        seconds = whole.parts.get(name, 0.0)
        if seconds >= 0.0005 * whole.step or name in beside:
            told = [show_seconds(beside[name]) if name in beside else ""] if beside else []
            rows.append(([words, show_seconds(seconds), f"{whole.share(name):.1%}", *told], whole.share(name)))
    told = [show_seconds(plan.seconds.step)] if beside and plan is not None and plan.seconds is not None else []
    whole_row = ["a step", show_seconds(whole.step), "", *told]
    head = ("", found, "share", *(["planned"] if beside else []))
    return columns([*(row for row, _ in rows), whole_row], head, [WIDE * share for _, share in rows])


def talk(found: Mapping[str, Any]) -> list[str]:
    """Every collective of the last rank: calls, bytes, time, bandwidth, how much of it was hidden."""
    rows = []
    for axis, kinds in found["ranks"][-1]["talk"].items():
        for kind, one in kinds.items():
            took = one["seconds"]
            speed = [f"{one['bytes'] / took / 1e6:,.3g} MB/s", f"{1 - min(1.0, one['exposed'] / took):.0%}"] if took > 0 else ["", ""]
            rows.append([f"{kind} over {axis}", f"{one['calls']:.3g}", show_bytes(one["bytes"]), show_seconds(took), *speed])
    return columns(rows, ("a step, one rank", "calls", "sent", "time", "", "hidden")) if rows else []


def verdict_lines(verdict: Verdict, remedies: Sequence[Remedy]) -> list[str]:
    """The verdict, its evidence and what should help."""
    rank = f" (rank {verdict.rank})" if verdict.rank is not None else ""
    share = f", {verdict.share:.0%} of a step" if verdict.share else ""
    rows = [("verdict", f"{verdict.bottleneck}{rank}{share}")]
    rows += [("evidence" if not number else "", line) for number, line in enumerate(verdict.evidence)]
    for number, remedy in enumerate(remedies[:3]):
        lossy = " (another training, by design)" if remedy.is_lossy else ""
        rows.append(("try" if not number else "or", f"{' '.join(remedy.words)}: {remedy.why}{lossy}"))
    if not remedies:
        rows.append(("try", "nothing in this config would help by itself"))
    if verdict.beside:
        rows.append(("beside", ", ".join(f"{name} {share:.0%}" for name, share in verdict.beside)))
    return facts(rows)


def page(found: Mapping[str, Any], whole: Budget, verdict: Verdict, remedies: Sequence[Remedy], plan: Plan | None) -> list[str]:
    """Everything."""
    lines = verdict_lines(verdict, remedies)
    reached = mfu(found, whole)
    used = f"; {reached:.0%} of what matrix products reach here" if reached is not None else ""
    lines += [*title(f"A step, over {found['steps']} steps and {len(found['ranks'])} ranks{used}"), *parts(whole, plan)]
    said = talk(found)
    return [*lines, *(title("Communication") + said if said else [])]


def trial_lines(tried: Sequence[Trial]) -> list[str]:
    """What each remedy that was tried did, the best first."""
    if not tried:
        return [*title("Tried"), "Nothing: no override is known that should help."]
    rows = []
    for trial in tried:
        before, after = min(trial.before), min(trial.after)
        words = f"{' '.join(trial.remedy.words)}: {show_seconds(before)} a step before, {show_seconds(after)} after"
        rows.append(("", words + (f", {trial.gain:.2f} times as fast" if after < before else ": it does not help here")))
    return [*title("Tried"), *facts(rows)]
