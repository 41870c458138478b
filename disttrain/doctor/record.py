"""`doctor RUN`: a verdict on a finished run from its folder alone. Nothing is run.

With `breakdown.json` in it (callbacks.breakdown) the verdict is that of a measured window. Without, what the rows of the log say is
taken as it is (step time, wait for data, memory) and the rest of a step shared out as `plan` would: that is an estimate, and called one.
No class that the config names is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain.config import typed
from disttrain.config.check import check_numbers
from disttrain.config.schema import Config, DoctorConfig
from disttrain.doctor import table
from disttrain.doctor.advice import advise
from disttrain.doctor.budget import Budget, budget
from disttrain.doctor.diagnose import COMPUTE, FULL, MEMORY, NOTABLE, PART_OF, Verdict, diagnose
from disttrain.doctor.verb import Finding, plan_of, to_json
from disttrain.errors import ConfigError
from disttrain.plan.planned import Plan
from disttrain.plan.table import facts, title
from disttrain.plan.walls import show_bytes
from disttrain.record import RunFolder
from disttrain.texts import read_mapping

FILE = "breakdown.json"


def main(run: Path, words: Sequence[str]) -> int:
    """Print the verdict on the run folder `run`; `words` are `doctor.<key>=<value>`."""
    folder = RunFolder(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run folder: it holds no config.yaml", "the folder of one run: outputs/<date>/<time>-<id>")
    wanted = _options(words)
    values = folder.config_values()
    config = typed.build(Config, values)
    check_numbers(config)
    result, rows = folder.result(), folder.read()
    plan = plan_of(config)
    window = read_mapping(run / FILE)
    ended = how_it_ended({"step": rows[-1]["step"] if rows else "?"} | result, config.launch.device)
    finding = measured(config, window) if window else estimated(config, rows, plan)
    if wanted.json:
        whole = {"run": {"status": result.get("status"), "reason": result.get("reason", "")}, "from": "window" if window else "log"}
        print(json.dumps(whole | (to_json(finding, plan, None) if finding else {"verdict": None}), indent=2))
        return 0
    lines = facts(ended)
    if finding is None:
        lines += facts([("verdict", "too little is on record: how long a step takes is logged by callbacks.monitor")])
    elif window:
        lines += table.page(finding.found, finding.whole, finding.verdict, finding.remedies, plan)
    else:
        lines += table.verdict_lines(finding.verdict, finding.remedies)
        lines += title("A step: its time and its waits for data are measured, the rest is shared out as plan would")
        lines += table.parts(finding.whole, None, "about")
    print("\n".join(lines))
    return 0


def how_it_ended(result: Mapping[str, Any], device: str) -> list[tuple[str, str]]:
    """Status and reason, and what was planned beside what was measured; on the CPU not memory: there a process is measured."""
    said = str(result.get("status", "unknown")) + (f": {result['reason']}" if result.get("reason") else "")
    rows = [("run", f"{said}, after step {result.get('step', '?')}")]
    predicted, seen = result.get("predicted") or {}, result.get("measured") or {}
    compared = [key for key in sorted(predicted) if key in seen and not (device == "cpu" and key.startswith("memory/"))]
    both = [f"{key} {seen[key]:.4g} (planned {predicted[key]:.4g})" for key in compared]
    return rows + ([("measured", ", ".join(both))] if both else [])


def measured(config: Config, window: dict[str, Any]) -> Finding:
    """The verdict of a window on record."""
    whole = budget(window)
    verdict = diagnose(window, whole)
    return Finding(window, whole, verdict, advise(verdict, config, whole, window))


def estimated(config: Config, rows: Sequence[Mapping[str, Any]], plan: Plan | None) -> Finding | None:
    """The verdict of a log; None where it doesn't say how long a step took."""
    last: dict[str, float] = {}
    for row in rows:
        last |= row
    step = last.get("perf/step_seconds", 0.0)
    if not step:
        return None
    wait = min(step, last.get("perf/data_wait_seconds", 0.0))
    shares = table.planned(plan) if plan is not None else {"compute": 1.0}
    rest = sum(shares.values()) or 1.0
    parts = {"input": wait, "callbacks": 0.0, "host": 0.0} | {name: seconds / rest * (step - wait) for name, seconds in shares.items()}
    whole = Budget(step, parts)
    place: dict[str, Any] = {"device": config.launch.device, "degrees": {"pp": config.strategy.pp}, "ranks": []}
    found = place | {"num_micro": plan.case.micro_batches if plan is not None else 1, "steps": len(rows)}
    verdict = _of_log(whole, last, found, plan)
    return Finding(found, whole, verdict, advise(verdict, config, whole, found))


def _of_log(whole: Budget, last: Mapping[str, float], found: Mapping[str, Any], plan: Plan | None) -> Verdict:
    shares = {name: sum(map(whole.share, parts)) for name, parts in PART_OF.items()}
    others = sorted((name for name in shares if name != COMPUTE), key=lambda name: -shares[name])
    notable = [(name, shares[name]) for name in others if shares[name] >= NOTABLE]
    name = notable[0][0] if notable else COMPUTE
    said = [f"a step took {whole.step * 1e3:.3g} ms, of which {whole.parts['input'] * 1e3:.3g} ms were waits for data"]
    if "perf/data_wait_seconds_max" in last:
        said[0] += f" (up to {last['perf/data_wait_seconds_max'] * 1e3:.3g} ms on a rank)"
    if "perf/mfu" in last:
        said.append(f"MFU {last['perf/mfu']:.1%}")
    by_axis = {key.split("/")[1]: value for key, value in last.items() if key.startswith("comm/") and key.endswith("/bytes")}
    by_axis.pop("bytes", None)  # all axes together
    said += [f"a rank sent {show_bytes(value)} a step over {axis}" for axis, value in sorted(by_axis.items())]
    peak, usable = last.get("memory/peak_bytes_max", 0.0), plan.usable_bytes if plan is not None else None
    if found["device"] == "cuda" and usable and peak > FULL * usable:
        return Verdict(MEMORY, 0.0, [f"the fullest rank took {peak / usable:.0%} of what a device offers", *said], beside=notable)
    said.append("an estimate: callbacks=[default,breakdown] measures it in the middle of a run")
    return Verdict(name, shares[name], said, beside=notable[1:])


def _options(words: Sequence[str]) -> DoctorConfig:
    """`doctor.json=true`."""
    for word in words:
        key, _, value = word.partition("=")
        if key.removeprefix("doctor.") != "json" or value not in ("true", "false"):
            raise ConfigError(f"'doctor RUN' reads a record, and takes doctor.json=true alone; found {word}", "doctor RUN doctor.json=true")
    return replace(DoctorConfig(), json=any(word.endswith("=true") for word in words))
