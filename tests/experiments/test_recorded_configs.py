"""What the repository holds of earlier runs can still be built: recorded configs, plans and saved models."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpattention.models import VisionTransformer
from gpattention.training import Recipe, build_kernel_model, build_model, load_recipe, recipe_from_dict
from tests.experiments.test_recipes import FACTS

ROOT = Path(__file__).parents[2]
MODELS = sorted(path.parent for path in ROOT.glob("results/models/*/config.json"))


def recorded() -> Iterator[tuple[str, Recipe]]:
    for path in sorted(ROOT.glob("results/*/configs.json")):
        for name, config in json.loads(path.read_text()).items():
            yield f"{path.parent.name} {name}", recipe_from_dict(config["recipe"])


def planned() -> Iterator[tuple[str, Recipe]]:
    for path in sorted(ROOT.glob("recipes/plans/*.toml")):
        plan = tomllib.loads(path.read_text())
        for run in plan["runs"]:
            if "shared" in run:
                yield f"{path.stem} {run['shared']}", load_recipe(path.parent / run["shared"] / "recipe.toml")
                continue
            changes = [*plan.get("changes", ()), *run.get("changes", ())]
            recipe = load_recipe(ROOT / "recipes" / f"{run['recipe']}.toml", changes)
            yield f"{path.stem} {run.get('name', run['recipe'])}", recipe


RECIPES = dict([*recorded(), *planned()])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_both_phases_are_built(name: str) -> None:
    recipe = RECIPES[name]
    for build in (build_kernel_model, build_model):
        build(recipe, FACTS[recipe.data.name])


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_saved_model_is_loaded(folder: Path) -> None:
    assert VisionTransformer.from_pretrained(folder).draws == (folder.name != "cifar10-kernel")


def test_there_are_some() -> None:
    assert len(RECIPES) > 50
    assert len(MODELS) == 6
