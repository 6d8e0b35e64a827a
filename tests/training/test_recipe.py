"""Recipes: read, changed, refused."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpattention.training import (
    CheckpointRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PhaseRecipe,
    Recipe,
    RegularizerRecipe,
    build_kernel_model,
    load_recipe,
    recipe_from_dict,
    with_seed,
)
from gpattention.training.field_types import check_types


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
        ({"model": {"type": "visoin"}}, "model.type to be one of vision, text, got 'visoin'"),
        ({"data": 3}, r"expected \[data\] to be a table, got 3"),
        ({"data": {"workers": -1}}, "data.workers >= 0, got -1"),
        ({"seed": "1"}, "expected seed to be a whole number, got '1'"),
        ([], r"expected a recipe to be a table, got \[\]"),
    ],
)
def test_mistakes_are_told(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from_dict(plain)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelRecipe(type="visoin"), "model.type to be one of vision, text, got 'visoin'"),
        (lambda: ModelRecipe(options=[1]), r"model.options to be a table, got \[1\]"),
        (lambda: CheckpointRecipe(select="worst"), "checkpoint.select to be one of best, best-nll, last"),
        (lambda: CheckpointRecipe(keep=0), "checkpoint.keep >= 1, got 0"),
        (lambda: DataRecipe(name=3), "data.name to be text, got 3"),
        (lambda: DataRecipe(stream="yes"), "data.stream to be true or false, got 'yes'"),
        (lambda: OptimizerRecipe(batch_size=True), "optimizer.batch_size to be a whole number, got True"),
        (lambda: OptimizerRecipe(clip="big"), "optimizer.clip to be a number, got 'big'"),
        (lambda: OptimizerRecipe(learning_rate=None), "optimizer.learning_rate to be a number, got None"),
        (lambda: OptimizerRecipe(learning_rate=1e-6), "got 1e-05 and 1e-06"),
        (lambda: PhaseRecipe(draw="some"), "phases.draw to be one of none, independent, joint"),
        (lambda: PhaseRecipe(epochs=0), "at least one epoch in the two phases"),
        (lambda: RegularizerRecipe(end=float("nan")), "regularizer.end >= 0, got nan"),
        (lambda: Recipe(model="cgp"), "expected model to be a ModelRecipe, got 'cgp'"),
        (lambda: Recipe(seed=1.5), "expected seed to be a whole number, got 1.5"),
    ],
)
def test_recipes_made_in_python_are_held_to_the_same(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_values_are_kept_as_their_fields_say() -> None:
    options = {"noise": 0.1}
    model, optimizer = ModelRecipe(options=options), OptimizerRecipe(learning_rate=1, clip=2)
    options["noise"] = 3.0
    assert model.options == {"noise": 0.1}
    assert (type(optimizer.learning_rate), type(optimizer.clip)) == (float, float)
    assert OptimizerRecipe(clip=None).clip is None


def test_an_annotation_that_cannot_be_checked_is_an_error() -> None:
    @dataclass(frozen=True)
    class New:
        shape: tuple[int, ...] = (1,)

    @dataclass(frozen=True)
    class Either:
        size: int | str = 1

    for made in (New(), Either()):
        with pytest.raises(TypeError, match=r"expected new\.(shape|size) to have an annotation that can be"):
            check_types(made, "new")


@pytest.mark.parametrize("attention", ["softmax", "softmax-gp", "kernel"])
def test_a_kind_without_a_warm_start_takes_no_options_of_a_first_phase(attention: str) -> None:
    options = {"kernel_epochs": 1, "kernel_options": {"kernel": "ard_rbf"}}
    recipe = recipe_from_dict({"model": {"attention": attention}, "phases": options})
    message = f"phases.kernel_options to be empty for '{attention}' attention, .* got {{'kernel': 'ard_rbf'}}"
    with pytest.raises(ValueError, match=message):
        build_kernel_model(recipe, {"classes": 3, "image_size": 8, "channels": 1, "patch": 4})


def test_bad_files_and_changes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no recipe"):
        load_recipe(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("= 3")
    with pytest.raises(ValueError, match="is not TOML"):
        load_recipe(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"broken.toml is not TOML, line 1: expected text in UTF-8"):
        load_recipe(broken)
    good = tmp_path / "good.toml"
    good.write_text("seed = 1\n")
    with pytest.raises(ValueError, match=r"form section\.key=value"):
        load_recipe(good, ["seed"])
    with pytest.raises(ValueError, match="not a table"):
        load_recipe(good, ["seed.x=1"])


def test_a_wrong_value_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[optimizer]\nbatchsize = 3\n")
    with pytest.raises(ValueError, match=f"^{file}: unknown key 'optimizer.batchsize'"):
        load_recipe(file)
