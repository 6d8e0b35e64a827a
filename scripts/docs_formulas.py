"""A hook of mkdocs: formulas become MathML while the site is built, so that pages need no script.

`pymdownx.arithmatex` (generic) marks TeX with the class `arithmatex`; latex2mathml turns it into MathML.
What browsers do not draw (MathML Core) is rewritten: equation numbers, boxes, alphabets by attribute.
"""

import html
import logging
import re
import unicodedata
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

log = logging.getLogger("mkdocs.hooks.formulas")

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
LONG = 24  # characters of TeX, above which a formula in a line may be wider than a telephone
ALPHABETS = ("script", "double-struck", "bold")


def on_page_content(content: str, **kwargs: Any) -> str:
    """Called by mkdocs with the HTML of every page."""
    if not FORMULA.search(content):
        return content
    try:
        import latex2mathml.converter  # noqa: F401
    except ModuleNotFoundError:
        log.info("no latex2mathml: formulas stay TeX.  pip install latex2mathml")
        return content
    return FORMULA.sub(_typeset, content)


def _typeset(found: re.Match[str]) -> str:
    element, tex = found[1], html.unescape(found[2])
    display = element == "div"
    tag = TAG.search(tex)
    formula = mathml(TAG.sub("", tex), display=display)
    number = f'<span class="equation-number">({tag[1]})</span>' if tag else ""
    anchor = f' id="eq-{tag[1]}"' if tag else ""
    kind = "formula display" if display else "formula long" if len(tex) > LONG else "formula"
    return f'<{element} class="{kind}"{anchor}>{formula}{number}</{element}>'


def mathml(tex: str, *, display: bool) -> str:
    """TeX as MathML that MathML Core can draw; a formula that cannot be read ends the build."""
    from latex2mathml.converter import convert

    try:
        made = convert(tex.replace(r"\cr", r"\\"), display="block" if display else "inline")
    except Exception as error:
        raise ValueError(f"expected a formula that latex2mathml can read, got {tex!r}") from error
    made = made.replace(r"\_", "_")
    if "\\" in made:
        raise ValueError(f"expected commands that latex2mathml knows, got {tex!r}")
    root = ElementTree.fromstring(made)
    for node in list(root.iter()):
        node.tag = node.tag.removeprefix(NAMESPACE)
    for node in list(root.iter()):
        if node.tag in ("math", "mrow", "mtd", "mstyle"):  # rows: elsewhere a child's place is its meaning
            _join_words(node)
            _spread_tildes(node)
            _space_words(node)
        _redress(node)
    return ElementTree.tostring(root, encoding="unicode")


def _join_words(row: ElementTree.Element) -> None:
    """Upright letters side by side are a word; a single one stays upright by its attribute."""
    before: ElementTree.Element | None = None
    for node in list(row):
        upright = node.tag == "mi" and node.get("mathvariant") == "normal"
        if upright and before is not None:
            before.text = (before.text or "") + (node.text or "")
            before.attrib.pop("mathvariant", None)
            row.remove(node)
        else:
            before = node if upright else None


def _spread_tildes(row: ElementTree.Element) -> None:
    """The relation, which has space around it, for the identifier that latex2mathml makes of it."""
    for node in row:
        if node.text == "~":
            node.tag, node.text = "mo", "\N{TILDE OPERATOR}"


def _space_words(row: ElementTree.Element) -> None:
    """A thin space after log, det and their like, unless an operator or a bracket follows."""
    nodes = list(row)
    for place, (node, after) in reversed(list(enumerate(pairwise(nodes)))):
        word = node.tag in ("mi", "mo") and len(node.text or "") > 1 and (node.text or "").isalpha()
        if word and (after.tag != "mo" or len(after.text or "") > 1):
            row.insert(place + 1, ElementTree.Element("mspace", width="0.17em"))


def _redress(node: ElementTree.Element) -> None:
    """What MathML Core has no word for, as text or style."""
    variant = node.get("mathvariant")
    if variant in ALPHABETS:
        node.text = "".join(in_alphabet(letter, variant) for letter in node.text or "")
        del node.attrib["mathvariant"]
    elif variant == "monospace":
        node.set("class", "code")
        del node.attrib["mathvariant"]
    if node.tag == "menclose":
        node.tag = "mrow"
        node.attrib = {"class": "boxed"}
    if node.tag == "mo" and node.text in ("‖", "|") and not node.get("minsize"):
        node.set("stretchy", "false")  # it would grow with a fraction beside the norm


def in_alphabet(letter: str, variant: str) -> str:
    """A letter of a mathematical alphabet: Chromium reads no `mathvariant` but "normal"."""
    kind, case = variant.upper(), "CAPITAL" if letter.isupper() else "SMALL"
    for name in (f"MATHEMATICAL {kind} {case} {letter.upper()}", f"{kind} {case} {letter.upper()}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return letter
