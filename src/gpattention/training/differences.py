"""Where two recipes differ, by the names that `--set` takes."""

from collections.abc import Mapping
from typing import Any

from gpattention.training.recipe import Recipe


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """Every value by its name: `phases.epochs`, `model.options.noise`, ..."""
    return _flat(recipe.to_dict(), "")


def told_differences(there: Recipe, here: Recipe) -> str:
    """`phases.epochs is 2 there and 8 here, seed is 0 there and 1 here`; empty for equal recipes."""
    one, other = flat_recipe(there), flat_recipe(here)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} is {_told(one, name)} there and {_told(other, name)} here" for name in names)


def _flat(values: Mapping[str, Any], above: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def _told(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not given"
