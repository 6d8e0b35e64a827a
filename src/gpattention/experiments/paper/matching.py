"""Which runs are which rows of the paper."""

import re
from dataclasses import dataclass

from gpattention.experiments.paper.evaluated import RunGroup
from gpattention.experiments.paper.spec import ModelSpec, TableSpec

# what a shortened copy of a recipe is called; it is the same model, and the notes tell what was shortened
SHORTENED = re.compile(r"-(short|quick|small|reduced|\d+-?epochs?|limit-?\d+)$")


@dataclass(frozen=True)
class Matching:
    """Runs of the paper's models by label, and those of ours that the paper does not have."""

    rows: dict[str, RunGroup]
    extras: tuple[RunGroup, ...]


def match_runs(spec: TableSpec, groups: tuple[RunGroup, ...]) -> Matching:
    """By the recipe's name; of several that fit, one that has the table's suites goes first."""
    here = [group.evaluated(spec.suites) for group in groups if group.recipe.data.name == spec.data]
    rows: dict[str, RunGroup] = {}
    for model in spec.models:
        fitting = [
            (not g.has(spec.suites), place, g) for g in here if (place := _place(model, g)) is not None
        ]
        if fitting:
            rows[model.label] = min(fitting, key=lambda found: (found[0], found[1], found[2].name))[-1]
    others = (g for g in here if g not in rows.values() and g.has(spec.suites))
    return Matching(rows, tuple(group for group in others if group.name.startswith(spec.extras)))


def _place(model: ModelSpec, group: RunGroup) -> int | None:
    """The place among the model's recipes, whole ones before shortened ones; None if it is another model."""
    whole = SHORTENED.sub("", group.name)
    if whole not in model.recipes:
        return None
    return 2 * model.recipes.index(whole) + (whole != group.name)
