"""Wherever a name becomes a path, it is one component of it, or is refused before anything is written."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gpattention.checks import check_name
from gpattention.cli import main
from gpattention.data import load
from gpattention.evaluation import PredictionCache
from gpattention.evaluation.predictions import CacheKey, RawPrediction
from gpattention.evaluation.sets import find_outside
from gpattention.runs import Recipe, SuiteResult, load_recipe, recipe_from_dict, write_suite
from gpattention.studies.adoption import Cell, Store
from gpattention.studies.adoption_images import COLUMNS
from gpattention.studies.adoption_tables import write_comparison
from gpattention.studies.plans import load_plan
from gpattention.studies.sweep import run_sweep
from tests.data import official

ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
BAD = [
    "", ".", "..", "/abs/path", "../../evil", "a/b", "a\\b", "a\nb", "a\tb", "a\x00b", "\x1b[31mred", "a\x7f",
    ".hidden", "end ", " start", "end.", "\u202egnp.exe", "a\u2028b", "lone \udcff", "x" * 256, ALPHA * 128,
]  # fmt: skip
GOOD = ["run", "cifar10-cgpt-rows", "a b", "v1.2", "x" * 255, ALPHA * 127, "a=1,b=[2]"]
REFUSED = "to be the name of one file or folder"
KEY, RAW = CacheKey("model", 1, 0, "none", "m", "{}", "i", "0"), RawPrediction(torch.zeros(1, 2, 3))
EVIL = Cell("../../evil", 0, "host", {"test": {"nll": 1.0}})


@given(st.text(max_size=300))
@example("con")
def test_what_is_taken_is_one_component_that_a_file_can_have(name: str) -> None:
    message = ""
    try:
        check_name("name", name)
    except ValueError as error:
        message = str(error)
    if message:
        assert REFUSED in message
        assert message.isprintable()
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
    with pytest.raises(ValueError, match=f"expected field {REFUSED}") as error:
        check_name("field", name)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400
    if isinstance(name, str):
        for make in (lambda: recipe_from_dict({"name": name}), lambda: replace(Recipe(), name=name)):
            with pytest.raises(ValueError, match=f"expected name {REFUSED}"):
                make()


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
    shown = capsys.readouterr()
    assert REFUSED in shown.err
    assert "\x1b" not in shown.err + shown.out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "recipe.toml"]


def test_a_recipe_file_whose_own_name_is_none_needs_one_inside(tmp_path: Path) -> None:
    file = tmp_path / "a\nb.toml"
    file.write_text("seed = 1")
    with pytest.raises(ValueError, match=r"got 'a\\nb'"):
        load_recipe(file)
    file.write_text('name = "a"')
    assert load_recipe(file).name == "a"


@pytest.mark.parametrize("name", BAD[:8])
@pytest.mark.parametrize(
    "text",
    ['name = "{}"\n[[runs]]\nrecipe = "digits"\n', '[[runs]]\nrecipe = "digits"\nname = "{}"\n',
     '[[runs]]\nshared = "model"\nname = "{}"\n'],
    ids=["plan", "model", "shared"],
)  # fmt: skip
def test_plans(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text('[data]\nname = "digits"\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "recipe.toml").write_text("seed = 1")
    escaped = name.encode("unicode_escape").decode().replace("\\\\", "\\").replace("\\", "\\\\")
    plan = tmp_path / "plan.toml"
    for written, message in (
        (text.format(escaped), REFUSED),
        (f'[[runs]]\nrecipe = "digits"\nname = "{"x" * 250}"\n', f"the file of a run {REFUSED}"),
        ('[[runs]]\nrecipe = "digits"\nseeds = ["../0"]\n', r"seed .*got '\.\./0'"),
    ):
        plan.write_text(written)
        with pytest.raises(ValueError, match=message):
            load_plan(plan)


@pytest.mark.parametrize(
    "write",
    [
        *(
            call
            for name in ("../evil", "ood/../../evil", "/abs", "a//b", "ood/\x1b", "ood/..")
            for call in (
                lambda to, name=name: PredictionCache(to).write(name, KEY, RAW),
                lambda to, name=name: PredictionCache(to).read(name, KEY),
                lambda to, name=name: PredictionCache(to).write("test", replace(KEY, predictor=name), RAW),
            )
        ),
        lambda to: run_sweep(Recipe(name="x" * 250), {}),
        lambda to: run_sweep(Recipe(), {"name": ["'../evil'"]}),
        lambda to: write_suite(to, SuiteResult("../../evil", "run", "digits", 0, "cgp", 1, ())),
        lambda to: Store(to, "../../evil", {}, None).write({}),
        lambda to: write_comparison(to / "b", "images", [EVIL, replace(EVIL, group="a")], COLUMNS),
    ],
)
def test_everything_that_writes(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    beside = set(tmp_path.parent.iterdir())
    with pytest.raises(ValueError, match=REFUSED):
        write(tmp_path / "a")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(tmp_path / "a" / "b" in path.parents for path in kept)  # tables of the groups with good names
    assert set(tmp_path.parent.iterdir()) == beside


def test_sets_of_other_images_on_disk(tmp_path: Path) -> None:
    """One that cannot be named is left out with a note; the others are evaluated."""
    official.write_cifar10_binary(tmp_path, each=2)
    for name in ("mine", "a\x1b[2J", "x" * 250, "b\nc"):
        (tmp_path / "ood" / name).mkdir(parents=True)
    found = find_outside(load("cifar10", tmp_path, subset=True), tmp_path)
    assert {name for name in found.images if "cifar" not in name} == {"ood/mine"}
    left = [note for note in found.notes if "is left out" in note]
    assert len(left) == 3
    assert all(note.isprintable() and REFUSED in note for note in left)
