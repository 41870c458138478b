"""`doctor <overrides>`: a short measured window of a config on all its ranks, and what holds it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disttrain.config.schema import Config
from disttrain.doctor import ranks, table
from disttrain.doctor.advice import Remedy, advise
from disttrain.doctor.budget import Budget, budget
from disttrain.doctor.diagnose import Verdict, diagnose, mfu
from disttrain.errors import ConfigError
from disttrain.launch.world import run_world_of
from disttrain.plan.constants import Constants
from disttrain.plan.devices import resolve
from disttrain.plan.planned import Plan, make
from disttrain.plan.settle import GPT, settle

Recompose = Callable[[Sequence[str]], Config]
"""The config of the same command with further overrides; ConfigError where they don't go together."""
MOST_TRIED = 3
"""Remedies that `doctor.fix` tries."""
REPEATS = 2
"""Further windows of the one that helped most."""


@dataclass(frozen=True)
class Finding:
    """A window, and what it says."""

    found: dict[str, Any]
    whole: Budget
    verdict: Verdict
    remedies: list[Remedy]


@dataclass(frozen=True)
class Trial:
    """A remedy that was tried: seconds of a step by window, without it and with it."""

    remedy: Remedy
    before: list[float]
    after: list[float]

    @property
    def gain(self) -> float:
        """How many times as fast a step is: the best of each side, because what else the machine does only adds."""
        return min(self.before) / min(self.after)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"overrides": list(self.remedy.words), "before": self.before, "after": self.after, "gain": self.gain}


def examine(config: Config, recompose: Recompose | None = None) -> Finding:
    """Measure and judge. Remedies that don't go together with the rest of the config are left out."""
    found = window(config)
    whole = budget(found)
    verdict = diagnose(found, whole)
    remedies = advise(verdict, config, whole, found)
    if recompose is not None:
        remedies = [remedy for remedy in remedies if _goes(recompose, remedy)]
    return Finding(found, whole, verdict, remedies)


def window(config: Config) -> dict[str, Any]:
    """The window of all ranks; see `ranks.measure`."""
    found: dict[str, Any] = run_world_of(config, ranks.measure, (ranks.windowed(config),))[0]
    return found


def try_out(config: Config, finding: Finding, recompose: Recompose) -> list[Trial]:
    """Run the likeliest remedies, lossy ones only if there are no others; the best of them comes first.

    It and what was there are run again, in turn, so that what else the machine does falls on both.
    """
    exact = [remedy for remedy in finding.remedies if not remedy.is_lossy]
    before = [finding.whole.step]
    changed = [(remedy, recompose(remedy.words)) for remedy in (exact or finding.remedies)[:MOST_TRIED]]
    tried = [(Trial(remedy, before, [budget(window(other)).step]), other) for remedy, other in changed]
    if not tried:
        return []
    tried.sort(key=lambda one: -one[0].gain)
    best, other = tried[0]
    for _ in range(REPEATS):
        before.append(budget(window(config)).step)
        best.after.append(budget(window(other)).step)
    return [trial for trial, _ in tried]


def main(config: Config, recompose: Recompose) -> int:
    """Measure, print the verdict, and try what should help if that is asked for."""
    from disttrain import build

    build.prepare(config)
    finding = examine(config, recompose)
    plan = plan_of(config)
    tried = try_out(config, finding, recompose) if config.doctor.fix else None
    if config.doctor.json:
        print(json.dumps(to_json(finding, plan, tried), indent=2))
        return 0
    print("\n".join(table.page(finding.found, finding.whole, finding.verdict, finding.remedies, plan)))
    if tried is not None:
        print("\n".join(table.trial_lines(tried)))
    return 0


def plan_of(config: Config) -> Plan | None:
    """What `plan` predicts for the config; None for a model whose shape it doesn't know."""
    if config.model.get("_target_") != GPT:
        return None
    settled = settle(config)
    hardware = resolve(config.hardware, settled.case.layout.world // settled.nodes)
    return make(settled.case, hardware, Constants(), settled.notes)


def to_json(finding: Finding, plan: Plan | None, tried: Sequence[Trial] | None) -> dict[str, Any]:
    """Everything as plain values; actions of pipelines are left to the record."""
    whole = finding.whole
    found: dict[str, Any] = {
        "verdict": finding.verdict.to_json(),
        "try": [{"overrides": list(one.words), "why": one.why, "lossy": one.is_lossy} for one in finding.remedies],
        "step_seconds": whole.step,
        "seconds": whole.parts,
        "callbacks": whole.callbacks,
        "hidden_seconds": whole.hidden,
        "stage_seconds": {str(stage): seconds for stage, seconds in whole.stage_seconds.items()},
        "mfu": mfu(finding.found, whole),
        "ranks": [{key: value for key, value in one.items() if key != "actions"} for one in finding.found["ranks"]],
    }
    if plan is not None:
        found["planned_seconds"] = table.planned(plan) | ({"step": plan.seconds.step} if plan.seconds is not None else {})
    if tried is not None:
        found["tried"] = [trial.to_json() for trial in tried]
    return found


def _goes(recompose: Recompose, remedy: Remedy) -> bool:
    try:
        recompose(remedy.words)
    except ConfigError:
        return False
    return True
