"""Run folders as the table of results: figures are of runs that differ by their seed alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpattention.cli.evaluation_table import seeds_table
from gpattention.evaluation.records import Record, SuiteResult, write_suite
from gpattention.experiments import read_results
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


def figures(folders: list[Path]) -> dict[str, dict[int | str, float]]:
    return {what["recipe"]: dict(figure.values) for what, figure in read_results(folders).figures()}


def test_other_recipes_of_one_name_are_not_averaged(tmp_path: Path) -> None:
    folders = [
        evaluated(
            tmp_path / f"{epochs}-{seed}", epochs / 10 + seed / 100, seed=seed, phases={"epochs": epochs}
        )
        for epochs in (2, 8)
        for seed in (0, 1)
    ]
    alone = [folders[0], folders[2]]  # the same seed
    assert figures(alone) == {"tiny phases.epochs=2": {0: 0.2}, "tiny phases.epochs=8": {0: 0.8}}
    assert seeds_table(read_results(alone), ["clean"], bold=False) == ""
    assert figures(folders) == {
        "tiny phases.epochs=2": {0: 0.2, 1: pytest.approx(0.21)},
        "tiny phases.epochs=8": {0: 0.8, 1: pytest.approx(0.81)},
    }
    _, _, *lines = seeds_table(read_results(folders), ["clean"], bold=False).splitlines()
    assert [line.split() for line in lines] == [
        ["tiny", "phases.epochs=2", "model", "0.205", "±", "0.005"],
        ["tiny", "phases.epochs=8", "model", "*0.805", "±", "0.005"],
    ]


def test_what_one_recipe_lacks_is_told_and_other_names_are_others(tmp_path: Path) -> None:
    options = {"attention": "cgp", "config": digits_recipe().model.config, "options": {"noise": 0.1}}
    folders = [
        evaluated(tmp_path / "a", 0.5, name="one", seed=0),
        evaluated(tmp_path / "b", 0.7, name="one-s1", seed=1),
        evaluated(tmp_path / "d", 0.9, name="two", seed=1),
        evaluated(tmp_path / "c", 0.1, name="one", seed=0, model=options),
    ]
    assert figures(folders) == {
        "one": {0: 0.5, 1: 0.7},
        "one model.options.noise=0.1": {0: 0.1},
        "two": {1: 0.9},
    }


def test_a_seed_counts_once_by_its_mean(tmp_path: Path) -> None:
    folders = [evaluated(tmp_path / name, value, seed=0) for name, value in (("a", 0.5), ("copy", 0.6))]
    (figure,) = figures(folders).values()
    assert figure == {0: pytest.approx(0.55)}


def test_the_frame_has_a_row_for_every_number(tmp_path: Path) -> None:
    folders = [
        evaluated(tmp_path / f"x-s{seed}", 0.5 + seed, seed=seed, name=f"x-s{seed}") for seed in (2, 3)
    ]
    frame = read_results(folders).frame
    assert frame[
        ["run", "recipe", "seed", "suite", "set", "predictor", "metric", "value"]
    ].values.tolist() == [
        ["x-s2", "x", 2, "clean", "test", "model", "accuracy", 2.5],
        ["x-s3", "x", 3, "clean", "test", "model", "accuracy", 3.5],
    ]
    (row,) = read_results(folders).summary().to_dict("records")
    assert (row["mean"], row["standard_error"], row["seeds"]) == (3.0, pytest.approx(0.5), 2)
    assert row["standard_deviation"] == pytest.approx(0.5**0.5)
