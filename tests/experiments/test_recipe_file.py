"""A recipe written as TOML reads back as the same recipe."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpattention.experiments.recipe_file import changed_recipe, recipe_toml, toml_value, write_recipe
from gpattention.training import load_recipe, recipe_from_dict

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | texts
values = st.recursive(
    leaves,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3),
    max_leaves=6,
)


@given(values)
def test_any_value_reads_back(value: object) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


names = st.from_regex(r"[A-Za-z0-9 \"'#=\[\]{}.,$%&+-]{1,20}", fullmatch=True).filter(
    lambda name: name == name.strip(" .")
)


@given(st.dictionaries(texts, values, max_size=3), st.floats(1e-6, 1), names)
def test_recipes_read_back(options: dict[str, object], rate: float, name: str) -> None:
    recipe = recipe_from_dict(
        {
            "name": name,
            "data": {"options": options},
            "optimizer": {"learning_rate": rate, "final_learning_rate": rate / 3, "clip": rate},
        }
    )
    assert recipe_from_dict(tomllib.loads(recipe_toml(recipe, "first\nsecond"))) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_own_recipes_read_back(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    copy = tmp_path / "under-another-name.toml"
    write_recipe(copy, recipe, "a copy")
    assert load_recipe(copy) == recipe
    assert copy.read_text().startswith("# a copy\n")


def test_changes_are_those_of_load_recipe() -> None:
    changes = [
        "model.attention=scgp",
        "optimizer.clip=2",
        "model.config.width=16",
        "model.options={jitter=1e-3}",
    ]
    assert changed_recipe(load_recipe(RECIPES[0]), changes) == load_recipe(RECIPES[0], changes)
    with pytest.raises(ValueError, match="did you mean 'batch_size'"):
        changed_recipe(load_recipe(RECIPES[0]), ["optimizer.batchsize=1"])


def test_what_toml_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"expected a value that TOML can hold, got \{1\}"):
        toml_value({1})
