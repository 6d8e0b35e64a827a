"""A report in a real browser: quiet, self-contained, usable by keyboard, and fit for a phone and both themes.

With GPATTENTION_SCREENSHOTS set to a folder, pictures of every section are left there; with
GPATTENTION_REPORT set to a page, that page is looked at instead of a made-up one.
"""

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from gpattention.reports import build_report
from gpattention.reports.sections import SECTIONS
from gpattention.reports.style import DARK, LIGHT
from tests.reports.synthetic import KINDS, synthetic_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow  # a browser takes its time; `make browser` runs them

PHONE = {"width": 360, "height": 780}
TALLEST = 1100  # pixels of a picture
DESK = {"width": 1440, "height": 1000}
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


@dataclass
class Watched:
    """A page, and everything it said or asked for."""

    page: "Page"
    told: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("GPATTENTION_REPORT")
    if given:
        return Path(given).resolve()
    few: dict[str, Any] = {"predictors": ("model", "model+temperature"), "scores": ("entropy", "gp_variance")}
    runs = [synthetic_run(kind, **few) for kind in KINDS]
    runs.append(synthetic_run("cgp", name=HOSTILE, data="cola", texts=True, suites=("clean",)))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(build_report(runs))
    return path


def watch(browser: "Browser", report: Path, size: dict[str, int] = DESK, **options: Any) -> Watched:
    context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
    watched = Watched(context.new_page())
    watched.page.on("console", lambda message: watched.told.append(message.text))
    watched.page.on("pageerror", lambda error: watched.told.append(str(error)))
    watched.page.on("request", lambda request: watched.asked.append(request.url))
    watched.page.goto(report.as_uri())
    return watched


@pytest.fixture(params=["light", "dark"])
def watched(request: pytest.FixtureRequest, browser: "Browser", report: Path) -> Iterator[Watched]:
    found = watch(browser, report, color_scheme=request.param)
    yield found
    found.page.context.close()


def test_quiet_and_self_contained(watched: Watched, report: Path) -> None:
    watched.page.wait_for_load_state("networkidle")
    assert watched.told == []
    assert [url for url in watched.asked if not url.startswith("data:")] == [report.as_uri()]
    assert "taken" not in watched.page.title()
    assert watched.page.evaluate("window.frames.length") == 0


def test_every_chart_is_there(watched: Watched) -> None:
    page = watched.page
    page.evaluate("for (const part of document.querySelectorAll('.panel, .frame')) part.hidden = false")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.chart > svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('path, use').length])"
    )
    assert len(sizes) > 50
    assert all(width > 200 and height > 80 and marks >= 5 for width, height, marks in sizes)
    ours = {section.name for section in SECTIONS} - {"summary", "gallery", "environment"}
    drawn = set(
        page.evaluate(
            "[...document.querySelectorAll('section')].filter(s => s.querySelector('.chart')).map(s => s.id)"
        )
    )
    assert drawn <= ours
    if "GPATTENTION_REPORT" not in os.environ:
        assert drawn == ours
    for name in ours - drawn:  # what was not evaluated says which command fills it
        assert "gpattention evaluate" in page.inner_text(f"#{name}")
    images = page.evaluate("[...document.querySelectorAll('image')].map(i => i.getBBox().width)")
    assert min(images) >= 8


@pytest.mark.parametrize(
    "size", [PHONE, {"width": 768, "height": 1000}, DESK], ids=lambda size: str(size["width"])
)
def test_no_page_scrolls_sideways(browser: "Browser", report: Path, size: dict[str, int]) -> None:
    page = watch(browser, report, size).page
    for closed in (True, False):
        if not closed:
            page.evaluate(
                "for (const d of document.querySelectorAll('details')) d.open = true;"
                "for (const p of document.querySelectorAll('.panel, .frame')) p.hidden = false"
            )
        wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]
    letters = page.evaluate(
        "[...document.querySelectorAll('.chart svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(letters) >= 8  # pixels, also on a phone
    page.context.close()


def colours(page: "Page") -> tuple[str, str, str]:
    """Of the page, its words, and the words of a chart."""
    return tuple(
        page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            " getComputedStyle(document.querySelector('.chart svg text')).fill]"
        )
    )


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def test_the_theme_is_the_systems_until_the_button_is_pressed(browser: "Browser", report: Path) -> None:
    for scheme, first, second in (("light", LIGHT, DARK), ("dark", DARK, LIGHT)):
        page = watch(browser, report, color_scheme=scheme).page
        button = page.locator("#theme")
        for theme in (first, second, first):
            assert colours(page) == (rgb(theme["--page"]), rgb(theme["--ink"]), rgb(theme["--quiet"]))
            assert button.get_attribute("aria-pressed") == str(theme is DARK).lower()
            button.focus()
            page.keyboard.press("Enter")
        page.emulate_media(media="print")
        assert colours(page)[1] == rgb(LIGHT["--ink"])  # paper is light
        page.context.close()


def test_everything_is_reached_by_keyboard(watched: Watched) -> None:
    page = watched.page
    reachable = page.evaluate(
        """[...document.querySelectorAll('a, button, summary, input, [tabindex="0"]')]
           .filter(e => e.checkVisibility() && e.tabIndex >= 0).length"""
    )
    seen = set()
    page.evaluate("window.marks = new Map()")
    for _ in range(reachable + 5):
        page.keyboard.press("Tab")
        place = page.evaluate(
            """(() => { const e = document.activeElement; if (e === document.body) return null;
                if (!marks.has(e)) marks.set(e, marks.size);
                const { outlineStyle, outlineWidth } = getComputedStyle(e);
                return [marks.get(e), outlineStyle !== 'none' && parseFloat(outlineWidth) >= 2]; })()"""
        )
        if place is None:
            break
        assert place[1], "what has the focus shows it"
        seen.add(place[0])
    assert len(seen) == reachable


def test_tabs_follow_the_arrows(watched: Watched) -> None:
    page = watched.page
    for index in range(page.locator('[role="tablist"]').count()):
        tabs = page.locator('[role="tablist"]').nth(index).locator('[role="tab"]')
        count = tabs.count()
        tabs.first.focus()
        for key, chosen in (
            ("ArrowRight", 1),
            ("End", count - 1),
            ("ArrowRight", 0),
            ("ArrowLeft", count - 1),
            ("Home", 0),
        ):
            page.keyboard.press(key)
            for i in range(count):
                selected = i == chosen % count
                panel = page.locator(f"#{tabs.nth(i).get_attribute('aria-controls')}")
                assert tabs.nth(i).get_attribute("aria-selected") == str(selected).lower()
                assert panel.is_visible() == selected
        tabs.nth(count - 1).click()
        assert page.locator(f"#{tabs.nth(count - 1).get_attribute('aria-controls')}").is_visible()


def test_the_slider_shows_one_severity_after_the_other(watched: Watched) -> None:
    page = watched.page
    ladder = page.locator(".ladder:visible").first
    if not ladder.count():
        pytest.skip("this page has no items under severities")
    slider, frames = ladder.locator("input"), ladder.locator(".frame")
    slider.focus()
    for place in (0, 1, 2):
        assert [frames.nth(i).is_visible() for i in range(frames.count())].index(True) == place
        assert ladder.locator(".frame:visible").count() == 1
        title = frames.nth(place).get_attribute("data-title")
        assert ladder.locator("output").inner_text() == title == slider.get_attribute("aria-valuetext")
        page.keyboard.press("ArrowRight")


def test_the_verdict_and_the_gallery_come_first(watched: Watched) -> None:
    page = watched.page
    order = page.evaluate("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert order[:2] == ["summary", "gallery"]
    top = page.evaluate("document.querySelector('.conclusion').getBoundingClientRect().bottom")
    assert top < 600  # seen without scrolling
    maps = page.locator("#gallery .panel:visible .pictures .map")
    assert maps.count() > 4


def test_details_open_by_key(watched: Watched) -> None:
    page = watched.page
    summary = page.locator(".chart summary").first
    table = page.locator(".chart details table").first
    assert not table.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert table.is_visible()


def test_names_for_those_who_listen(watched: Watched) -> None:
    nameless = watched.page.evaluate(
        """[...document.querySelectorAll('svg, button, a, summary, [role="region"], [role="tablist"]')]
           .filter(e => !(e.getAttribute('aria-label') || e.textContent).trim()).length"""
    )
    assert nameless == 0
    heads = watched.page.evaluate("[...document.querySelectorAll('h1, h2')].map(h => h.tagName)")
    assert heads == ["H1", *["H2"] * len(SECTIONS)]


def test_without_scripts_and_on_paper_nothing_is_hidden(browser: "Browser", report: Path) -> None:
    plain = watch(browser, report, java_script_enabled=False).page
    panels = plain.locator(".panel, .frame")
    assert all(panels.nth(i).is_visible() for i in range(panels.count()))
    plain.context.close()
    page = watch(browser, report).page
    page.emulate_media(media="print")
    panels = page.locator(".panel, .frame")
    assert panels.count() > 4
    assert all(panels.nth(i).is_visible() for i in range(panels.count()))
    assert not page.locator("nav").is_visible()
    assert re.match(rb"%PDF", page.pdf())
    page.context.close()


@pytest.mark.parametrize(
    ("name", "size", "scheme"), [("light", DESK, "light"), ("dark", DESK, "dark"), ("phone", PHONE, "light")]
)
def test_screenshots(
    browser: "Browser", report: Path, screenshots: Path | None, name: str, size: dict[str, int], scheme: str
) -> None:
    if screenshots is None:
        pytest.skip("set GPATTENTION_SCREENSHOTS to a folder to have pictures")
    page = watch(
        browser, report, size, color_scheme=scheme, device_scale_factor=2 if name == "phone" else 1
    ).page
    save(page.screenshot(), screenshots / f"{name}.png")
    shown = [section.name for section in SECTIONS if page.locator(f"#{section.name}").count()]
    for section in shown:
        box = page.locator(f"#{section}").bounding_box()
        assert box is not None
        clip = {**box, "height": min(box["height"], TALLEST)}
        save(page.screenshot(full_page=True, clip=clip), screenshots / f"{name}-{section}.png")  # type: ignore[arg-type]
    assert len(list(screenshots.glob(f"{name}*.png"))) == len(shown) + 1
    page.context.close()


def save(png: bytes, path: Path) -> None:
    """In 256 colours, a third of the bytes; chosen to cover small swatches too, not by area alone."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
