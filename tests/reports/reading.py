"""A page read by Python's own parser: elements in a tree, refused where tags do not match."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: "list[Element]" = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of the element and everything in it, in no particular order."""
        return " ".join([*self.texts, *(child.text for child in self.children)])

    def all(self, tag: str | None = None, **attributes: str) -> "list[Element]":
        """Every element below that has this tag and these attributes."""
        found = []
        for child in self.children:
            wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
            if tag in (None, child.tag) and wanted.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    def one(self, tag: str | None = None, **attributes: str) -> "Element":
        (found,) = self.all(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({key for key, _ in attrs}) == len(attrs), f"attribute given twice: {tag} {attrs}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].texts.append(data)


def read(page: str) -> Element:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    (root,) = reader.open
    return root
