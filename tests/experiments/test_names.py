"""Wherever a name becomes a path, it is one component of it, or is refused before anything is written."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gpattention.cli import main
from gpattention.data import load
from gpattention.data.places import check_name
from gpattention.evaluation.prediction_cache import CacheKey, PredictionCache, RawPrediction
from gpattention.evaluation.records import SuiteResult, write_suite
from gpattention.experiments.judging.outside_sets import find_outside
from gpattention.studies.adoption.cells import Cell, Cells, KeptWeights
from gpattention.studies.adoption.comparison import IMAGE_COLUMNS, IMAGE_PANELS, write_comparison
from gpattention.studies.reproduction import load_plan
from gpattention.studies.sweep import run_sweep
from gpattention.training import Recipe, load_recipe, recipe_from_dict, with_seed
from tests.data import official

BAD = [
    "", ".", "..", "/abs/path", "../../evil", "a/b", "a\\b", "a\nb", "a\tb", "a\x00b", "\x1b[31mred", "a\x7f",
    ".hidden", "end ", " start", "end.", "\u202egnp.exe", "a\u2028b", "lone \udcff", "x" * 256,
    "\N{GREEK SMALL LETTER ALPHA}" * 128,
]  # fmt: skip
GOOD = [
    "run",
    "cifar10-cgpt-rows",
    "a b",
    "v1.2",
    "x" * 255,
    "\N{GREEK SMALL LETTER ALPHA}" * 127,
    "a=1,b=[2]",
]
REFUSED = "to be the name of one file or folder"


@given(st.text(max_size=300))
@example("con")
def test_what_is_taken_is_one_component_that_a_file_can_have(name: str) -> None:
    told = ""
    try:
        check_name("name", name)
    except ValueError as error:
        told = str(error)
    if told:
        assert REFUSED in told
        assert told.isprintable()
        return
    assert Path("a", name).parts == ("a", name)
    assert os.path.normpath(f"a/{name}") == f"a/{name}"
    assert len(os.fsencode(name)) <= 255
    assert name.isprintable()


@pytest.mark.parametrize("name", GOOD)
def test_names_that_are_taken(name: str, tmp_path: Path) -> None:
    (tmp_path / check_name("name", name)).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", [*BAD, None, 3, ["a"], b"a"])
def test_names_that_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=f"expected field {REFUSED}") as told:
        check_name("field", name)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("name", BAD)
def test_recipes(name: str, tmp_path: Path) -> None:
    for make in (
        lambda: Recipe(name=name),
        lambda: recipe_from_dict({"name": name}),
        lambda: replace(Recipe(), name=name),
    ):
        with pytest.raises(ValueError, match=f"expected name {REFUSED}"):
            make()
    if not {"\n", "\x00", "\udcff"} & set(name):  # TOML cannot hold them so
        file = tmp_path / "recipe.toml"
        file.write_text("seed = 1")
        with pytest.raises(ValueError, match=REFUSED):
            load_recipe(file, [f"name='{name}'"])


@pytest.mark.parametrize("name", ["/abs/path", "../../evil", "", "\x1b[2J"])
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_the_command_line_writes_nothing(
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    (inside / "recipe.toml").write_text('[data]\nname = "digits"\n')
    assert main([command, "recipe.toml", "--set", f"name='{name}'"]) == 2
    told = capsys.readouterr()
    assert REFUSED in told.err
    assert "\x1b" not in told.err + told.out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "recipe.toml"]


def test_a_recipe_file_whose_own_name_is_none_needs_one_inside(tmp_path: Path) -> None:
    file = tmp_path / "a\nb.toml"
    file.write_text("seed = 1")
    with pytest.raises(ValueError, match=r"got 'a\\nb'"):
        load_recipe(file)
    file.write_text('name = "a"')
    assert load_recipe(file).name == "a"


@pytest.mark.parametrize("name", BAD[:8])
@pytest.mark.parametrize("where", ["plan", "model", "shared"])
def test_plans(where: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text('[data]\nname = "digits"\n')
    shared = tmp_path / "model"
    shared.mkdir()
    (shared / "recipe.toml").write_text("seed = 1")
    escaped = name.encode("unicode_escape").decode().replace("\\\\", "\\").replace("\\", "\\\\")
    text = {
        "plan": f'name = "{escaped}"\n[[runs]]\nrecipe = "digits"\n',
        "model": f'[[runs]]\nrecipe = "digits"\nname = "{escaped}"\n',
        "shared": f'[[runs]]\nshared = "model"\nname = "{escaped}"\n',
    }[where]
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    with pytest.raises(ValueError, match=REFUSED):
        load_plan(plan)


def test_a_plan_whose_files_would_have_too_long_names_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text("")
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[runs]]\nrecipe = "digits"\nname = "{"x" * 250}"\n')
    with pytest.raises(ValueError, match=f"the file of a run {REFUSED}"):
        load_plan(plan)
    plan.write_text('[[runs]]\nrecipe = "digits"\nseeds = ["../0"]\n')
    with pytest.raises(ValueError, match="expected seed to be a whole number"):
        load_plan(plan)


def test_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"the folder of the sweep {REFUSED}"):
        run_sweep(Recipe(name="x" * 250), {})
    with pytest.raises(ValueError, match=REFUSED):
        run_sweep(Recipe(), {"name": ["'../evil'"]})
    assert list(tmp_path.iterdir()) == []
    assert with_seed(Recipe(name="a"), 1).name == "a"


@pytest.mark.parametrize("name", ["../evil", "ood/../../evil", "/abs", "a//b", "ood/\x1b", "ood/.."])
def test_kept_predictions(name: str, tmp_path: Path) -> None:
    key = CacheKey("model", 1, 0, "none", "m", "{}", "i", "0")
    raw = RawPrediction(torch.zeros(1, 2, 3))
    cache = PredictionCache(tmp_path / "cache")
    for bad in (lambda: cache.write(name, key, raw), lambda: cache.read(name, key)):
        with pytest.raises(ValueError, match=REFUSED):
            bad()
    with pytest.raises(ValueError, match=REFUSED):
        cache.write("test", replace(key, predictor=name), raw)
    assert list(tmp_path.iterdir()) == []


def test_suites(tmp_path: Path) -> None:
    result = SuiteResult("../../evil", "run", "digits", 0, "cgp", 1, (), {}, (), {}, 0.0)
    with pytest.raises(ValueError, match=REFUSED):
        write_suite(tmp_path / "run", result)
    assert list(tmp_path.iterdir()) == []


def test_cells_and_weights_of_adoption(tmp_path: Path) -> None:
    evil = Cell("../../evil", 0, "../../evil", {"test": {"nll": 1.0}})
    with pytest.raises(ValueError, match=REFUSED):
        Cells(tmp_path / "cells", {}).write(evil)
    with pytest.raises(ValueError, match=REFUSED):
        KeptWeights(tmp_path / "kept").record("../evil", {})
    groups = [replace(evil, group=group, method="host") for group in ("a", "../../evil")]
    with pytest.raises(ValueError, match=REFUSED):
        write_comparison(tmp_path / "a" / "b", "images", groups, IMAGE_COLUMNS, IMAGE_PANELS, {})
    assert [path for path in tmp_path.rglob("*") if "evil" in path.name] == []


def test_sets_of_other_images_on_disk(tmp_path: Path) -> None:
    """One that cannot be named is left out with a note; the others are judged."""
    official.write_cifar10_binary(tmp_path, each=2)
    for name in ("mine", "a\x1b[2J", "x" * 250, "b\nc"):
        (tmp_path / "ood" / name).mkdir(parents=True)
    found = find_outside(load("cifar10", tmp_path, subset=True), tmp_path)
    assert {name for name in found.images if "cifar" not in name} == {"mine"}
    left = [note for note in found.notes if "is left out" in note]
    assert len(left) == 3
    assert all(note.isprintable() and REFUSED in note for note in left)
