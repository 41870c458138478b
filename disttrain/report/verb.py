"""`report RUN_OR_SWEEP ...`: the page, CSV and PNGs beside it, and on request a dashboard in W&B."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain.config import typed
from disttrain.config.schema import ReportConfig
from disttrain.errors import ConfigError
from disttrain.places import expanded
from disttrain.report import tables
from disttrain.report.curves import axes, metrics_of
from disttrain.report.page import page
from disttrain.report.read import Run, collect
from disttrain.report.words import count
from disttrain.texts import typed_value, write_text

PAGE = "index.html"
FOLDER = "report"


def main(words: Sequence[str]) -> int:
    """Write the report of the folders among `words`; the others are `report.<key>=<value>`."""
    folders = [expanded(word) for word in words if "=" not in word]
    wanted = _options([word for word in words if "=" in word])
    example = "python -m disttrain report outputs/<date>/<time>-<id>"
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"'report' takes folders and report.<key>=<value>; found {flags[0]}", "python -m disttrain --help")
    if not folders:
        raise ConfigError("'report' needs the folder of a run or of a sweep, or several", example)
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise ConfigError(f"there is no folder {missing[0]}", example)
    write(collect(folders), (folders[0] if len(folders) == 1 else Path()) / FOLDER, wanted)
    return 0


def write(runs: Sequence[Run], into: Path, wanted: ReportConfig) -> None:
    """The page, in `into` unless another folder is wanted, with what lies beside it."""
    into = into if wanted.output is None else expanded(wanted.output)
    texts = {"table.csv": tables.final(runs).csv(), "curves.csv": _curves(runs)}
    try:
        into.mkdir(parents=True, exist_ok=True)
        drawn = _figures(runs, into) if wanted.figures else []
        texts[PAGE] = page(runs, [*texts, *drawn])
        for name, text in texts.items():
            write_text(into / name, text)
    except OSError as error:
        raise ConfigError(f"the report can't be written: {error}", "report.output=<a folder that you may write to>") from error
    if wanted.wandb:
        from disttrain.report.dashboard import push

        push(runs, into, wanted)
    print(f"{count(len(runs), 'run')}: {into / PAGE}\n{(into / PAGE).resolve().as_uri()}")


def _figures(runs: Sequence[Run], into: Path) -> list[str]:
    from disttrain.report import figures

    try:
        return figures.draw(runs, into)
    except ImportError:
        print("no PNGs: they need matplotlib; pip install 'disttrain[figures]'", file=sys.stderr)
        return []


def _curves(runs: Sequence[Run]) -> str:
    """Every row of every run: what the curves are drawn from, nothing left out."""
    metrics = metrics_of(runs)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "step", "tokens", "seconds", *metrics])
    for run in runs:
        x = axes(run.rows)
        for index, row in enumerate(run.rows):
            writer.writerow([run.label, row["step"], x["tokens"][index], x["seconds"][index], *[row.get(key, "") for key in metrics]])
    return out.getvalue()


def _options(words: Sequence[str]) -> ReportConfig:
    values = {}
    for word in words:
        key, _, text = word.partition("=")
        values[key.removeprefix("report.")] = typed_value(text)
    return typed.build(ReportConfig, values, "report", [f"report.{name}" for name in vars(ReportConfig())])
