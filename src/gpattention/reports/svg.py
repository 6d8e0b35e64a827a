"""A matplotlib figure as SVG inside a page: small, in the page's colours, its ids its own."""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from gpattention.reports.canvas import drawing
from gpattention.reports.markup import Safe
from gpattention.reports.palette import VARIABLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINK = "{http://www.w3.org/1999/xlink}href"
# what every element would repeat, and the page's style sheet says once
REPEATED = re.compile(r"(stroke-linecap|stroke-linejoin|stroke-miterlimit|font-family): [^;]+(; |$)")
FONT = re.compile(r"font: (?:(bold|\d+) )?([\d.]+)px [^;]+")
LEVEL = re.compile(r"rotate\(-?0 [^)]*\)")
NUMBER = re.compile(r"-?\d+\.\d{2,}")


def figure_svg(figure: "Figure", name: str, alternative: str) -> Safe:
    """The figure as an `<svg>` element whose ids begin with `name`; `alternative` is read aloud for it."""
    file = io.StringIO()
    with drawing():
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = _plain(Xml.fromstring(file.getvalue()))
    _drop(root, {"metadata", "style"})
    _rename_ids(root, name)
    for element in root.iter():
        _recolour(element)
        _round(element)
    _flatten(root)
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": alternative, "focusable": "false"}
    return Safe(Xml.tostring(root, encoding="unicode"))


def _plain(element: Xml.Element) -> Xml.Element:
    """Without namespaces, which HTML knows by itself."""
    attributes = {("href" if key == LINK else key): value for key, value in element.attrib.items()}
    copy = Xml.Element(element.tag.rpartition("}")[2], attributes)
    copy.text = element.text if element.text and element.text.strip() else None
    copy.extend(_plain(child) for child in element)
    return copy


def _drop(element: Xml.Element, tags: set[str]) -> None:
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _drop(child, tags)
            if child.tag == "defs" and len(child) == 0:
                element.remove(child)


def _rename_ids(root: Xml.Element, name: str) -> None:
    """Only what is pointed at keeps an id: a marker, a clipping box."""
    pointed = set()
    for element in root.iter():
        pointed |= set(re.findall(r"#([\w-]+)", element.get("href", "") + element.get("clip-path", "")))
    short = {old: f"{name}-{i}" for i, old in enumerate(sorted(pointed))}
    for element in root.iter():
        if element.get("id") in short:
            element.set("id", short[element.attrib["id"]])
        else:
            element.attrib.pop("id", None)
        for key in ("href", "clip-path"):
            if key in element.attrib:
                element.set(key, re.sub(r"#([\w-]+)", lambda at: "#" + short[at[1]], element.attrib[key]))


def _recolour(element: Xml.Element) -> None:
    style = element.get("style")
    if style is None:
        return
    style = REPEATED.sub("", style)
    style = FONT.sub(lambda at: f"font-size: {at[2]}px" + (f"; font-weight: {at[1]}" if at[1] else ""), style)
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    style = style.strip().rstrip(";").replace(": ", ":").replace("; ", ";")
    if style:
        element.set("style", style)
    else:
        del element.attrib["style"]


def _round(element: Xml.Element) -> None:
    """A tenth of a pixel is enough."""
    for key in ("d", "x", "y", "transform", "width", "height", "points"):
        if key in element.attrib:
            element.set(
                key, NUMBER.sub(lambda at: f"{float(at[0]):.1f}".removesuffix(".0"), element.attrib[key])
            )
    if LEVEL.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", re.sub(r"\s+", " ", element.attrib["d"]).strip())


def _flatten(element: Xml.Element) -> None:
    """Groups without any attribute say nothing."""
    children: list[Xml.Element] = []
    for child in element:
        _flatten(child)
        children.extend(child if child.tag == "g" and not child.attrib else [child])
    element[:] = children
