"""A recipe as a TOML file that `load_recipe` reads back."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpattention.models.storage import write_atomically
from gpattention.training import Recipe, recipe_from_dict
from gpattention.training.recipe import apply_change

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def recipe_toml(recipe: Recipe, comment: str = "") -> str:
    """Every value of the recipe, defaults included; TOML has no word for None, so those are left out."""
    plain = recipe.to_dict()
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [_pair(key, value) for key, value in plain.items() if not isinstance(value, Mapping | None)]
    for section, table in plain.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(section)}]"]
            lines += [_pair(key, value) for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_recipe(path: str | Path, recipe: Recipe, comment: str = "") -> None:
    """Write it in one piece; the comment stands at the top."""
    write_atomically(Path(path), recipe_toml(recipe, comment).encode())


def changed_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with `section.key=value` applied, as `load_recipe` does."""
    plain = tomllib.loads(recipe_toml(recipe))
    for change in changes:
        apply_change(plain, change)
    return recipe_from_dict(plain)


def _pair(key: str, value: Any) -> str:
    return f"{_key(key)} = {toml_value(value)}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)  # inf and nan are TOML's words too
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pair(key, x) for key, x in value.items() if x is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(x) for x in value) + "]"
    raise ValueError(f"expected a value that TOML can hold, got {value!r}")


def _text(text: str) -> str:
    """JSON's strings are TOML's basic strings, but for the one control character that JSON lets pass."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
