"""HTML, SVG and PNG: whatever a text holds, a page shows that text and nothing else of it."""

import base64
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gpattention.files import visible
from gpattention.reports import severity_figure
from gpattention.reports.comparison import Table
from gpattention.reports.drawing import figure_svg
from gpattention.reports.html import environment, lines_table, read_at, render
from gpattention.reports.sections.calibration import pooled_bins
from gpattention.reports.sections.gallery import png_data
from gpattention.reports.style import VARIABLES
from tests.reports.reading import read
from tests.reports.synthetic import reliability

HOSTILE = "<script>\"'&$"
# HTML has no way to write these, and an XML-like parser changes line ends
TEXTS = st.text(st.characters(exclude_characters="\r\x00", exclude_categories=["Cs"]))


@given(TEXTS)
def test_text_and_attributes_come_back(text: str) -> None:
    element = read(render("table", Table([text], [[text]]), text))
    shown = visible(text, keep="\n\t")
    assert element.one("div", role="region").attributes["aria-label"] == shown
    assert ["".join(cell.texts) for cell in element.all("th")] == [shown, shown]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "</title>", '" onmouseover="x', "' x='", "&lt;", "a & b", "]]>", "<!--"],
)
def test_hostile_text_makes_no_element(text: str) -> None:
    plain, hostile = (read(render("notes", title, [(title, title)])) for title in ("title", text))
    assert [(e.tag, list(e.attributes)) for e in hostile.all()] == [
        (e.tag, list(e.attributes)) for e in plain.all()
    ]
    assert hostile.one("code").texts == [text]


def test_markup_stays_and_formatted_markup_is_escaped() -> None:
    inner = render("advice", "x <")
    assert inner == '<p class="advice">x &lt;</p>'
    assert inner in render("charts", inner, False)
    assert "&lt;p" in render("advice", f"{inner!s:.20}")


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(TEXTS, x)))
def test_data_comes_back_out_of_a_script(content: object) -> None:
    inside = environment().from_string("{{ content|tojson }}").render(content=content)
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == content


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        environment().from_string("{{ content|tojson }}").render(content=float("nan"))


def test_svg_is_the_pages_own() -> None:
    svg = figure_svg(severity_figure({HOSTILE: [{1: 0.5, 2: 0.6}]}, y="ECE"), "here", f"alt {HOSTILE}")
    assert "http" not in svg
    root = read(svg).one("svg")
    assert root.attributes["role"] == "img"
    assert root.attributes["aria-label"] == f"alt {HOSTILE}"
    assert root.attributes["viewbox"] == "0 0 360 269"
    assert HOSTILE in [text for element in root.all("text") for text in element.texts]
    assert {element.tag for element in root.all()} <= {"path", "g", "use", "defs", "clippath", "rect", "text"}


def test_svg_ids_are_unique_and_pointed_at() -> None:
    svgs = [
        figure_svg(severity_figure({"a": [{1: 0.5, 2: 0.6}]}, y="ECE"), name, "") for name in ("x-1", "x-2")
    ]
    ids = [
        element.attributes["id"] for svg in svgs for element in read(svg).all() if "id" in element.attributes
    ]
    assert len(ids) == len(set(ids)) > 0
    pointed = set(re.findall(r"#(x-[\w-]+)", "".join(svgs)))
    assert pointed == set(ids)


def test_svg_colours_are_the_pages() -> None:
    svg = figure_svg(severity_figure({"a": [{1: 0.5, 2: 0.6}]}, y="ECE", title="t"), "x", "")
    assert not re.search(r"#[0-9a-f]{6}", svg)
    assert {"--ink", "--quiet", "--grid", "--series-0"} <= set(re.findall(r"var\((--[\w-]+)\)", svg))
    assert set(re.findall(r"var\((--[\w-]+)\)", svg)) <= set(VARIABLES.values())
    assert "font-family" not in svg
    assert "font-weight: bold" in svg or "font-weight: 700" in svg


@pytest.mark.parametrize("channels", [1, 3])
def test_png_holds_the_pixels(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels))
    file = base64.b64decode(png_data(image.tolist()).removeprefix("data:image/png;base64,"))
    read_back = np.array(Image.open(io.BytesIO(file))).reshape(5, 7, channels)
    assert (read_back == image).all()
    assert png_data(image.tolist()) == png_data((image + 0.2).tolist())


def test_png_of_grey_rows_and_refusals() -> None:
    assert png_data([[0, 300], [-5, 255]]) == png_data([[[0], [255]], [[0], [255]]])
    for bad in ([], [[[1, 2]]], [[[1]], [[1], [2]]]):
        with pytest.raises(ValueError, match="expected image"):
            png_data(bad)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, unique_by=lambda p: round(p[0], 6)))
def test_curves_are_read_as_numpy_reads_them(points: list[tuple[float, float]]) -> None:
    line = sorted(points)
    xs, ys = zip(*line, strict=True)
    places = [x for x in np.linspace(0, 1, 21).tolist() if xs[0] <= x <= xs[-1]]
    assert [x for x, _ in read_at(points, np.linspace(0, 1, 21).tolist())] == places
    assert [y for _, y in read_at(points, places)] == pytest.approx(
        np.interp(places, xs, ys).tolist(), abs=1e-9
    )


def test_a_jump_counts_with_its_upper_end() -> None:
    assert read_at([(0.0, 0.0), (0.0, 0.7), (1.0, 1.0)], [0.0]) == [(0.0, 0.7)]


def test_tables_of_lines_and_holes() -> None:
    table = lines_table("epoch", {"a": [[(1, 0.5), (2, 0.25)], [(1, 1.5)]], "b": [[(2, 3.0)]]})
    assert table.heads == ["epoch", "a", "b"]
    assert table.rows == [["1", "1.000 [-5.353, 7.353]", None], ["2", "0.2500", "3.000"]]
    html = read(render("table", table, "caption <"))
    assert [cell.text for cell in html.all("td")] == ["1.000 [-5.353, 7.353]", "\u2013", "0.2500", "3.000"]
    assert html.one("caption").text == "caption <"
    assert html.all("th")[0].attributes["scope"] == "col"
    box = html.one("div", role="region")
    assert box.attributes["tabindex"] == "0"
    assert box.attributes["aria-label"] == "caption <"
    assert (
        read(render("table", Table(["x"], [[0.5]]), "c", key=True)).one("table").attributes["class"] == "key"
    )


def test_pooled_bins_are_those_of_all_items() -> None:
    rng = np.random.default_rng(1)
    one, two = reliability(rng, 100), reliability(rng, 300)
    other = {**reliability(rng), "edges": [0.0, 1.0]}
    pooled = pooled_bins([one, two, other])
    assert sum(pooled["count"]) == 400
    for key in ("confidence", "accuracy"):
        total = sum(
            (x or 0) * n for bins in (one, two) for x, n in zip(bins[key], bins["count"], strict=True)
        )
        again = sum((x or 0) * n for x, n in zip(pooled[key], pooled["count"], strict=True))
        assert again == pytest.approx(total)
    assert all((x is None) == (n == 0) for x, n in zip(pooled["accuracy"], pooled["count"], strict=True))
