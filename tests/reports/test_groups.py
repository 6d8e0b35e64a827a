"""Runs by data set and model, and what several seeds say together."""

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpattention.reports.groups import compare
from gpattention.reports.words import number
from gpattention.runs import OverSeeds, RunData
from tests.reports.synthetic import KINDS, synthetic_run

NUMBERS = st.floats(-1e6, 1e6)


def few(kind: str, seed: int = 0, **changes: object) -> RunData:
    return replace(synthetic_run(kind, seed, suites=("clean",)), **changes)  # type: ignore[arg-type]


def test_seeds_of_one_recipe_are_one_model() -> None:
    runs = [few(kind, seed) for seed in range(3) for kind in ("softmax", "cgp")]
    (comparison,) = compare(runs)
    assert [model.label for model in comparison.models] == ["softmax", "cgp"]
    assert [len(model.runs) for model in comparison.models] == [3, 3]
    assert comparison.several_seeds
    found = [run.suites["clean"].value("test", "ece") for run in runs if run.attention == "cgp"]
    values = [value for value in found if value is not None]
    figure = comparison.models[1].find("clean", "test", "ece")
    assert figure is not None
    assert figure.count == len(values) == 3
    assert figure.mean == pytest.approx(fmean(values))
    assert figure.error == pytest.approx(stdev(values) / math.sqrt(3))


def test_data_sets_are_compared_by_themselves_in_the_same_colours() -> None:
    runs = [few("cgp"), few("softmax"), replace(synthetic_run("softmax", data="cola", suites=()), folder="x")]
    digits, cola = compare(runs)
    assert (digits.data, cola.data) == ("digits", "cola")
    assert cola.models[0].style == digits.models[1].style
    assert digits.models[0].style != digits.models[1].style


def test_another_option_is_another_model_with_that_option() -> None:
    first = few("cgp", 0, name="cgp-weak-seed0")
    second = few("cgp", 1, name="cgp-weak-seed1")
    strong = few("cgp", 0, name="cgp-strong")
    strong = replace(strong, recipe={**strong.recipe, "regularizer": {"end": 1.0}})
    (comparison,) = compare([first, strong, second])
    assert [model.label for model in comparison.models] == [
        "cgp regularizer.end=0.01",
        "cgp regularizer.end=1.0",
    ]


def test_equal_names_tell_what_differs() -> None:
    runs = [RunData("a", {"model": {"attention": "cgp"}, "x": i}) for i in range(3)]
    (comparison,) = compare(runs)
    assert [model.label for model in comparison.models] == ["a x=0", "a x=1", "a x=2"]


def test_runs_without_a_recipe_stand_alone() -> None:
    (comparison,) = compare([RunData("a"), RunData("b")])
    assert [model.label for model in comparison.models] == ["a", "b"]
    assert comparison.models[0].runs[0].seed is None
    assert comparison.data == "unnamed data"


def test_unlike_names_of_seeds_leave_the_first() -> None:
    (comparison,) = compare([few("cgp", 0, name="x"), few("cgp", 1, name="y"), few("cgp", 0, name="z")])
    assert comparison.models[0].label == "cgp"  # the kind is enough
    recipe = {"data": {"name": "d"}, "seed": 0}
    (comparison,) = compare([RunData("x", recipe), RunData("y", recipe)])
    assert comparison.models[0].label == "x"


def test_the_models_own_prediction_comes_first() -> None:
    (comparison,) = compare(
        [
            synthetic_run(
                predictors=("zeta", "ensemble", "mean+temperature", "mean", "model+temperature", "model")
            )
        ]
    )
    assert comparison.predictors("clean") == [
        "model", "model+temperature", "mean", "mean+temperature", "ensemble", "zeta",
    ]  # fmt: skip


def test_every_kind_has_its_own_look() -> None:
    (comparison,) = compare([few(kind) for kind in KINDS])
    assert len(set(comparison.styles.values())) == len(KINDS)


@given(st.lists(st.none() | NUMBERS))
def test_a_figure_is_of_what_is_there(values: list[float | None]) -> None:
    figure = OverSeeds.of(values)
    known = [value for value in values if value is not None]
    if not known:
        assert figure is None
        return
    assert figure is not None
    assert figure.count == len(known)
    assert min(known) - 1e-6 <= figure.mean <= max(known) + 1e-6
    assert (figure.error is None) == (len(known) == 1)
    assert ("±" in figure.text()) == (len(known) > 1)


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, "x", True, [1.0]])
def test_only_finite_numbers_are_numbers(nothing: object) -> None:
    assert number(nothing) is None
    assert number(2) == 2.0
