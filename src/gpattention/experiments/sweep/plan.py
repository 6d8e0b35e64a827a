"""The runs of a sweep: every combination of values, every seed, each with a folder of its own."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from gpattention.experiments.recipe_file import changed_recipe, toml_value
from gpattention.training import Recipe, with_seed

LONGEST = 120  # characters of a folder's name
AS_IT_IS = "recipe"  # the folder of the only setting when nothing varies


@dataclass(frozen=True)
class PlannedRun:
    """One setting with one seed."""

    settings: Mapping[str, str]  # key to value, as --set takes them
    recipe: Recipe
    folder: Path


def plan_sweep(
    recipe: Recipe, over: Mapping[str, Sequence[object]], seeds: int, folder: Path
) -> tuple[PlannedRun, ...]:
    """All runs, setting by setting; a value that the recipe refuses is told before anything is trained."""
    if isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"expected seeds >= 1, got {seeds}")
    texts = {key: _texts(key, values) for key, values in over.items()}
    if "seed" in texts:
        raise ValueError("expected keys other than seed to sweep over: seeds are what --seeds is for")
    runs = []
    for values in product(*texts.values()):
        settings = dict(zip(texts, values, strict=True))
        label = label_of(settings)
        changed = changed_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])
        named = replace(changed, name=f"{recipe.name}-{label}") if settings else changed
        for seed in range(recipe.seed, recipe.seed + seeds):
            runs.append(PlannedRun(settings, with_seed(named, seed), folder / label / f"seed-{seed}"))
    return tuple(runs)


def parse_over(texts: Sequence[str]) -> dict[str, list[str]]:
    """`key=v1,v2` as often as given; commas inside brackets and quotes belong to a value."""
    over: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise ValueError(f"expected --over to be of the form section.key=value,value, got {text!r}")
        if key in over:
            raise ValueError(f"expected every key once, got --over {key} twice")
        over[key] = split_values(values)
    return over


def split_values(text: str) -> list[str]:
    """The parts between commas at the top level.

    >>> split_values('1e-3, [1, 2], "a,b"')
    ['1e-3', '[1, 2]', '"a,b"']
    """
    parts, depth, quote, start = [], 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def label_of(settings: Mapping[str, str]) -> str:
    """`key=value,key=value` as the name of a folder; a digest tells apart what a name cannot hold."""
    whole = ",".join(f"{key}={value}" for key, value in settings.items()) or AS_IT_IS
    safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", whole)
    if safe == whole and len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST - 9]}-{digest}"


def _texts(key: str, values: Sequence[object]) -> list[str]:
    if isinstance(values, str) or len(values) == 0:
        raise ValueError(f"expected a list of values for {key}, got {values!r}")
    texts = [value if isinstance(value, str) else toml_value(value) for value in values]
    for text in texts:
        if not text:
            raise ValueError(f"expected values for {key} between the commas, got an empty one")
        if texts.count(text) > 1:
            raise ValueError(f"expected every value of {key} once, got {text} twice")
    return texts
