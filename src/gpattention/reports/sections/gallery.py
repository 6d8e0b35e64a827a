"""Items to look at: the most and the least certain, and the most wrong, with what each token is sure of."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpattention.reports.groups import Comparison, Model
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing
from gpattention.reports.png import png_data
from gpattention.reports.tables import DASH, Table, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import number

GROUPS = (
    ("most_wrong", "Most wrong", "Wrong answers that give the right class the least probability."),
    ("least_certain", "Least certain", "The lowest confidence."),
    ("most_certain", "Most certain", "The highest confidence."),
)
MOST = 6  # items of a group
Item = Mapping[str, Any]


def fills(comparison: Comparison) -> bool:
    """Where the suite was run and kept no items, as in records, the command would ask for what is done."""
    return not has(comparison, "clean") or any(_shown(model) for model in comparison.models)


def content(comparison: Comparison, name: str) -> Safe:
    """One tab per model that has items."""
    panels = {model.label: _model(model, found) for model in comparison.models if (found := _shown(model))}
    if not panels:
        return missing(comparison, "clean", "gallery of test items")
    return tabs(f"{name}-models", "which model", panels)


def _shown(model: Model) -> Mapping[str, Sequence[Item]] | None:
    """Of several seeds the first that has items."""
    for found in model.curves("clean", "gallery"):
        if any(found.get(key) for key, _, _ in GROUPS):
            return found
    return None


def _model(model: Model, gallery: Mapping[str, Sequence[Item]]) -> Safe:
    items = [item for key, _, _ in GROUPS for item in gallery.get(key, ())[:MOST]]
    scale = _scale(items)
    groups = []
    for key, title, explained in GROUPS:
        shown = gallery.get(key, ())[:MOST]
        if shown:
            cards = tag("ul", *(_card(item, scale) for item in shown), class_="gallery")
            groups.append(join(tag("h4", title), tag("p", explained, class_="explained"), cards))
    return join(_explanation(scale), *groups, _table(model, gallery))


def _explanation(scale: tuple[float, float] | None) -> Safe:
    if scale is None:
        return tag("p", "This model has no variance of its tokens.", class_="explained")
    low, high = scale
    return tag(
        "p", "Shade: variance of a token's output, mean over heads and layers, from ", f"{low:.3g} ",
        tag("span", class_="ramp", aria_hidden="true"), f" to {high:.3g} over this model's gallery.",
        class_="explained",
    )  # fmt: skip


def _card(item: Item, scale: tuple[float, float] | None) -> Safe:
    right = item.get("label") == item.get("predicted")
    verdict = (
        tag("span", "✓ ", f"{item.get('predicted')}", class_="right")
        if right
        else join(
            tag("span", "✗ ", f"{item.get('predicted')}", class_="wrong"), f" instead of {item.get('label')}"
        )
    )
    return tag(
        "li",
        _picture(item, scale) if item.get("image") else _words(item, scale),
        tag("span", verdict, class_="verdict"),
        tag("span", f"confidence {_short(item.get('confidence'))}", class_="numbers"),
        tag("span", f"uncertainty {_short(item.get('uncertainty'))}", class_="numbers"),
        class_="item text" if not item.get("image") else "item",
    )


def _picture(item: Item, scale: tuple[float, float] | None) -> Safe:
    """The image, and beside it the same under its tokens' shades."""
    image = item["image"]
    height, width = len(image), len(image[0])
    source = png_data(image)
    spoken = f"Test item {item.get('index')}: {item.get('predicted')}, label {item.get('label')}"
    plain = tag("image", href=source, width=width, height=height)
    pictures = [tag("svg", plain, viewBox=f"0 0 {width} {height}", role="img", aria_label=spoken)]
    shades = _patches(item, scale, width, height)
    if shades is not None:
        spoken = f"The same with its {len(item['token_variance'])} patches shaded by variance"
        grey = tag("image", href=source, width=width, height=height, class_="faded")
        pictures.append(
            tag("svg", grey, shades, viewBox=f"0 0 {width} {height}", role="img", aria_label=spoken)
        )
    return tag("span", *pictures, class_="pictures")


def _patches(item: Item, scale: tuple[float, float] | None, width: int, height: int) -> Safe | None:
    grid, variances = item.get("grid"), item.get("token_variance")
    if not grid or not variances or scale is None:
        return None
    rows, columns = int(grid[0]), int(grid[1])
    variances = _aligned(variances, rows * columns)
    if rows * columns == 0 or len(variances) != rows * columns:
        return None
    wide, high = width / columns, height / rows
    boxes = []
    for i, variance in enumerate(variances):
        row, column = divmod(i, columns)
        shade = _shade(variance, scale)
        boxes.append(
            tag(
                "rect", x=f"{column * wide:g}", y=f"{row * high:g}", width=f"{wide:g}", height=f"{high:g}",
                fill_opacity=f"{shade:.2f}",
            )
        )  # fmt: skip
    return tag("g", *boxes, class_="patches")


def _words(item: Item, scale: tuple[float, float] | None) -> Safe:
    """Every word over its shade."""
    words = item.get("words") or ()
    variances = _aligned(item.get("token_variance") or (), len(words))
    spans = []
    for i, word in enumerate(words):
        variance = number(variances[i]) if i < len(variances) else None
        if variance is None or scale is None:
            spans.append(tag("span", str(word)))
            continue
        percent = round(100 * _shade(variance, scale))
        spans.append(
            tag(
                "span",
                str(word),
                title=f"variance {variance:.3g}",
                class_="word",
                style=f"--shade:{percent}%",
            )
        )
    return tag("p", *(part for span in spans for part in (span, " ")), class_="words")


def _aligned(variances: Sequence[Any], tokens: int) -> Sequence[Any]:
    """Without what comes before the tokens that are shown, e.g. a class token."""
    return variances[max(0, len(variances) - tokens) :]


def _scale(items: Sequence[Item]) -> tuple[float, float] | None:
    """Smallest and largest variance of all tokens shown."""
    every = [
        known for item in items for v in item.get("token_variance") or () if (known := number(v)) is not None
    ]
    return (min(every), max(every)) if every else None


def _shade(variance: Any, scale: tuple[float, float]) -> float:
    low, high = scale
    return 0.8 * ((number(variance) or low) - low) / (high - low) if high > low else 0.4


def _short(value: Any) -> str:
    known = number(value)
    return DASH if known is None else f"{known:.3f}"


def _table(model: Model, gallery: Mapping[str, Sequence[Item]]) -> Safe:
    """The gallery in numbers: items, and every token's variance."""
    rows = []
    for key, title, _ in GROUPS:
        for item in gallery.get(key, ())[:MOST]:
            tokens = item.get("token_variance") or ()
            names = item.get("words") or range(1, len(tokens) + 1)
            told = ", ".join(f"{word}: {_short(v)}" for word, v in zip(names, tokens, strict=False))
            rows.append(
                [
                    f"{title}, item {item.get('index')}", str(item.get("label")), str(item.get("predicted")),
                    _short(item.get("confidence")), _short(item.get("uncertainty")), told or None,
                ]
            )  # fmt: skip
    heads = ["item", "label", "predicted", "confidence", "uncertainty", "variance of each token"]
    caption = f"Gallery of {model.label} in numbers"
    return tag("details", tag("summary", caption), table_html(Table(heads, rows), caption))
