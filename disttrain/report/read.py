"""Runs as their folders tell of them, and what tells each from the others. Nothing but the record is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disttrain.config.typed import show
from disttrain.errors import ConfigError, UserError
from disttrain.record import RunFolder
from disttrain.secrecy import redacted
from disttrain.texts import flat, read_json, read_mapping

DEEPEST = 3
"""Folders below a given one that are looked into."""
LOG_LINES = 40
"""Last lines of a failed rank's log that are shown."""
STATUS = {0: "done", 1: "failed", 2: "user_error", 130: "interrupted", 143: "preempted"}
LONGEST = 26
"""Letters of a label beside a bar."""
NOT_A_DIFFERENCE = ("predicted.", "launch.env.", "paths.", "resume")
"""Keys that differ without making another experiment."""
NO_LABEL = (*NOT_A_DIFFERENCE, "hydra.", "run_name")
"""Those, and what says where a run lies and what it is called."""
MOST_KEYS = 4
"""Keys by which runs are told apart beside each other."""
IN_NAME = ("model", "strategy")
"""Groups whose choices a run's name is made of, unless one was typed: it stands for them where one is not told otherwise."""


@dataclass
class Run:
    """One run."""

    folder: Path
    result: dict[str, Any]
    words: list[str] = field(default_factory=list)
    """What was typed."""
    config: dict[str, Any] = field(default_factory=dict)
    """Resolved, by dotted key; empty for a run that was refused."""
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    window: dict[str, Any] = field(default_factory=dict)
    """What `callbacks.breakdown` has timed; empty without it."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What each rank has kept for itself."""
    log: str = ""
    """The last lines of the log of the rank that failed; empty for a run that did not fail."""
    label: str = ""
    """What it is called among the others."""
    short: str = ""
    """Its folder's name."""
    tiny: str = ""
    """The label in a few letters: values without their keys."""

    @property
    def status(self) -> str:
        """`done`, `failed`, `user_error`, `interrupted`, `preempted`, `running`, or `unreadable` for a damaged record."""
        return str(self.result.get("status", ""))

    @property
    def reason(self) -> str:
        """Why it did not end well; empty if it did."""
        failures = self.result.get("failures") or []
        return str(self.result.get("reason") or (failures[-1]["message"] if failures else ""))

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric: as the result says, or as far as the rows go."""
        found: dict[str, float] = {}
        for row in self.rows:
            found |= row
        found |= self.result.get("metrics") or {}
        return {key: number for key, number in found.items() if isinstance(number, (int, float))}

    @property
    def predicted(self) -> dict[str, float]:
        """What `plan` predicted, by metric."""
        kept = {key.removeprefix("predicted."): number for key, number in self.config.items() if key.startswith("predicted.")}
        return dict(self.result.get("predicted") or {}) or kept

    @property
    def measured(self) -> dict[str, float]:
        """What was measured of what was predicted."""
        return dict(self.result.get("measured") or {})

    @property
    def step(self) -> int:
        """Steps taken."""
        return int(self.result.get("step") or (self.rows[-1]["step"] if self.rows else 0))

    def communication(self) -> tuple[dict[str, dict[str, float]], bool]:
        """({axis: {collective: bytes a step of a rank}}, whether measured); what was planned where nothing was measured."""
        for numbers, is_measured in ((self.metrics, True), (self.predicted, False)):
            axes: dict[str, dict[str, float]] = {}
            for key, number in numbers.items():
                if is_sent(key):
                    _, axis, kind = key.split("/")
                    axes.setdefault(axis, {})[kind.removesuffix("_bytes")] = number
            if axes:
                return axes, is_measured
        return {}, False


def collect(paths: Sequence[Path]) -> list[Run]:
    """The runs that `paths` name, each a run's folder, a sweep's or one above them. ConfigError for one that holds none."""
    runs: dict[Path, Run] = {}
    for path in paths:
        found = list(_under(path, DEEPEST))
        if not found:
            raise ConfigError(f"{path} holds no run", "python -m disttrain report outputs/<date>/<time>-<id>")
        runs |= {run.folder.resolve(): run for run in found}
    several = list(runs.values())
    _name(several)
    return several


def _under(path: Path, depth: int) -> Iterator[Run]:
    try:
        jobs = read_json(path / "sweep.json")
    except ConfigError as error:
        print(f"disttrain: {error.message}; its runs are found by their folders", file=sys.stderr)
        jobs = None
    if isinstance(jobs, list):
        known = {str(job["job"]): job for job in jobs}
        others = sorted(one.name for one in path.iterdir() if _is_run(one) and one.name not in known)
        for name in [*known, *others]:
            yield _open(path / name, known.get(name, {}))
    elif _is_run(path):
        yield _open(path, {})
    elif depth > 0 and path.is_dir():
        for inner in sorted(one for one in path.iterdir() if one.is_dir()):
            yield from _under(inner, depth - 1)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "result.json").is_file()


def _open(path: Path, job: Mapping[str, Any]) -> Run:
    """The run at `path`; one whose record is damaged says so, and does not keep the others from being shown."""
    try:
        return _read(path, job)
    except (UserError, OSError) as error:
        reason = error.message if isinstance(error, UserError) else str(error)
        return Run(path, {"status": "unreadable", "reason": reason}, words=_words_of(job))


def _words_of(job: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in job.get("overrides", ())]


def _read(path: Path, job: Mapping[str, Any]) -> Run:
    """`job` is what its sweep says of the run at `path`, which is all there is of one that never began."""
    folder = RunFolder(path)
    result = folder.result() or {"status": STATUS.get(int(job.get("exit_code", 1)), "failed"), "reason": job.get("reason", "")}
    config = folder.config_values() if (path / "config.yaml").is_file() else {}
    run = Run(
        path,
        result,
        words=folder.overrides() or _words_of(job),
        config=dict(flat(config)),
        environment=read_mapping(path / "environment.json"),
        rows=folder.read(),
        window=read_mapping(path / "breakdown.json"),
        ranks=[folder.of_rank(rank) for rank in folder.ranks()],
    )
    if run.status in ("failed", "user_error"):
        failures = result.get("failures") or [{}]
        run.log = _tail(folder.log_file(failures[-1].get("rank") or 0))
    return run


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    return redacted("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]))


def is_sent(key: str) -> bool:
    """Whether a metric is bytes sent in a step, by axis and collective."""
    return key.startswith("comm/") and key.count("/") == 2 and key.endswith("_bytes")


def finite(run: Run, key: str) -> bool:
    """Whether the run's last value of `key` is a number."""
    return math.isfinite(run.metrics.get(key, math.nan))


def _name(runs: Sequence[Run]) -> None:
    """Labels: values of keys in which the runs differ; the folders' names before them where these tell no run from another."""
    keys = differing(runs)
    untold = any(key in IN_NAME and not value_of(run, key) for run in runs for key in keys)
    names = {run.folder.resolve().name for run in runs}
    for run in runs:
        place = run.folder.resolve()
        run.short = place.name if len(names) == len(runs) else f"{place.parent.name}/{place.name}"
        own = {key.rpartition(".")[2]: value for key in keys if (value := value_of(run, key)) and not (untold and key in IN_NAME)}
        named = [name_of(run)] if untold else []
        run.label = " ".join([*named, *(f"{key}={value}" for key, value in own.items())])
        run.tiny = " ".join([*named, *own.values()])
    labels, short = [run.label for run in runs], [run.tiny for run in runs]
    for run in runs:
        if not run.label or labels.count(run.label) > 1:
            run.label = f"{run.short} {run.label}".strip()
        if not run.tiny or short.count(run.tiny) > 1 or len(run.tiny) > LONGEST:
            run.tiny = run.short
    if len(runs) == 1:
        runs[0].label = f"{name_of(runs[0]) or 'run'} {runs[0].short}"


def name_of(run: Run) -> str:
    """What the experiment is called; empty for a run that was refused."""
    return str(run.config.get("run_name") or "")


def sweep_of(runs: Sequence[Run]) -> Path | None:
    """The folder of the sweep that all runs are of."""
    parents = {run.folder.resolve().parent for run in runs}
    (first, *others) = parents
    return first if not others and (first / "sweep.json").is_file() else None


def value_of(run: Run, key: str) -> str:
    """The value of a key, a group's by its name, or what was typed for it; empty where neither is known."""
    for known in (key, f"{key}.name"):
        if known in run.config:
            return show(run.config[known])
    typed = [word.partition("=")[2] for word in run.words if _key(word) == key]
    return typed[-1] if typed else ""


def differing(runs: Sequence[Run]) -> list[str]:
    """The first keys with other values in some runs than in others: of those that were typed, or of all where there are none."""
    typed = dict.fromkeys(_key(word) for run in runs for word in run.words)
    found = [key for key in typed if not key.startswith(NO_LABEL) and len({value_of(run, key) for run in runs}) > 1]
    return (found or [key for key in differences(runs) if not key.startswith(NO_LABEL) and not key.endswith("_target_")])[:MOST_KEYS]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def differences(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """{config key: {value: runs}} of keys in which runs differ; what was typed first, the rest by name."""
    runs = [run for run in runs if run.config]
    keys = {_key(word): None for run in runs for word in run.words}
    keys |= dict.fromkeys(sorted({key for run in runs for key in run.config}))
    found = {}
    for key in keys:
        by_value: dict[str, list[Run]] = {}
        for run in runs:
            by_value.setdefault(show(run.config[key]) if key in run.config else "(none)", []).append(run)
        if len(by_value) > 1 and not key.startswith(NOT_A_DIFFERENCE):
            found[key] = by_value
    return found
