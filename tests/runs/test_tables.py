"""Text of others stays text: on a terminal, in CSV, Markdown, LaTeX and HTML, whatever it holds."""

import csv
import io
import re

import pytest
from hypothesis import example, given, settings

from gpattention.reports.markup import join, json_script, tag
from gpattention.runs.tables import (
    Markup,
    csv_text,
    latex,
    markdown,
    markdown_code,
    markdown_line,
    markdown_table,
    visible,
)
from tests.reports.reading import read
from tests.runs.nasty import NASTY, texts

FORMULA = "=+-@\t\r\n＝＋－＠"  # noqa: RUF001 - as a spreadsheet reads them
# what our own macros look like in LaTeX
MACRO = re.compile(
    r"\\text[a-z]+\{\}|\\[{}&%$#_]|\$\\(?:pm|alpha|rightarrow|uparrow|downarrow)\$|\$\^\\d?dagger\$|-\{\}-"
)


def nasty(test):
    for text in NASTY:
        test = example(text)(test)
    return settings(deadline=None)(given(texts)(test))


@nasty
def test_nothing_invisible_is_left(text: str) -> None:
    shown = visible(text)
    assert not set("\n\r\t\x1b\x07\x9b\u202e\u2066\u200f\u2028\ufeff\udcff") & set(shown)
    assert [c for c in shown if not c.isprintable() and c != "\u3000" and not c.isspace()] == []
    shown.encode()
    assert shown == text or not text.isprintable()


def test_what_is_shown() -> None:
    assert visible("a\x1b[31mb\nc\u202ed\udcff") == "a\\x1b[31mb\\nc\\u202ed\\udcff"
    assert visible("two\nlines", keep="\n") == "two\nlines"
    plain = "naïve größe αβ 数字 no\u00a0break {}[]()\\|*_`"
    assert visible(plain) == plain


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@nasty
def test_csv_has_no_formulas_and_as_many_cells(text: str) -> None:
    written = csv_text(["name", text], [[text, 1], [-0.5, text]])
    rows = list(csv.reader(io.StringIO(written)))
    assert [len(row) for row in rows] == [2, 2, 2]
    for cell in (rows[0][1], rows[1][0], rows[2][1]):
        assert not cell or cell[0] not in FORMULA or is_number(cell)
        assert cell in (visible(text), f"'{visible(text)}", text.strip())
    assert written.count("\n") == 3


def test_numbers_stay_numbers() -> None:
    cells = [-1, -0.25, 1e-9, None, "-3.5", "+0.1", "-1e-3", "", "0.5 ± 0.1", "-a", "=1", "-1+1", True]
    assert csv_text(["x"], [[cell] for cell in cells]).split("\n")[1:-1] == [
        "-1", "-0.25", "1e-09", '""', "-3.5", "+0.1", "-1e-3", '""', "0.5 ± 0.1", "'-a", "'=1", "'-1+1",
        "True",
    ]  # fmt: skip


@nasty
def test_markdown_tables_keep_their_cells(text: str) -> None:
    table = markdown_table([text, "b"], [[text, Markup(f"**{markdown(text)}**")], [markdown_code(text), "1"]])
    *lines, end = table.split("\n")
    assert (len(lines), end) == (4, "")
    for line in lines:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3, line
        assert line.isprintable() or "\u3000" in line


@nasty
def test_markdown_says_the_text_and_nothing_else(text: str) -> None:
    parser = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    wanted = visible(" ".join(text.split()))
    for written, expected in (
        (f"x {markdown(text)} y", [f"x {wanted} y"]),
        (f"- {markdown_line(text)}\n- next", [wanted, "next"]),
        (f"| a | b |\n| --- | --- |\n{markdown_table([text, 'z'], []).partition(chr(10))[0]}", None),
    ):
        found = parser.parse(written)
        kinds = {token.type for token in found} | {c.type for t in found for c in t.children or ()}
        assert not kinds & {
            "html_inline", "html_block", "link_open", "image", "em_open", "strong_open", "s_open",
            "code_inline", "code_block", "fence", "heading_open", "blockquote_open", "ordered_list_open",
            "hr", "softbreak",
            "hardbreak",
        }, (written, kinds)  # fmt: skip
        said = ["".join(c.content for c in t.children or ()) for t in found if t.type == "inline"]
        if expected is not None:
            assert [" ".join(each.split()) for each in said] == [
                " ".join(each.split()) for each in expected if each
            ]
        else:
            assert [" ".join(each.split()) for each in said[2:]] == [" ".join(wanted.split()), "z"]


@nasty
def test_code_in_markdown(text: str) -> None:
    parser = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    found = parser.parse(f"x {markdown_code(text)} y")[1].children
    code = [token.content for token in found if token.type == "code_inline"]
    assert [each.strip() for each in code] == [visible(" ".join(text.split())).strip()]
    assert {token.type for token in found} == {"text", "code_inline"}


@nasty
def test_latex_has_no_command_but_ours(text: str) -> None:
    left = MACRO.sub("", latex(text))
    assert not set(left) & set("\\{}&%$#_^~\n"), left


@nasty
def test_html_has_no_element_but_ours(text: str) -> None:
    page = tag("p", tag("b", text, title=text), join(text), json_script("data", {"name": text, text: 1}))
    tree = read(f"<html><body>{page}</body></html>")
    assert [element.tag for element in tree.all()] == ["html", "body", "p", "b", "script"]
    assert list(tree.one("b").attributes) == ["title"]
    for shown in (tree.one("b").text, tree.one("b").attributes["title"] or ""):
        assert shown.split() == visible(text, keep="\n\t").split()
    assert page.count("</script>") == 1
    assert page.replace("\n", "").replace("\t", "").isprintable() or "\u3000" in page or "\u00a0" in page
