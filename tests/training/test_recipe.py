"""Recipes: read, changed, refused."""

from pathlib import Path

import pytest

from gpattention.training import Recipe, load_recipe, recipe_from_dict, with_seed


def test_round_trip() -> None:
    recipe = recipe_from_dict({"name": "x", "model": {"attention": "scgp", "options": {"num_inducing": 16}}})
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert with_seed(recipe, 3).seed == 3
    assert Recipe() == recipe_from_dict({})


def test_toml_and_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('seed = 2\n[optimizer]\nbatch_size = 32\n[model]\nattention = "sgpa"\n')
    changes = ["optimizer.batch_size=64", "model.attention=cgp", "phases.epochs = 3"]
    recipe = load_recipe(path, [*changes, "model.options.noise=0.1"])
    assert (recipe.name, recipe.seed, recipe.optimizer.batch_size) == ("mine", 2, 64)
    assert (recipe.model.attention, recipe.phases.epochs) == ("cgp", 3)
    assert recipe.model.options == {"noise": 0.1}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"optimiser": {}}, "unknown key 'optimiser'; did you mean 'optimizer'"),
        ({"optimizer": {"batchsize": 3}}, "unknown key 'optimizer.batchsize'; did you mean 'batch_size'"),
        ({"optimizer": {"batch_size": 2.5}}, "optimizer.batch_size to be a whole number, got 2.5"),
        ({"optimizer": {"batch_size": 0}}, "optimizer.batch_size >= 1, got 0"),
        ({"optimizer": {"restart": 1}}, "optimizer.restart to be true or false"),
        ({"optimizer": {"clip": "big"}}, "optimizer.clip to be a number, got 'big'"),
        ({"optimizer": {"clip": -1}}, "optimizer.clip > 0"),
        ({"optimizer": {"final_learning_rate": 1}}, "final_learning_rate <= optimizer.learning_rate"),
        ({"phases": {"draw": "some"}}, "phases.draw to be one of none, independent, joint"),
        ({"phases": {"epochs": 0}}, "at least one epoch"),
        ({"phases": {"epochs": -1}}, "phases.epochs >= 0"),
        ({"regularizer": {"end": -1}}, "regularizer.end >= 0"),
        ({"model": {"attention": 3}}, "model.attention to be text"),
        ({"model": {"options": 3}}, "model.options to be a table"),
        ({"data": 3}, "to be a table"),
    ],
)
def test_mistakes_are_told(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from_dict(plain)


def test_bad_files_and_changes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no recipe"):
        load_recipe(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("= 3")
    with pytest.raises(ValueError, match="is not TOML"):
        load_recipe(broken)
    good = tmp_path / "good.toml"
    good.write_text("seed = 1\n")
    with pytest.raises(ValueError, match=r"form section\.key=value"):
        load_recipe(good, ["seed"])
    with pytest.raises(ValueError, match="not a table"):
        load_recipe(good, ["seed.x=1"])
