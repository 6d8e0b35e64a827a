"""Whatever a text holds, a page shows that text and nothing else of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpattention.reports.markup import Safe, join, json_script, tag
from gpattention.runs.tables import visible
from tests.reports.reading import read

# HTML has no way to write these, and an XML-like parser changes line ends
TEXTS = st.text(st.characters(exclude_characters="\r\x00", exclude_categories=["Cs"]))
HOSTILE = (
    "<script>alert(1)</script>",
    "</title>",
    '" onmouseover="x',
    "' x='",
    "&lt;",
    "a & b",
    "]]>",
    "<!--",
)


@given(TEXTS, TEXTS)
def test_text_and_attributes_come_back(text: str, value: str) -> None:
    element = read(tag("p", text, title=value)).one("p")
    assert element.children == []
    assert "".join(element.texts) == visible(text, keep="\n\t")
    assert element.attributes == {"title": visible(value, keep="\n\t")}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_makes_no_element(text: str) -> None:
    for made in (tag("p", text), tag("p", join(text)), tag("p", tag("b", text), title=text)):
        tags = {element.tag for element in read(made).all()}
        assert tags <= {"p", "b"}


def test_markup_stays_and_formatted_markup_is_text_again() -> None:
    inner = tag("b", "x")
    assert tag("p", inner) == "<p><b>x</b></p>"
    assert tag("p", f"{inner}!") == "<p>&lt;b&gt;x&lt;/b&gt;!</p>"
    assert isinstance(inner, Safe)


def test_attributes() -> None:
    made = tag("a", None, class_="x", aria_label="y", open=True, hidden=False, title=None, tabindex=0)
    assert made == '<a class="x" aria-label="y" open tabindex="0"></a>'
    assert tag("meta", name_="x") == '<meta name="x">'


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(TEXTS, x)))
def test_data_comes_back_out_of_a_script(content: object) -> None:
    made = json_script("data", content)
    inside = made.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == content


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_script("data", float("nan"))
