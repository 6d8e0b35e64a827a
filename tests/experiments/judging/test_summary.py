"""Means over seeds are of runs that differ by their seed alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpattention.cli.evaluation_table import seeds_table
from gpattention.evaluation.records import Record, SuiteResult, write_suite
from gpattention.experiments import summarise
from tests.experiments.tiny_runs import digits_recipe


def evaluated(folder: Path, accuracy: float, **changes: Any) -> Path:
    """A run's folder with a recipe and one number."""
    recipe = digits_recipe(**changes)
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    record = Record("test", "model", "accuracy", accuracy)
    attention = recipe.model.attention
    write_suite(folder, SuiteResult("clean", recipe.name, "digits", recipe.seed, attention, 10, (record,)))
    return folder


def test_other_recipes_of_one_name_are_not_averaged(tmp_path: Path) -> None:
    folders = [
        evaluated(
            tmp_path / f"{epochs}-{seed}", epochs / 10 + seed / 100, seed=seed, phases={"epochs": epochs}
        )
        for epochs in (2, 8)
        for seed in (0, 1)
    ]
    alone = summarise([folders[0], folders[2]])  # the same seed
    assert [(row.mean, row.std, row.seeds) for row in alone.rows] == [(0.2, None, (0,)), (0.8, None, (0,))]
    assert seeds_table(alone, ["clean"], bold=False) == ""
    both = summarise(folders)
    assert [(dict(row.differs), row.seeds) for row in both.find(run="tiny")] == [
        ({"phases.epochs": 2}, (0, 1)),
        ({"phases.epochs": 8}, (0, 1)),
    ]
    _, _, *lines = seeds_table(both, ["clean"], bold=False).splitlines()
    assert [line.split() for line in lines] == [
        ["tiny", "phases.epochs=2", "model", "0.205", "±", "0.007"],
        ["tiny", "phases.epochs=8", "model", "*0.805", "±", "0.007"],
    ]


def test_names_do_not_matter_and_what_one_recipe_lacks_is_told(tmp_path: Path) -> None:
    options = {"attention": "cgp", "config": digits_recipe().model.config, "options": {"noise": 0.1}}
    folders = [
        evaluated(tmp_path / "a", 0.5, name="one", seed=0),
        evaluated(tmp_path / "b", 0.7, name="two", seed=1),
        evaluated(tmp_path / "c", 0.1, name="one", seed=0, model=options),
    ]
    first, other = summarise(folders).rows
    assert (first.run, first.differs, first.seeds) == ("one", {}, (0, 1))
    assert first.mean == pytest.approx(0.6)
    assert (other.run, other.differs, other.seeds) == ("one", {"model.options.noise": 0.1}, (0,))


def test_a_seed_counts_once(tmp_path: Path) -> None:
    folders = [evaluated(tmp_path / name, value, seed=0) for name, value in (("a", 0.5), ("copy", 0.6))]
    (row,) = summarise(folders).rows
    assert (row.values, row.std) == ((0.6,), None)
