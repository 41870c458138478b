"""The dashboard in W&B, as code: a saved view of the project with the report's panels, its runs grouped by strategy.

`wandb-workspaces` (extra `dashboard`) turns it into what W&B stores. Online it is saved; else that is written beside the
page, with the commands that send runs and dashboard once there is a login.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.config.schema import ReportConfig
from disttrain.errors import LaunchError, MissingExtraError
from disttrain.report import words
from disttrain.report.curves import metrics_of
from disttrain.report.read import Run, differences, is_sent, sweep_of
from disttrain.texts import read_json, write_json

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

SPEC = "wandb-dashboard.json"
STRATEGY = "strategy.name"
MOST_KEYS = 6
"""Config keys of a sweep that get a column and an axis."""
LINES = (
    ("Loss", ("train/loss", "val/loss", "train/grad_norm", "train/lr")),
    ("Throughput", ("perf/tokens_per_second", "perf/samples_per_second", "perf/step_seconds", "perf/data_wait_seconds", "perf/mfu")),
    ("Memory", ("memory/peak_bytes",)),
    ("System", ("system/cpu_utilisation", "system/device_utilisation")),
)
"""Sections of curves; a metric that no run has gets no panel."""
SPREAD = ("perf/step_seconds", "memory/peak_bytes", "system/cpu_utilisation", "system/device_utilisation", "perf/data_wait_seconds")
"""Metrics whose smallest and largest rank are drawn too."""


def push(runs: Sequence[Run], into: Path, wanted: ReportConfig) -> None:
    """Save the dashboard of `runs` in W&B; without a login write it to `into` and say how to send it.

    MissingExtraError without the package, LaunchError where W&B refuses.
    """
    from disttrain.callbacks.wandb import resolve_mode

    try:
        made = workspace(runs, wanted)
    except ImportError as error:
        raise MissingExtraError("wandb-workspaces", "dashboard", "report.wandb=true") from error
    write_json(into / SPEC, spec(made))
    print(f"W&B dashboard '{made.name}' of project {made.project}: {into / SPEC}")
    if resolve_mode("auto") == "online":
        _save(made)
        return
    print("nobody is logged in to W&B, or its mode is offline, so nothing was sent; to send it:\n  wandb login")
    for folder in unsent(runs):
        print(f"  wandb sync {folder}")
    print("  and this command again")


def _save(made: Workspace) -> None:
    import wandb

    try:
        if not made.entity:
            made.entity = str(wandb.Api().default_entity)
        print(made.save().url)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise LaunchError(f"W&B did not take the dashboard: {error}", f"report.wandb=true later; it is kept in {SPEC}") from error


def unsent(runs: Sequence[Run]) -> list[Path]:
    """Offline W&B files of these runs."""
    return [path for run in runs for path in sorted((run.folder / "wandb").glob("offline-run-*")) if path.is_dir()]


def spec(made: Workspace) -> dict[str, Any]:
    """What W&B is given, as JSON values."""
    found: dict[str, Any] = json.loads(made._to_model().model_dump_json(by_alias=True))
    return found


def workspace(runs: Sequence[Run], wanted: ReportConfig) -> Workspace:
    """The view: sections of panels, and the table of runs with what tells them apart."""
    from wandb_workspaces import workspaces as ws

    logged = next((run.config for run in runs if run.config.get("callbacks.wandb.project")), {})
    project = wanted.project or str(logged.get("callbacks.wandb.project") or "disttrain")
    entity = wanted.entity or str(logged.get("callbacks.wandb.entity") or "")
    keys = [key for key in differences(runs) if key != "run_name"][:MOST_KEYS] if len(runs) > 1 else []
    losses = [key for key in ("val/loss", "train/loss") if any(key in run.metrics for run in runs)] or ["train/loss"]
    columns = [f"config:{_stored(key)}" for key in dict.fromkeys([STRATEGY, *keys])]
    columns += [f"summary:{key}" for key in (*losses, "perf/tokens_per_second", "perf/step_seconds", "memory/peak_bytes_max")]
    table = ws.RunsetSettings(
        groupby=[ws.Config(_stored(STRATEGY))],
        order=[ws.Ordering(ws.Summary(losses[0]), ascending=True)],
        pinned_columns=["run:displayName", "run:state", *columns],
        filters=_only(runs),
    )
    settings = ws.WorkspaceSettings(x_axis="step", group_by_prefix="first", max_runs=max(10, min(100, len(runs))))
    return ws.Workspace(
        entity=entity, project=project, name=_title(runs), sections=_sections(runs, keys, losses), settings=settings, runset_settings=table
    )


def _title(runs: Sequence[Run]) -> str:
    sweep = sweep_of(runs)
    return f"disttrain sweep {sweep.name}" if sweep else f"disttrain {runs[0].label}" if len(runs) == 1 else f"disttrain, {len(runs)} runs"


def _only(runs: Sequence[Run]) -> Any:
    """A filter that leaves these runs of the project: their sweep, or their ids where W&B has given some."""
    from wandb_workspaces import workspaces as ws

    if sweep := sweep_of(runs):
        return ws.And(ws.Metric("Group") == sweep.name)
    ids = [known["id"] for run in runs if (known := read_json(run.folder / "wandb" / "seen.json"))]
    return ws.And(ws.Metric("ID").isin(ids)) if len(ids) == len(runs) else ""


def _stored(key: str) -> str:
    """A nested config key as W&B stores it: `strategy.value.name`."""
    first, _, rest = key.partition(".")
    return f"{first}.value.{rest}" if rest else f"{first}.value"


def _sections(runs: Sequence[Run], keys: Sequence[str], losses: Sequence[str]) -> list[Section]:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    known = {*metrics_of(runs), *(key for run in runs for key in run.metrics)}
    by = wr.Config(STRATEGY)
    sections = []
    for title, metrics in LINES:
        panels: list[Any] = [
            wr.LinePlot(title=words.name(key), x="step", y=[key], groupby=by, groupby_aggfunc="mean", groupby_rangefunc="minmax")
            for key in metrics
            if key in known
        ]
        panels += [
            wr.LinePlot(title=f"{words.name(key)}, ranks", x="step", y=[key, f"{key}_min", f"{key}_max"])
            for key in metrics
            if key in SPREAD and f"{key}_max" in known
        ]
        if panels:
            sections.append(ws.Section(name=title, panels=panels, is_open=True))
    sections.append(ws.Section(name="Communication", panels=_communication(known, by), is_open=True))
    sections.append(ws.Section(name="Plan and measurement", panels=_planned(runs), is_open=True))
    if keys:
        columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(key)) for key in keys]
        columns += [wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(losses[0]))]
        sweep: list[Any] = [wr.ParallelCoordinatesPlot(columns=columns), wr.ParameterImportancePlot(with_respect_to=losses[0])]
        sections.append(ws.Section(name="Sweep", panels=[*sweep, wr.RunComparer(diff_only=True)], is_open=True))
    return [section for section in sections if section.panels]


def _communication(known: set[str], by: Any) -> list[Any]:
    """Bytes a step by axis, a line a collective; where none was counted yet, whatever will be."""
    from wandb_workspaces.reports import v2 as wr

    axes: dict[str, list[str]] = {}
    for key in sorted(known):
        if is_sent(key):
            axes.setdefault(key.split("/")[1], []).append(key)
    if not axes:
        return [wr.LinePlot(title="bytes a step", x="step", metric_regex="comm/.*")]
    return [wr.LinePlot(title=f"bytes a step over {axis}", x="step", y=keys, groupby=by) for axis, keys in axes.items()]


def _planned(runs: Sequence[Run]) -> list[Any]:
    """A bar of the plan beside one of the measurement, for every prediction."""
    from wandb_workspaces.reports import v2 as wr

    keys = dict.fromkeys(key for run in runs for key in run.predicted)
    return [
        wr.BarPlot(
            title=f"{words.name(key)}: plan, measurement",
            metrics=[wr.SummaryMetric(f"predicted/{key}"), wr.SummaryMetric(f"{key}_max" if key == "memory/peak_bytes" else key)],
            groupby=wr.Config(STRATEGY),
        )
        for key in keys
    ]
