"""The hook that turns the site's formulas into MathML: nothing stays TeX, and browsers can draw the rest."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytest.importorskip("latex2mathml", reason="of the extra docs")

ROOT = Path(__file__).parent.parent
DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.S)
INLINE = re.compile(r"(?<![\\$`])\$([^$`\n]+?)\$(?!\$)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
PARTS = {"msub": 2, "msup": 2, "msubsup": 3, "mfrac": 2, "mover": 2, "munder": 2, "munderover": 3}


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_formulas", ROOT / "scripts/docs_formulas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _formulas() -> list[tuple[str, bool]]:
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = CODE.sub("", page.read_text())
        found += [(tex, True) for tex in DISPLAY.findall(text)]
        found += [(tex, False) for tex in INLINE.findall(DISPLAY.sub("", text))]
    return found


def test_every_formula_becomes_mathml_that_browsers_draw(hook: ModuleType) -> None:
    formulas = _formulas()
    assert len(formulas) > 500
    for tex, display in formulas:
        root = ElementTree.fromstring(hook.mathml(hook.TAG.sub("", tex), display=display))
        for node in root.iter():
            assert node.tag != "menclose", tex
            assert node.get("mathvariant") in (None, "normal"), tex
            assert len(node) == PARTS.get(node.tag, len(node)), (tex, node.tag)


def test_an_equation_keeps_its_number_and_has_an_anchor(hook: ModuleType) -> None:
    page = r'<p>a</p><div class="arithmatex">\[ a \lt b \tag{7} \]</div>'.replace(r"\lt", "&lt;")
    made = hook.on_page_content(page)
    assert 'id="eq-7"' in made
    assert "(7)</span>" in made
    assert "arithmatex" not in made
    assert "<mo>&lt;</mo>" in made


WRITTEN = {
    r"\mathbb E": "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL E}", r"\mathbb R": "\N{DOUBLE-STRUCK CAPITAL R}",
    r"\mathcal{G}": "<mi>\N{MATHEMATICAL SCRIPT CAPITAL G}</mi>",
    r"\mathbf x": "\N{MATHEMATICAL BOLD SMALL X}", r"\mathrm{var}_i x": "<mi>var</mi>",
    r"\log p": '<mi>log</mi><mspace width="0.17em" /><mi>p</mi>', r"\log(p)": "<mi>log</mi><mo",
    r"a\sim b": "<mo>\N{TILDE OPERATOR}</mo>", r"\tilde a": ">~</mo></mover>",
    r"\boxed{a}": '<mrow class="boxed">',
    r"\lVert a\rVert": '<mo stretchy="false">\N{DOUBLE VERTICAL LINE}</mo>',
}  # fmt: skip


def test_what_is_rewritten(hook: ModuleType) -> None:
    for tex, part in WRITTEN.items():
        assert part in hook.mathml(tex, display=False), tex
    assert hook.on_page_content("<p>5 $ and 6 $</p>") == "<p>5 $ and 6 $</p>"


def test_a_formula_that_cannot_be_read_is_refused(hook: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected"):
        hook.mathml(r"\nosuchcommand{a}", display=False)
    with pytest.raises(ValueError, match="expected a formula"):
        hook.mathml(r"a_b_c", display=False)
