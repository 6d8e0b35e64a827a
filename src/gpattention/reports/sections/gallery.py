"""Items to look at: the most and the least certain, and the most wrong, with each token's variance."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import zip_longest
from typing import Any

import numpy as np

from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, number

GROUPS = (
    ("most_wrong", "Most wrong", "Wrong answers that give the right class the least probability."),
    ("least_certain", "Least certain", "The lowest confidence."),
    ("most_certain", "Most certain", "The highest confidence."),
)
MOST = 6  # items of a group
Item = Mapping[str, Any]
Scale = tuple[float, float] | None  # smallest and largest variance of all tokens shown


def fills(comparison: Comparison) -> bool:
    """False where the suite was run and kept no items, as in records: its command would change nothing."""
    return not comparison.has("clean") or any(_shown(model) for model in comparison.models)


def content(comparison: Comparison, name: str) -> "html.Markup":
    """One tab per model that has items."""
    panels = {model.label: _model(model, found) for model in comparison.models if (found := _shown(model))}
    if not panels:
        return html.render("missing", *comparison.what_is_missing("clean", "gallery of test items"))
    return html.tabs(f"{name}-models", "which model", panels)


def png_data(image: Sequence[Sequence[Any]]) -> str:
    """A `data:` address of H x W x C numbers from 0 to 255, C 1 or 3; H x W is grey."""
    from PIL import Image

    try:
        pixels = np.asarray(image, dtype=float)
    except ValueError:  # rows of different lengths
        pixels = np.empty(0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.size == 0 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise ValueError(f"expected image to be H x W x 1 or 3 numbers, got shape {pixels.shape}")
    file = BytesIO()
    Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def _shown(model: Model) -> Mapping[str, Sequence[Item]] | None:
    """The first seed's gallery that has items."""
    for found in model.curves("clean", "gallery"):
        if any(found.get(key) for key, _, _ in GROUPS):
            return {key: found.get(key, ())[:MOST] for key, _, _ in GROUPS}
    return None


def _model(model: Model, gallery: Mapping[str, Sequence[Item]]) -> "html.Markup":
    tokens = (v for items in gallery.values() for item in items for v in item.get("token_variance") or ())
    variances = [known for v in tokens if (known := number(v)) is not None]
    scale = (min(variances), max(variances)) if variances else None
    groups = [
        (title, explained, [_card(item, scale) for item in gallery[key]])
        for key, title, explained in GROUPS
        if gallery[key]
    ]
    return html.render("gallery", model.label, scale, groups)


def _card(item: Item, scale: Scale) -> dict[str, Any]:
    """The item beside what the template cannot make of it: a picture, and shades of words or patches."""
    image, words, grid = item.get("image"), item.get("words") or (), item.get("grid")
    variances = item.get("token_variance") or ()
    card: dict[str, Any] = {"label": None, "predicted": None, **item, "variances": variances, "names": words}
    if not image:
        known = [number(v) for v in _aligned(variances, len(words))]
        shades = [None if v is None or scale is None else (v, _shade(v, scale)) for v in known]
        return card | {"source": None, "words": list(zip_longest(map(str, words), shades))}
    rows, columns = map(int, grid or (0, 0))
    known = _aligned(variances, rows * columns)
    shaded = scale is not None and 0 < len(known) == rows * columns
    return card | {
        "source": png_data(image), "width": len(image[0]), "height": len(image), "rows": rows,
        "columns": columns, "shades": [_shade(v, scale) for v in known] if scale and shaded else [],
    }  # fmt: skip


def _aligned(variances: Sequence[Any], tokens: int) -> list[Any]:
    """Without what comes before the tokens that are shown, e.g. a class token."""
    return list(variances[max(0, len(variances) - tokens) :])


def _shade(variance: Any, scale: tuple[float, float]) -> float:
    low, high = scale
    return 0.8 * ((number(variance) or low) - low) / (high - low) if high > low else 0.4
