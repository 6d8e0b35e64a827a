"""The table: its statistics against numpy and scipy, and the runs that are one figure of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gpattention.cli.evaluate import seeds_table
from gpattention.runs import (
    OverSeeds,
    Record,
    SuiteResult,
    average,
    difference,
    difference_from,
    name_without_seed,
    read_results,
    write_suite,
)
from gpattention.runs.results import Difference, beyond_chance
from tests.runs.tiny_runs import digits_recipe

VALUES = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=8)


@given(VALUES)
def test_mean_deviation_and_error_are_numpys(values: list[float]) -> None:
    figure = OverSeeds(dict(enumerate(values)))
    assert figure.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert figure.deviation == pytest.approx(np.std(values, ddof=1), abs=1e-9)
    assert figure.error == pytest.approx(stats.sem(values), abs=1e-9)


@given(st.integers(2, 8), st.data())
def test_the_same_seeds_are_paired(count: int, data: st.DataObject) -> None:
    one, other = (data.draw(st.lists(st.floats(-9, 9), min_size=count, max_size=count)) for _ in range(2))
    gap = difference(OverSeeds(dict(enumerate(one))), OverSeeds(dict(enumerate(other))))
    assert gap.basis == "paired"
    assert gap.mean == pytest.approx(np.mean(one) - np.mean(other), abs=1e-9)
    if np.std(np.subtract(one, other)) > 1e-6:
        test = stats.ttest_rel(one, other)
        assert gap.in_errors == pytest.approx(test.statistic, rel=1e-6, abs=1e-9)
        assert beyond_chance(test.statistic, gap.freedom) == pytest.approx(test.pvalue, abs=1e-9)
        assert gap.clear == (test.pvalue < 0.05) or abs(test.pvalue - 0.05) < 1e-9


@given(VALUES, VALUES)
def test_other_seeds_are_welchs(one: list[float], other: list[float]) -> None:
    figures = OverSeeds(dict(enumerate(one))), OverSeeds({100 + i: x for i, x in enumerate(other)})
    gap = difference(*figures)
    assert gap.basis == "unpaired"
    if min(np.std(one), np.std(other)) > 1e-6:
        test = stats.ttest_ind(one, other, equal_var=False)
        assert gap.freedom == pytest.approx(test.df)
        assert gap.in_errors == pytest.approx(test.statistic, rel=1e-6, abs=1e-9)
        assert gap.clear == (test.pvalue < 0.05) or abs(test.pvalue - 0.05) < 1e-9
        printed = difference_from(figures[0], np.mean(other), float(np.std(other, ddof=1)), len(other))
        assert printed.in_errors == pytest.approx(gap.in_errors, rel=1e-6, abs=1e-9)
        assert printed.freedom == pytest.approx(gap.freedom)


@given(VALUES, st.floats(-100, 100))
def test_a_single_figure_is_taken_as_it_is(values: list[float], against: float) -> None:
    figure = OverSeeds(dict(enumerate(values)))
    for gap in (difference_from(figure, against), difference(figure, OverSeeds({"all": against}))):
        assert gap.basis == "one side"
        assert gap.error == figure.error
        if np.std(values) > 1e-6:
            test = stats.ttest_1samp(values, against)
            assert gap.in_errors == pytest.approx(test.statistic, rel=1e-6, abs=1e-9)
            assert gap.clear == (test.pvalue < 0.05) or abs(test.pvalue - 0.05) < 1e-9


def test_equal_differences_are_no_number_of_errors() -> None:
    """The rounding of 0.1 + 0.2 is no spread."""
    assert Difference(0.3, 5e-17, 4, "paired").in_errors is None
    assert Difference(0.3, 0.1, 4, "paired").in_errors == pytest.approx(3)


@given(st.floats(0, 60), st.floats(1, 500))
def test_students_distribution(t: float, freedom: float) -> None:
    # SciPy itself is off by 1.5e-10 at t = 6e-8 of one degree of freedom, which has a closed form
    assert beyond_chance(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), abs=1e-9)
    assert beyond_chance(t, 1.0) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-12)


def test_which_seeds_are_paired() -> None:
    five = OverSeeds({seed: seed**2 / 10 for seed in range(5)})
    four = OverSeeds(dict.fromkeys(range(4), 0.1))
    assert difference(five, four).basis == "paired"  # one broke off; over the four that both have
    assert difference(five, four).freedom == 3
    assert difference(five, OverSeeds({3: 0.1, 4: 0.2, 5: 0.1})).basis == "unpaired"  # two of five are few
    lone = difference(OverSeeds({1: 0.5}), five)  # of that seed alone, without an error
    assert (lone.mean, lone.error, lone.basis, lone.clear) == (0.4, None, "unknown", False)


def test_two_seeds_are_hardly_ever_clear() -> None:
    zero = OverSeeds({0: 0.0, 1: 0.0})
    assert not difference(OverSeeds({0: 1.0, 1: 1.3}), zero).clear  # 7.7 standard errors of 12.7
    assert difference(OverSeeds({0: 1.0, 1: 1.1}), zero).clear
    assert difference(OverSeeds({0: 1.0, 1: 1.0}), zero).clear  # without any scatter
    assert not difference(zero, zero).clear


def test_texts() -> None:
    figure = OverSeeds({0: 0.5, 1: 0.7})
    assert figure.text() == "0.600 ± 0.100"
    assert figure.text(2, 100) == "60.00 ± 10.00"
    assert figure.text(None) == "0.6000 ± 0.1"
    assert OverSeeds({0: 0.5}).text() == "0.500"
    assert difference(figure, OverSeeds({0: 0.9, 1: 0.9})).text() == "-0.300 ± 0.100"


def test_averages_are_of_seeds_that_have_all() -> None:
    one, other = OverSeeds({0: 1.0, 1: 2.0}, {0: (("a", 5),)}), OverSeeds({0: 3.0, 2: 4.0}, {0: (("b", 6),)})
    both = average([one, other])
    assert both is not None
    assert (both.values, both.sets) == ({0: 2.0}, {0: (("a", 5), ("b", 6))})
    assert both.basis_text() == "11 items of 2 sets"
    assert average([]) is None
    assert average([OverSeeds({0: 1.0}), OverSeeds({1: 1.0})]) is None


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("cifar10-cgp-seed3", "cifar10-cgp"), ("cifar10-cgp-seed-3", "cifar10-cgp"), ("x-s2", "x"),
        ("x_seed2", "x"), ("x", "x"), ("seed3", "seed3"), ("cifar10-60", "cifar10-60"), ("mass3", "mass3"),
    ],
)  # fmt: skip
def test_names_without_seeds(name: str, without: str) -> None:
    assert name_without_seed(name) == without


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
        evaluated(tmp_path / f"{n}-{seed}", n / 10 + seed / 100, seed=seed, phases={"epochs": n})
        for n in (2, 8)
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


def test_what_one_recipe_lacks_is_named_and_other_names_are_others(tmp_path: Path) -> None:
    options = {"attention": "cgp", "config": digits_recipe().model.config, "options": {"noise": 0.1}}
    folders = [
        evaluated(tmp_path / "a", 0.4, name="one", seed=0),
        evaluated(tmp_path / "copy", 0.6, name="one", seed=0),  # a seed counts once, by its mean
        evaluated(tmp_path / "b", 0.7, name="one-s1", seed=1),
        evaluated(tmp_path / "d", 0.9, name="two", seed=1),
        evaluated(tmp_path / "c", 0.1, name="one", seed=0, model=options),
    ]
    assert figures(folders) == {
        "one": {0: pytest.approx(0.5), 1: 0.7},
        "one model.options.noise=0.1": {0: 0.1},
        "two": {1: 0.9},
    }


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
