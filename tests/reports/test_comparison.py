"""Runs by data set and model, what several seeds say together, and which figures are compared at all."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpattention.reports import build_report
from gpattention.reports.comparison import compare, number
from gpattention.reports.sections.summary import OTHER_ITEMS
from gpattention.runs import OverSeeds, Results, RunData, compared, group
from gpattention.runs.records import SuiteResult
from gpattention.runs.results import UNSEEN, Sets, evaluated_items
from tests.reports.reading import Element, read
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


def labels(*runs: RunData) -> list[str]:
    (comparison,) = compare(runs)
    return [model.label for model in comparison.models]


def test_labels_tell_what_differs() -> None:
    weak = [few("cgp", seed, name=f"cgp-weak-seed{seed}") for seed in (0, 1)]
    strong = few("cgp", 0, name="cgp-strong")
    strong = replace(strong, recipe={**strong.recipe, "regularizer": {"end": 1.0}})
    assert labels(weak[0], strong, weak[1]) == ["cgp regularizer.end=0.01", "cgp regularizer.end=1.0"]
    alike = [RunData("a", {"model": {"attention": "cgp"}, "x": i}) for i in range(3)]
    assert labels(*alike) == ["a x=0", "a x=1", "a x=2"]
    assert labels(*(few("cgp", seed, name=name) for name, seed in (("x", 0), ("y", 1), ("z", 0)))) == ["cgp"]
    recipe = {"data": {"name": "d"}, "seed": 0}
    assert labels(RunData("x", recipe), RunData("y", recipe)) == ["x"]  # unlike names: the first


def test_runs_without_a_recipe_stand_alone() -> None:
    assert labels(RunData("a"), RunData("b")) == ["a", "b"]
    (comparison,) = compare([RunData("a")])
    assert comparison.models[0].runs[0].seed is None
    assert comparison.data == "unnamed data"


def test_the_models_own_prediction_comes_first() -> None:
    order = ("model", "model+temperature", "mean", "mean+temperature", "ensemble", "zeta")
    (comparison,) = compare([synthetic_run(predictors=order[::-1])])
    assert comparison.predictors("clean") == list(order)


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


def basis(*items: int | None) -> OverSeeds:
    """A figure of runs on so many test items."""
    return of_sets(*((("test", count),) for count in items))


def of_sets(*runs: Sets) -> OverSeeds:
    return OverSeeds(dict.fromkeys(range(len(runs)), 0.5), dict(enumerate(runs)))


AB: Sets = (("ood/a", 10), ("ood/b", 10))
AC: Sets = (("ood/a", 10), ("ood/c", 10))


@pytest.mark.parametrize(
    ("bases", "places"),
    [
        ([], set()),
        ([None, None], set()),
        ([basis(5)], {0}),
        ([basis(5), None, basis(5)], {0, 2}),
        ([basis(31), basis(2000), basis(2000)], {1, 2}),
        ([basis(31), basis(31), basis(2000)], {0, 1}),  # most rows, not most items
        ([basis(31), basis(2000)], {1}),  # as many rows: most items
        ([basis(31), basis(31), basis(7), basis(9)], {0, 1}),
        ([basis(None), basis(None), basis(7)], {0, 1}),  # who does not say is like those who do not either
        ([basis(5, 7), basis(7, 5), basis(7)], {0, 1}),  # the order of runs is no difference
        ([of_sets(AB), of_sets(AC), of_sets(AB)], {0, 2}),  # other sets are not the same items
    ],
)
def test_the_largest_group(bases: list[OverSeeds | None], places: set[int]) -> None:
    assert compared(bases) == places


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (basis(31), "31 items"),
        (basis(2000, 31), "31 items or 2,000 items"),
        (basis(None), "unknown items"),
        (of_sets((("a", 500), ("b", 600))), "1,100 items of 2 sets"),
    ],
)
def test_in_words(given: OverSeeds, text: str) -> None:
    assert given.basis_text() == text


def test_where_items_are_told() -> None:
    curves = {
        "items": {"model": {"test": 7, "corrupted/mean": 8}},
        "reliability": {"mean": {"count": [1, 2]}},
    }
    clean, corrupted, ood = (
        SuiteResult(name, "run", "digits", 0, "cgp", 10, (), curves) for name in ("clean", "corrupted", "ood")
    )
    assert evaluated_items(clean, "test", "model", {"limit": 5}) == 7
    assert evaluated_items(corrupted, "corrupted/fog/3", "model", {"limit": 5}) == 8
    assert evaluated_items(clean, "test", "mean", {"limit": 5}) == 3
    assert evaluated_items(ood, "ood/a", "model", {"limit": 5}) == 5
    assert evaluated_items(ood, "ood/a", "model", {}) is None


# --- in a report --------------------------------------------------------------------------------------------


def judged(kind: str, items: Mapping[str, int], accuracy: float, **settings: Any) -> RunData:
    """A run whose test items are counted, and whose accuracy is known."""
    run = synthetic_run(
        kind, predictors=("model",), scores=("entropy",), suites=("clean", "corrupted", "ood")
    )
    suites = {}
    for name, suite in run.suites.items():
        records = tuple(
            replace(r, value=accuracy if (r.set, r.metric) == ("test", "accuracy") else r.value)
            for r in suite.records
        )
        environment = {**suite.environment, "settings": json.dumps(settings)}
        curves = {**suite.curves, "items": {"model": items}}
        suites[name] = replace(suite, records=records, environment=environment, curves=curves)
    return replace(run, suites=suites)


def rows(tree: Element) -> dict[str, list[Element]]:
    """Cells of the summary by model."""
    found = {}
    for row in tree.one("table", class_="key summary").one("tbody").children:
        name, *cells = row.children
        found[name.text.strip()] = cells
    return found


def bold(cell: Element) -> bool:
    return bool(cell.all("b"))


def test_a_model_on_fewer_items_is_not_the_best() -> None:
    all_items, few = {"test": 2000, "corrupted/mean": 2000}, {"test": 31, "corrupted/mean": 2000}
    runs = [judged("cgp", few, 0.99), judged("softmax", all_items, 0.8), judged("kernel", all_items, 0.7)]
    tree = read(build_report(runs))
    first = {name: cells[0] for name, cells in rows(tree).items()}
    assert {name: bold(cell) for name, cell in first.items()} == {
        "cgp": False, "softmax": True, "kernel": False,
    }  # fmt: skip
    assert re.search(r"99\.00 .*\(31 items\)", first["cgp"].text)
    assert "items" not in first["softmax"].text
    best = tree.one("ul", class_="tiles").children[0].text
    assert "Best accuracy" in best
    assert "softmax" in best
    assert OTHER_ITEMS.strip() in tree.one("section", id="summary").one("p", class_="advice").text
    same = read(build_report(runs[1:]))
    assert "items" not in same.one("table", class_="key summary").text
    assert OTHER_ITEMS.strip() not in same.one("section", id="summary").one("p", class_="advice").text


def test_nothing_is_best_of_one() -> None:
    runs = [judged("cgp", {"test": 31}, 0.99), judged("softmax", {"test": 2000}, 0.8)]
    tree = read(build_report(runs))
    first = {name: cells[0] for name, cells in rows(tree).items()}
    assert not any(bold(cell) for cell in first.values())
    assert re.search(r"99\.00 .*\(31 items\)", first["cgp"].text)
    tile = tree.one("ul", class_="tiles").children[0].text
    assert tile.startswith("Accuracy")
    assert "softmax" in tile


def cells_of_cgp(**changed: SuiteResult) -> list[Element]:
    """Of a report in which one of three runs has other suites."""
    runs = [judged(kind, {"test": 9}, 0.5, limit=9) for kind in ("cgp", "softmax", "kernel")]
    return rows(read(build_report([replace(runs[0], suites=runs[0].suites | changed), *runs[1:]])))["cgp"]


def test_a_mean_over_fewer_sets_or_items_is_another() -> None:
    suites = judged("cgp", {"test": 9}, 0.5, limit=9).suites
    few = {}
    for suite, left_out in (("corrupted", "corrupted/fog/"), ("ood", "ood/")):
        dropped = next(r.set for r in suites[suite].records if r.set.startswith(left_out))
        kept = tuple(r for r in suites[suite].records if r.set != dropped)
        few[suite] = replace(suites[suite], records=kept)
    marked = ["sets" in cell.text or "items" in cell.text for cell in cells_of_cgp(**few)]
    assert marked == [False] * 4 + [True] * 4
    reduced = tuple(
        replace(r, detail={**r.detail, UNSEEN: 4}) for r in suites["ood"].records
    )  # an ensemble's
    marked = ["items" in cell.text for cell in cells_of_cgp(ood=replace(suites["ood"], records=reduced))]
    assert marked == [False] * 7 + [True]


def test_settings_that_cannot_be_read_say_nothing() -> None:
    run = judged("cgp", {}, 0.5)
    for settings in ("{", "[]", None):
        suite = replace(run.suites["ood"], environment={"settings": settings})
        (only,) = group([replace(run, suites={"ood": suite})])
        found = Results.of([only]).find(only.name, "ood", "ood/near", "auroc")
        assert found is not None
        assert set(found.sets.values()) == {(("ood/near", None),)}
