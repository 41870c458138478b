"""The page in a real Chromium, as a person meets it: from disk, at a desk and on a phone, by mouse and by keys."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disttrain import cli
from tests.report import records
from tests.report.test_ranks import trained

pytestmark = pytest.mark.service

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
SIZES = {"desk": (1400, 900), "phone": (390, 844)}
OPENS_WITHIN = 2.0
"""Seconds until everything is drawn; the best of three, as others use this machine too."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a sweep of twelve jobs, one of which failed, and that of a run on eight ranks."""
    sweep = records.sweep(tmp_path_factory.mktemp("outputs") / "12-00-00-k3f9")
    hybrid = tmp_path_factory.mktemp("hybrid")
    timed = {"_target_": "disttrain.callbacks.breakdown.Breakdown", "start": 1, "steps": 2}
    folder = trained(hybrid, {"breakdown": timed}, dp=2, tp=2, pp=2, micro_batch_size=1, steps=6, log_every=1, eval_every=3)
    folder.write_result(status="done", step=6, metrics=folder.read()[-1])
    for path in (sweep, hybrid):
        assert cli.main(["report", str(path), "report.figures=false"]) == 0
    return {"sweep": sweep / "report" / "index.html", "hybrid": hybrid / "report" / "index.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by playwright; `.ci/run` installs both."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra 'test'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Visit:
    """A page that was opened, and what it did beside showing itself."""

    def __init__(self, browser: Any, path: Path, size: str = "desk", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        before = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]")
        self.seconds = time.perf_counter() - before

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *raised: object) -> None:
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("file:")] == []
        assert len(self.asked) == 1

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def described(self) -> str:
        """What a screen reader says of the curves."""
        return str(self.page.get_attribute("[data-chart=curves]", "aria-label"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("subject", ["sweep", "hybrid"])
def test_opens_at_once_asks_nothing_and_fits(browser: Any, pages: dict[str, Path], subject: str, size: str) -> None:
    seconds = []
    for scheme in ("light", "dark", "light"):
        with Visit(browser, pages[subject], size, scheme) as visit:
            seconds.append(visit.seconds)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
            drawn = visit.page.locator("[data-chart]:visible")
            assert [place.locator("svg").count() > 0 for place in drawn.all()] == [True] * drawn.count()
            red, green, blue = re.findall(r"\d+", visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert (int(red) + int(green) + int(blue) > 384) == (scheme == "light")
    assert min(seconds) < OPENS_WITHIN


def test_sorts_by_click_and_by_key(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["sweep"]) as visit:
        heads = visit.texts("#final thead th")
        column = heads.index("validation loss")
        head = visit.page.locator("#final thead th").nth(column)

        def shown() -> list[str]:
            return visit.texts(f"#final tbody tr > :nth-child({column + 1})")

        head.locator("button").click()
        numbers = [float(text) for text in shown() if text != "–"]
        assert numbers == sorted(numbers)
        assert len(numbers) == 11
        assert shown()[-1] == "–"
        assert head.get_attribute("aria-sort") == "ascending"
        head.locator("button").focus()
        visit.page.keyboard.press("Enter")
        assert [float(text) for text in shown() if text != "–"] == sorted(numbers, reverse=True)
        assert shown()[-1] == "–"  # what is missing stays last
        assert visit.page.locator("#final [aria-sort]").count() == 1
        visit.page.locator("#final thead th button").nth(heads.index("run")).click()
        assert visit.texts("#final tbody tr > :first-child") == [str(number) for number in range(12)]  # as numbers: 2 before 10


def test_runs_are_shown_and_hidden(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["sweep"]) as visit:
        lines = visit.page.locator("[data-chart=curves] [class^=run-]")
        assert lines.count() == 11  # the refused job has no curve
        assert visit.page.locator("[name=run]:disabled").count() == 1
        visit.page.locator("[name=run]").first.uncheck()
        assert lines.count() == 10
        assert "10 of 12 runs" in visit.described()
        visit.page.get_by_role("button", name="none").click()
        assert lines.count() == 0
        assert visit.texts("[data-chart=curves]") == ["choose a run below"]
        visit.page.locator("[name=run]").nth(3).focus()
        visit.page.keyboard.press("Space")
        assert lines.count() == 1
        visit.page.get_by_role("button", name="all").click()
        assert lines.count() == 11


def test_axes_metrics_and_differences_are_chosen(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["sweep"]) as visit:
        page = visit.page
        assert visit.described().startswith("training loss over steps, 11 of 12 runs: from 4.0")
        assert page.is_visible("#striped")  # four strategies of one rate draw one curve
        page.get_by_role("radio", name="tokens").check()
        assert "over tokens" in visit.described()
        page.get_by_role("radio", name="time").check()
        assert "over time" in visit.described()
        page.get_by_role("radio", name="steps").check()
        page.select_option("#reference", label="strategy=ddp lr=0.001")
        page.get_by_role("button", name="none").click()
        page.locator("[name=run]").nth(3).check()
        assert re.search(r"minus that of strategy=ddp lr=0.001 over steps, 1 of 12 runs: from 0 to 0", visit.described())
        page.select_option("#reference", "")
        page.select_option("#metric", label="validation loss")
        assert visit.described().startswith("validation loss over steps, 1 of 12 runs: from 5.8")
        page.check("#log")
        page.locator("#smooth").focus()
        page.keyboard.press("End")
        assert page.locator("[data-chart=curves] svg").count() == 1


def test_the_bar_under_the_pointer_says_what_it_is(browser: Any, pages: dict[str, Path]) -> None:
    """Wherever in a bar the pointer stands, at its ends as in its middle."""
    with Visit(browser, pages["hybrid"]) as visit:
        page = visit.page
        found = page.evaluate("JSON.parse(document.getElementById('data').textContent)")
        bars = found["runs"][0]["timeline"]["bars"]  # [rank, kind, stage, micro-batch, start, end], in drawing order
        drawn = page.locator("[data-chart='timeline:0'] g[aria-label=bar] rect")
        assert drawn.count() == len(bars)
        alone = []
        for index, (rank, _, stage, _, start, end) in enumerate(bars):
            beside = [other for at, other in enumerate(bars) if at != index and other[0] == rank]
            if stage >= 0 and not any(other[4] < end and start < other[5] for other in beside):
                alone.append(index)
        widest = sorted(alone, key=lambda index: bars[index][4] - bars[index][5])[:8]
        assert len(widest) == 8
        tip = page.locator("[data-chart='timeline:0'] [aria-label=tip]")
        for index in widest:
            rank, kind, stage, micro, *_ = bars[index]
            drawn.nth(index).scroll_into_view_if_needed()
            box = drawn.nth(index).bounding_box()
            for share in (0.1, 0.5, 0.9):
                page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
                page.wait_for_timeout(60)  # the tip is drawn with the next frame
                said = tip.text_content().replace("\u200b", " ")
                assert f"rank {rank}: {found['kinds'][kind]} stage {stage}, micro-batch {micro} " in said, (share, said)


def test_one_run_of_several_is_chosen_for_its_timeline(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["sweep"]) as visit:
        shown = visit.page.locator("#timeline .of-run:visible")
        assert shown.count() == 1
        assert "strategy=pipeline_parallel" in shown.inner_text()  # a pipeline first
        visit.page.select_option("#timeline-run", label="strategy=fsdp lr=0.003")
        assert "strategy=fsdp lr=0.003" in shown.inner_text()
        assert shown.locator("svg").count() == 1
        assert visit.page.locator("#steps .of-run:visible svg").count() == 1


def test_the_theme_is_chosen_and_a_runs_words_stay_words(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["sweep"]) as visit:
        assert visit.page.title() == "12 runs – disttrain report" or "sweep 12-00-00-k3f9" in visit.page.title()
        button = visit.page.locator("#theme")
        button.click()
        button.click()
        assert button.inner_text() == "theme: dark"
        assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("subject", ["sweep", "hybrid"])
def test_nothing_keeps_out_who_cannot_see_or_use_a_mouse(browser: Any, pages: dict[str, Path], subject: str, scheme: str) -> None:
    """axe-core finds nothing: contrast, names, roles, order of headings, regions that scroll by keys."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is in the extra 'test'")
    with Visit(browser, pages[subject], scheme=scheme) as visit:
        for summary in visit.page.locator("summary").all():
            if summary.is_visible():
                summary.click()
        found = axe.Axe().run(visit.page)
        assert found.violations_count == 0, found.generate_report()
