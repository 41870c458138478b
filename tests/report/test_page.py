"""The page as a file: what it says, and that it neither asks a network nor lets a run's words become markup."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from disttrain import cli
from disttrain.record import RunFolder
from disttrain.report.curves import axes, curves_of, thin
from disttrain.report.page import title_of
from disttrain.report.read import Run, collect, differences
from disttrain.report.timelines import timeline
from disttrain.texts import write_json
from tests.doctor.test_verdict import record
from tests.report import records

SECTIONS = {"failures", "curves", "final", "throughput", "communication", "predicted", "timeline", "steps", "config", "environment"}


class Outline(HTMLParser):
    """Elements with an address in them, headings, and what stands in each element of interest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.scripts = 0
        self.policy = ""
        self.text = ""
        self._skips = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [value for key in ("src", "href") if (value := found.get(key))]
        self.ids += [value for value in [found.get("id")] if value]
        self.scripts += tag == "script"
        self.policy = (found.get("content") or "") if "http-equiv" in found else self.policy
        self._skips += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skips -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._skips else f" {data}"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of twelve jobs, with its report."""
    folder = records.sweep(tmp_path_factory.mktemp("outputs") / "12-00-00-k3f9")
    assert cli.main(["report", str(folder), "report.figures=false"]) == 0
    return folder


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_section_and_asks_for_nothing(sweep: Path) -> None:
    page = (sweep / "report" / "index.html").read_text()
    outline = Outline(page)
    assert set(outline.ids) >= SECTIONS
    assert all(address.startswith("#") or (sweep / "report" / address).is_file() for address in outline.addresses)
    assert outline.policy.startswith("default-src 'none'")
    assert outline.scripts == 4  # the numbers, two libraries and the page's own: none that a run has written
    assert records.EVIL in outline.text  # which was shown as the words that it is
    assert len(page) < 1_500_000


def test_what_failed_is_told_with_its_error_and_what_was_refused_with_its_remedy(sweep: Path) -> None:
    text = Outline((sweep / "report" / "index.html").read_text()).text
    for words in ("12 runs", "10 done", "1 failed", "1 refused", "RuntimeError", "a link is gone", "try: strategy.tp=2"):
        assert words in text, words


def test_numbers_on_the_page_are_those_of_the_record(sweep: Path) -> None:
    rows = list(csv.DictReader((sweep / "report" / "table.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == [str(number) for number in range(12)]
    assert {(row["strategy"], row["optimizer.lr"]) for row in rows} == {(s, str(lr)) for s in records.STRATEGIES for lr in records.RATES}
    for row, number in zip(rows, range(12), strict=True):
        metrics = RunFolder(sweep / str(number)).result().get("metrics", {})
        if metrics:
            assert float(row["val/loss"]) == metrics["val/loss"]
            assert float(row["comm_bytes"]) == 4096.0
    assert rows[records.REFUSED]["val/loss"] == ""
    lines = list(csv.DictReader((sweep / "report" / "curves.csv").read_text().splitlines()))
    assert len(lines) == 10 * 60 + 30
    first = embedded((sweep / "report" / "index.html").read_text())["runs"][0]
    at, values = first["y"]["train/loss"]
    assert [first["x"]["tokens"][index] for index in at][:3] == [128.0, 256.0, 384.0]
    assert values == pytest.approx([float(line["train/loss"]) for line in lines[:60]], rel=1e-6)


def test_runs_are_told_apart_by_what_was_typed(sweep: Path) -> None:
    runs = collect([sweep])
    assert runs[4].label == "strategy=fsdp lr=0.003"
    found = differences(runs)
    assert list(found)[:1] == ["optimizer.lr"]
    assert {value: len(some) for value, some in found["optimizer.lr"].items()} == {"0.001": 4, "0.003": 4, "0.01": 3}
    assert "train.steps" not in found


def test_unrelated_runs_are_told_apart_and_are_no_sweep(tmp_path: Path) -> None:
    """A run of another model, whose group the first did not type; one that went on; the same again; nothing of them is a folder's path."""
    first = records.job(tmp_path / "first", "ddp", 1e-3, [], steps=4)
    records.job(tmp_path / "second", "ddp", 1e-2, ["model=llama_tiny", "optimizer.lr=1e-2"], steps=4)
    for path, name in ((first, "tiny_gpt-ddp"), (tmp_path / "second", "llama_tiny-ddp")):
        config = path / "config.yaml"
        config.write_text(re.sub("^run_name: .*$", f"run_name: {name}", config.read_text(), flags=re.MULTILINE))
    runs = collect([tmp_path])
    assert [run.label for run in runs] == ["tiny_gpt-ddp lr=0.001", "llama_tiny-ddp lr=0.01"]
    assert title_of(runs) == "tiny_gpt-ddp and llama_tiny-ddp"
    (first / "overrides.1.yaml").write_text(f"[train.steps=4, 'resume={first}']")
    assert [run.label for run in collect([tmp_path])] == ["tiny_gpt-ddp lr=0.001", "llama_tiny-ddp lr=0.01"]
    records.job(tmp_path / "third", "ddp", 1e-3, [], steps=4)
    records.job(tmp_path / "fourth", "ddp", 1e-3, [f"resume={first}"], steps=4)
    alike = collect([tmp_path / "third", tmp_path / "fourth"])
    assert [(run.label, run.tiny) for run in alike] == [("third", "third"), ("fourth", "fourth")]
    assert title_of(alike) == "2 runs"


def test_a_timeline_says_how_long_ranks_waited(sweep: Path) -> None:
    """Each of two ranks works 60 of 80 ms."""
    found = timeline(next(run for run in collect([sweep]) if run.short == "9"))
    assert found is not None
    assert found.waited == pytest.approx(1 - 120 / 160)
    assert found.predicted == pytest.approx(1 / 3)  # (p - 1) / (m + p - 1)
    assert found.names == {0: "pp 0", 1: "pp 1"}


def test_one_run_and_folders_above_runs(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(sweep / "0"), f"report.output={tmp_path / 'out'}"]) == 0
    assert str(tmp_path / "out" / "index.html") in capsys.readouterr().out
    text = Outline((tmp_path / "out" / "index.html").read_text()).text
    assert "done after 60 steps" in text
    assert "took 70 s" in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"index.html", "table.csv", "curves.csv", "train-loss.png", "val-loss.png", "timeline.png", "step-times.png"}
    assert len(collect([sweep.parent])) == 12
    assert len(collect([sweep / "0", sweep / "1", sweep / "0"])) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs the folder"),
        (["nowhere"], "there is no folder nowhere"),
        (["--colour"], "takes folders and report.<key>=<value>"),
        (["."], "holds no run"),
        ([".", "report.colour=red"], "there is no key 'report.colour'"),
        ([".", "report.figures=maybe"], "true or false"),
        ([".", "report.figures=["], "report.figures=[ is not allowed: it takes true or false"),
    ],
)
def test_mistakes(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_thin_curve_keeps_its_peaks_and_holes() -> None:
    values = [float(n % 7) for n in range(10_000)]
    values[4321], values[1234], values[77] = 1000.0, -1000.0, float("nan")
    kept = thin(values, 400)
    assert len(kept) <= 400
    assert {0, 1234, 4321, 9999} <= set(kept)
    rows = [{"step": step + 1, "train/loss": value} for step, value in enumerate(values[:80])]
    drawn = curves_of(Run(Path(), {}, rows=rows), ["train/loss"], 1000)
    assert drawn["y"]["train/loss"][1][77] is None


def test_seconds_of_a_record_without_them_are_those_of_its_steps() -> None:
    rows = [{"step": 1, "perf/step_seconds": 2.0}, {"step": 5, "perf/step_seconds": 0.5}, {"step": 6}]
    assert axes(rows)["seconds"] == [2.0, 4.0, 4.0]


def test_a_timed_window_has_its_verdict(sweep: Path, tmp_path: Path) -> None:
    """What holds a run back is judged from its record, with the override that should help."""
    waits = 0.08  # of steps of 0.1 s: 10 ms of forward and backward, 10 of what comes after the update
    write_json(sweep / "0" / "breakdown.json", record([{"update": 0.0, "finish": 0.0, "between": 0.09, "input": waits}] * 2))
    try:
        assert cli.main(["report", str(sweep / "0"), f"report.output={tmp_path}", "report.figures=false"]) == 0
    finally:
        (sweep / "0" / "breakdown.json").unlink()
    text = Outline((tmp_path / "index.html").read_text()).text
    assert "input, 80% of a step" in text
    assert "dataset.num_workers=" in text


@pytest.mark.parametrize(
    "name", ["result.json", "config.yaml", "overrides.yaml", "environment.json", "breakdown.json", "ranks/rank-0.json"]
)
def test_a_damaged_run_is_named_and_the_others_are_drawn(name: str, tmp_path: Path) -> None:
    records.sweep(tmp_path, steps=2)
    (tmp_path / "0" / name).write_text('{"a": [')
    assert cli.main(["report", str(tmp_path), "report.figures=false"]) == 0
    text = Outline((tmp_path / "report" / "index.html").read_text()).text
    assert "1 unreadable" in text
    assert f"{name} can't be read" in text


def test_a_damaged_list_of_jobs_leaves_their_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.sweep(tmp_path, steps=2)
    (tmp_path / "sweep.json").write_text('[{"job": "0"')
    assert len(collect([tmp_path])) == 12
    assert "sweep.json can't be read" in capsys.readouterr().err


def test_runs_that_came_to_nothing_have_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was killed with a torn last row, one whose loss is not finite, one that left an empty folder."""
    killed = records.job(tmp_path / "killed", "ddp", 1e-3, ["optimizer.lr=0.001"], steps=4)
    (killed / "result.json").write_text('{"status": "running", "exit_code": null}')
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')
    diverged = records.job(tmp_path / "diverged", "ddp", 1.0, ["optimizer.lr=1.0"], steps=4)
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/loss": "nan", "train/grad_norm": "inf"}\n')
    (diverged / "result.json").write_text('{"status": "failed", "exit_code": 1, "reason": "the run has diverged"}')
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "result.json").write_text('{"status": "interrupted", "exit_code": 130}')
    assert cli.main(["report", str(tmp_path), "report.figures=true"]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    text = Outline(page).text
    for words in ("3 runs", "running, or killed without a word", "the run has diverged", "interrupted", "nan"):
        assert words in text, words
    curves = {run["label"]: run["y"].get("train/loss", [[], []])[1] for run in embedded(page)["runs"]}
    assert [len(curve) for curve in curves.values()] == [0, 5, 4]
    assert curves["lr=1.0"][-1] is None
    assert cli.main(["report", str(bare), "report.figures=false"]) == 0
    assert "no reason was recorded" in Outline((bare / "report" / "index.html").read_text()).text
