"""Items to look at: known, corrupted and foreign, with where a model looked and where it was unsure.

Besides them stand pairs, on which a model without a posterior was sure and wrong, with what one with a
posterior said, and the same items under every severity.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from gpattention.hosts import painted_html
from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, number
from gpattention.reports.sections.registry import section
from gpattention.reports.sections.verdict import ordered, rivals
from gpattention.reports.style import LIGHT

GROUPS = (
    ("most_wrong", "most wrong", "wrong answers that give the right class the least probability"),
    ("least_certain", "least certain", "the lowest confidence"),
    ("most_certain", "most certain", "the highest confidence"),
)
OF_CORRUPTED, OF_FOREIGN = ("most_wrong", "least_certain"), ("most_certain", "least_certain")
KINDS = (
    ("known", "Known: test items"),
    ("corrupted", "Corrupted test items, highest severity"),
    ("foreign", "Foreign items"),
)
MOST = 4  # items of a group
SURE, UNSURE = 0.9, 0.6  # confidence of a mistake that a pair shows, and below which the other one hesitates
PAIRS = 3  # of known, of corrupted, of foreign items
MAPS = (("token_variance", "variance of a token"), ("token_attention", "attention that a token gets"))
WARM, COOL = "--heat", "--series-0"  # variance, attention
Item = Mapping[str, Any]
Scale = tuple[float, float] | None  # smallest and largest number of all tokens shown
Numbers = Sequence[float | None]


def fills(comparison: Comparison) -> bool:
    """False where the suite was run and kept no items, as in records: its command would change nothing."""
    return not comparison.has("clean") or any(any(_groups(model)) for model in comparison.models)


@section(
    "gallery", "Gallery",
    "Known, corrupted and foreign items: where a model looked, and where it was unsure.",
    place=20, fills=fills,
)  # fmt: skip
def content(comparison: Comparison, name: str) -> "html.Markup":
    """Pairs, items under every severity, then a tab per model, those with a posterior first."""
    panels = {model.label: _model(model) for model in ordered(comparison) if any(_groups(model))}
    if not panels:
        return html.render("missing", *comparison.what_is_missing("clean", "gallery of test items"))
    lead, other = rivals(comparison)
    return html.join(
        None if other is None else _pairs(lead, other),
        _ladders(f"{name}-severity", comparison, lead),
        html.render("group", "Items of each model", html.tabs(f"{name}-models", "which model", panels)),
    )


# Pictures


def png_data(image: Any) -> str:
    """A `data:` address of an image as an evaluation keeps it.

    H x W x C numbers from 0 to 255, C 1 or 3 (4 with opacity), in lists or as shape and pixels in base64.
    """
    from PIL import Image

    pixels = _pixels(image)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.size == 0 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        raise ValueError(f"expected image to be H x W x 1 or 3 numbers, got shape {pixels.shape}")
    file = BytesIO()
    Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def _pixels(image: Any) -> "np.ndarray[Any, Any]":
    """Numbers of an image; none of what is no image."""
    try:
        if isinstance(image, Mapping):
            return np.frombuffer(b64decode(image["pixels"]), np.uint8).reshape(image["shape"]).astype(float)
        return np.asarray(image, dtype=float)
    except (KeyError, TypeError, ValueError):  # rows of different lengths, or text that is no base64
        return np.empty(0)


def _set_words(name: str) -> str:
    """A set's name in words: "gaussian blur, severity 5" for corrupted/gaussian_blur/5."""
    words = name.replace("_", " ").removeprefix("ood/")
    return words.removeprefix("corrupted/").replace("/", ", severity ") if "corrupted/" in words else words


def _heat(shades: Sequence[float], rows: int, columns: int, variable: str) -> str:
    """A `data:` address of one pixel for each token, the deeper the more opaque."""
    colour = [int(LIGHT[variable][i : i + 2], 16) for i in (1, 3, 5)]
    opacity = 255 * np.asarray(shades, dtype=float)[:, None]
    return png_data(np.hstack([np.tile(colour, (rows * columns, 1)), opacity]).reshape(rows, columns, 4))


# Of one model


def _first(model: Model, suite: str) -> Mapping[str, Any]:
    """What the first seed that has items kept in a suite."""
    for found in model.curves(suite, "gallery"):
        if any(found.values()):
            return dict(found)
    return {}


def _groups(model: Model) -> list[tuple[str, str, list[Item]]]:
    """Kind of set, what is said of the items, and the items."""
    known = _first(model, "clean")
    found = [
        ("known", f"{title}: {about}", list(known.get(key) or ())[:MOST]) for key, title, about in GROUPS
    ]
    for kind, suite, keys in (("corrupted", "corrupted", OF_CORRUPTED), ("foreign", "ood", OF_FOREIGN)):
        sets = (_first(model, suite).get("sets") or {}).values()
        for key, title, about in GROUPS:
            # one of each set: the same kind of mistake many times teaches nothing
            items = [each[key][0] for each in sets if each.get(key)] if key in keys else []
            found.append((kind, f"{title} of each set: {about}", items))
    return [group for group in found if group[2]]


def _model(model: Model) -> "html.Markup":
    groups = _groups(model)
    shown = [item for *_, items in groups for item in items]
    scales = {key: _scale(shown, key) for key in ("token_variance", "token_attention")}
    kinds = [
        (
            title,
            [(about, [_card(item, scales) for item in items]) for own, about, items in groups if own == kind],
        )
        for kind, title in KINDS
        if any(own == kind for own, *_ in groups)
    ]
    texts = any(item.get("words") for item in shown)
    return html.render("gallery", model.label, texts, scales, kinds)


def _scale(items: Iterable[Item], key: str) -> Scale:
    known = [x for item in items for v in item.get(key) or () if (x := number(v)) is not None]
    return (min(known), max(known)) if known else None


def _card(item: Item, scales: Mapping[str, Scale]) -> dict[str, Any]:
    """The item beside what the template cannot make of it: pictures, or words in colours."""
    words, variances = list(map(str, item.get("words") or ())), item.get("token_variance") or ()
    card: dict[str, Any] = {
        **dict.fromkeys(("label", "predicted", "index", "confidence", "uncertainty")), **item,
        "set": _set_words(item.get("set", "test")), "variances": variances, "names": words,
        "source": None, "maps": [], "painted": None,
    }  # fmt: skip
    if not item.get("image"):
        of_words = ((about, _aligned(item.get(key) or (), len(words))) for key, about in MAPS)
        lines = [(f"{about}, by rank", known) for about, known in of_words if known]
        from markupsafe import Markup

        # escaped by what makes it
        card["painted"] = Markup(painted_html(words, lines))
        return card
    rows, columns = map(int, item.get("grid") or (0, 0))
    pixels = _pixels(item["image"])
    if pixels.size == 0:  # damaged: the answers are still worth reading
        return card
    card |= {"source": png_data(item["image"]), "width": pixels.shape[1], "height": pixels.shape[0]}
    for key, what, colour in (("token_attention", "attention", COOL), ("token_variance", "variance", WARM)):
        values, scale = _aligned(item.get(key) or (), rows * columns), scales[key]
        if scale is not None and 0 < len(values) == rows * columns:
            shades = [_shade(v, scale) for v in values]
            card["maps"].append((what, _heat(shades, rows, columns, colour)))
    return card


def _aligned(values: Sequence[Any], tokens: int) -> list[float | None]:
    """Without what comes before the tokens that are shown, e.g. a class token."""
    return [number(v) for v in values[max(0, len(values) - tokens) :]]


def _shade(value: float | None, scale: tuple[float, float]) -> float:
    low, high = scale
    return 0.85 * ((low if value is None else value) - low) / (high - low) if high > low else 0.4


# The same items, two models


def _kept(model: Model) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Galleries of single sets, with the kind of set."""
    yield "known", _first(model, "clean")
    for kind, suite in (("corrupted", "corrupted"), ("foreign", "ood")):
        for found in (_first(model, suite).get("sets") or {}).values():
            yield kind, found


def _pairs(lead: Model, other: Model) -> "html.Markup | None":
    """What `lead` said where `other` was sure and wrong, with counts of both directions."""
    answers = {
        found["answers"].get("items"): found["answers"] for _, found in _kept(lead) if found.get("answers")
    }
    pairs, counts = [], {kind: [0, 0, 0, 0] for kind, _ in KINDS}
    for kind, found in _kept(other):
        theirs = found.get("answers") or {}
        ours = answers.get(theirs.get("items"))
        if not ours:
            continue
        for place, both in enumerate(((theirs, ours), (ours, theirs))):
            sure, caught = _count(*both)
            counts[kind][2 * place] += sure
            counts[kind][2 * place + 1] += caught
        for item in found.get("sure_and_wrong") or ():
            at = item.get("index")
            if isinstance(at, int) and at < len(ours["confidence"]) and number(item.get("confidence")):
                pairs.append(
                    (kind, item, ours["predicted"][at], float(ours["confidence"][at]), ours.get("labels"))
                )
    if not pairs:
        return None
    classes = _class_names(lead, other)
    cards = []
    for kind, _ in KINDS:
        own = sorted((p for p in pairs if p[0] == kind), key=lambda p: p[3] - p[1]["confidence"])[:PAIRS]
        for _, item, predicted, confidence, labels in own:
            card = _card(item, {"token_variance": None, "token_attention": None})
            right = None if labels is None else predicted == labels[item["index"]]
            cards.append((card, [
                (other, item["predicted"], item["confidence"], None if labels is None else False),
                (lead, classes.get(predicted, str(predicted)), confidence, right),
            ]))  # fmt: skip
    counted = [(title, *counts[kind]) for kind, title in KINDS if counts[kind][0] or counts[kind][2]]
    return html.render("pairs", lead, other, cards, counted, SURE, UNSURE)


def _count(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[int, int]:
    """Of the items kept: sure mistakes of one, and of how many of these the other is right or unsure."""
    said = (answers[key] for answers in (theirs, ours) for key in ("predicted", "confidence"))
    rows = zip(*said, theirs.get("labels") or [None] * len(theirs["predicted"]), strict=False)
    mistakes = [(q, c, y) for p, sure, q, c, y in rows if sure >= SURE and p != y]
    return len(mistakes), sum(c < UNSURE or (y is not None and q == y) for q, c, y in mistakes)


def _class_names(*models: Model) -> dict[int, str]:
    """Names of class numbers, as far as items have them."""
    found: dict[int, str] = {}
    for kept in (kept for model in models for _, kept in _kept(model)):
        answers = kept.get("answers") or {}
        for items in (value for key, value in kept.items() if key != "answers"):
            for item in items:
                at = item.get("index")
                if isinstance(at, int) and at < len(answers.get("predicted") or ()):
                    found.setdefault(answers["predicted"][at], item["predicted"])
                    if answers.get("labels"):
                        found.setdefault(answers["labels"][at], item["label"])
    return found


# The same items under every severity


def _ladders(name: str, comparison: Comparison, lead: Model) -> "html.Markup | None":
    """A tab per corruption; a slider shows one severity after the other."""
    found = {m: ladders for m in ordered(comparison) if (ladders := _first(m, "corrupted").get("ladders"))}
    own = found.get(lead)
    if not own:
        return None
    panels = {}
    for tab, (kind, steps) in enumerate(own.items()):
        shown = [item for items in steps.values() for item in items]
        scales = {key: _scale(shown, key) for key in ("token_variance", "token_attention")}
        strips = []
        for place, clean in enumerate(steps.get("0") or ()):
            same = [m for m in found if _is_same(found[m], kind, place, clean)]
            frames = [
                (
                    "as it is" if severity == "0" else f"severity {severity}",
                    _card(items[place], scales),
                    [
                        (m, found[m][kind][severity][place])
                        for m in same
                        if _has(found[m], kind, severity, place)
                    ],
                )
                for severity, items in sorted(steps.items(), key=lambda step: int(step[0]))
                if place < len(items)
            ]
            strips.append((f"{name}-{tab}-{place}", clean, frames))
        panels[kind.replace("_", " ")] = html.render("ladders", kind.replace("_", " "), lead, strips)
    return html.render(
        "group", "The same items, more and more corrupted", html.tabs(name, "which corruption", panels)
    )


def _has(ladders: Mapping[str, Any], kind: str, severity: str, place: int) -> bool:
    return len(ladders.get(kind, {}).get(severity) or ()) > place


def _is_same(ladders: Mapping[str, Any], kind: str, place: int, item: Item) -> bool:
    """Runs of other seeds may have other test items."""
    return _has(ladders, kind, "0", place) and ladders[kind]["0"][place]["image"] == item["image"]
