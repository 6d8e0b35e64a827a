"""Figures are compared where they are of as many items of the same sets, and say so where they are not."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpattention.evaluation.records import SuiteResult
from gpattention.experiments.judging.ensembles import REDUCED
from gpattention.reports import build_report
from gpattention.reports.sections.summary import OTHER_ITEMS
from gpattention.runs import OverSeeds, Results, RunData, compared, group
from gpattention.runs.results import UNSEEN, Sets, judged_items
from tests.reports.reading import Element, read
from tests.reports.synthetic import synthetic_run


def basis(*items: int | None) -> OverSeeds:
    """A figure of runs on so many test items."""
    return of_sets(*((("test", count),) for count in items))


def of_sets(*runs: Sets) -> OverSeeds:
    return OverSeeds(dict.fromkeys(range(len(runs)), 0.5), dict(enumerate(runs)))


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
    ],
)
def test_the_largest_group(bases: list[OverSeeds | None], places: set[int]) -> None:
    assert compared(bases) == places


def test_other_sets_are_not_the_same_items() -> None:
    one: Sets = (("ood/a", 10), ("ood/b", 10))
    other: Sets = (("ood/a", 10), ("ood/c", 10))
    assert compared([of_sets(one), of_sets(other), of_sets(one)]) == {0, 2}


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
    assert given.basis.text() == text


def test_where_items_are_told() -> None:
    curves = {
        "items": {"model": {"test": 7, "corrupted/mean": 8}},
        "reliability": {"mean": {"count": [1, 2]}},
    }
    clean, corrupted, ood = (
        SuiteResult(name, "run", "digits", 0, "cgp", 10, (), curves) for name in ("clean", "corrupted", "ood")
    )
    assert judged_items(clean, "test", "model", {"limit": 5}) == 7
    assert judged_items(corrupted, "corrupted/fog/3", "model", {"limit": 5}) == 8
    assert judged_items(clean, "test", "mean", {"limit": 5}) == 3
    assert judged_items(ood, "ood/a", "model", {"limit": 5}) == 5
    assert judged_items(ood, "ood/a", "model", {}) is None


def test_an_ensembles_detail_has_one_name() -> None:
    assert UNSEEN == REDUCED


# -- in a report


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
    assert first["cgp"].text.split() == ["0.990", "(31", "items)"]
    assert "items" not in first["softmax"].text
    best = tree.one("ul", class_="tiles").children[0].text
    assert "Best accuracy" in best
    assert "softmax" in best
    assert OTHER_ITEMS.strip() in tree.one("p", class_="advice").text
    same = read(build_report(runs[1:]))
    assert "items" not in same.one("table", class_="key summary").text
    assert OTHER_ITEMS.strip() not in same.one("p", class_="advice").text


def test_nothing_is_best_of_one() -> None:
    runs = [judged("cgp", {"test": 31}, 0.99), judged("softmax", {"test": 2000}, 0.8)]
    tree = read(build_report(runs))
    first = {name: cells[0] for name, cells in rows(tree).items()}
    assert not any(bold(cell) for cell in first.values())
    assert first["cgp"].text.split() == ["0.990", "(31", "items)"]
    tile = tree.one("ul", class_="tiles").children[0].text
    assert tile.startswith("Accuracy")
    assert "softmax" in tile


def test_a_mean_over_fewer_corruptions_or_sets_is_another() -> None:
    runs = [judged(kind, {"test": 9}, 0.5, limit=9) for kind in ("cgp", "softmax", "kernel")]
    few = dict(runs[0].suites)
    for suite, left_out in (("corrupted", "corrupted/fog/"), ("ood", "ood/")):
        dropped = next(r.set for r in few[suite].records if r.set.startswith(left_out))
        kept = tuple(r for r in few[suite].records if r.set != dropped)
        few[suite] = replace(few[suite], records=kept)
    cells = rows(read(build_report([replace(runs[0], suites=few), *runs[1:]])))["cgp"]
    assert [("sets" in cell.text or "items" in cell.text) for cell in cells] == [False] * 4 + [True] * 4


def test_an_ensemble_that_leaves_test_items_out() -> None:
    runs = [judged(kind, {"test": 9}, 0.5, limit=9) for kind in ("cgp", "softmax", "kernel")]
    ood = runs[0].suites["ood"]
    reduced = tuple(replace(r, detail={**r.detail, UNSEEN: 4}) for r in ood.records)
    few = {**runs[0].suites, "ood": replace(ood, records=reduced)}
    cells = rows(read(build_report([replace(runs[0], suites=few), *runs[1:]])))["cgp"]
    assert ["items" in cell.text for cell in cells] == [False] * 7 + [True]


def test_settings_that_cannot_be_read_say_nothing() -> None:
    run = judged("cgp", {}, 0.5)
    for settings in ("{", "[]", None):
        suite = replace(run.suites["ood"], environment={"settings": settings})
        (only,) = group([replace(run, suites={"ood": suite})])
        found = Results.of([only]).find(only.name, "ood", "ood/near", "auroc")
        assert found is not None
        assert set(found.sets.values()) == {(("ood/near", None),)}
