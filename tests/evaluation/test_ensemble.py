"""Several seeds: their ensemble, on items that no other member knows, and their means."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.data import load_digits
from gpattention.evaluation.run import FEWEST
from gpattention.metrics import nll
from gpattention.models import VisionTransformer
from gpattention.runs import read_results
from gpattention.runs.records import Record, SuiteResult, read_suites
from gpattention.training import train_recipe
from tests.evaluation.evaluating import copies, counted, evaluate_several
from tests.runs.tiny_runs import digits_recipe

LIMIT = 60  # of which two seeds leave enough validation items for thresholds, three do not
QUICK: dict[str, Any] = {"samples": 2, "limit": LIMIT, "device": "cpu", "predictors": ["model", "mean"]}
PREDICTIONS = ("clean", "ood", "selective")


@pytest.fixture(scope="module")
def runs(pristine: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return copies(pristine, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def two(runs: list[Path]) -> list[Path]:
    """Seeds and another recipe."""
    return [runs[0], runs[1], runs[3]]


@pytest.fixture(scope="module")
def found(two: list[Path]) -> dict:
    return evaluate_several(two, PREDICTIONS, **QUICK)


def left(part: str, *seeds: int) -> list[int]:
    """Places of the first of seed 0's items that the other seeds do not know."""
    known = set()
    for other in map(load_digits, seeds):
        known |= {x.numpy().tobytes() for x in other.train.images}
        if part == "test":
            known |= {x.numpy().tobytes() for x in other.validation.images}
    images = getattr(load_digits(0), part).images[:LIMIT]
    return [i for i, x in enumerate(images) if x.numpy().tobytes() not in known]


def of_ensemble(result: SuiteResult) -> list[Record]:
    return [record for record in result.records if record.predictor.startswith("ensemble")]


def test_an_ensemble_is_evaluated_on_items_that_the_other_does_not_know(two: list[Path], found: dict) -> None:
    """Neither by training nor by the choice of its weights and temperature."""
    first, second, unseen = load_digits(0), load_digits(1), left("test", 1)
    assert 0 < len(unseen) < LIMIT
    logits = [
        VisionTransformer.from_pretrained(run / "model")
        .predict(data.inputs(first.test.images[unseen]), samples=2, seed=0)
        .logits
        for run, data in ((two[0], first), (two[1], second))
    ]
    expected = nll(torch.cat(logits).double().softmax(-1).mean(0), first.test.labels[unseen])
    clean = found[two[0]]["clean"]
    assert clean.value("test", "nll", "ensemble") == pytest.approx(expected, abs=1e-6)
    assert any(f"{len(unseen)} of {LIMIT} test items" in note for note in clean.notes)


def test_an_ensemble_stands_beside_its_first_run(
    two: list[Path], found: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"validation": len(left("validation", 1)), "test": len(left("test", 1))}
    assert FEWEST <= counts["validation"] != counts["test"]
    for suite in PREDICTIONS:
        own = {record.predictor for record in found[two[0]][suite].records}
        assert {"ensemble", "ensemble+temperature", "model"} <= own
        assert not any(of_ensemble(found[other][suite]) for other in two[1:])
        for record in of_ensemble(found[two[0]][suite]):  # counts the items of its own set
            name = "validation" if record.set == "validation" else "test"
            unseen = {key: x for key, x in record.detail.items() if key.startswith("unseen")}
            assert unseen == {f"unseen_{name}_items": counts[name]}
    assert read_suites(two[0])["clean"].records == found[two[0]]["clean"].records
    assert "ensemble" in found[two[0]]["selective"].curves["risk_coverage"]
    seen = counted(monkeypatch)
    again = evaluate_several(two, PREDICTIONS, **QUICK)  # which predicts nothing
    assert seen == []
    assert again[two[0]]["ood"].records == found[two[0]]["ood"].records


def test_means_over_seeds(two: list[Path], found: dict) -> None:
    results = read_results(two)
    figure, single = (results.find(recipe, "clean", "test", "nll") for recipe in ("tiny", "plain"))
    assert figure is not None
    values = [found[run]["clean"].value("test", "nll") for run in two[:2]]
    assert figure.values == dict(enumerate(values))
    assert (figure.mean, figure.deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert single is not None
    assert single.error is None
    table = results.summary()
    tiny = table[table.recipe == "tiny"]
    hot = tiny[(tiny.set == "test") & (tiny.metric == "ece") & (tiny.predictor == "model+temperature")]
    assert len(hot[hot.suite == "clean"]) == 1  # temperatures of seeds differ, and are still one row


def test_a_progress_with_names(two: list[Path], tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    run = copies(two[:1], tmp_path)
    evaluate_several(run, ["selective"], progress=lambda *x: steps.append(x), fresh=True, **QUICK)
    assert {what for what, _, _ in steps} == {"cgp0 selective"}


@pytest.fixture(scope="module")
def after_two(
    runs: list[Path], found: dict, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, SuiteResult]:
    """Three seeds, where two of them were an ensemble before."""
    three = copies(runs[:3], tmp_path_factory.mktemp("three"))
    return evaluate_several(three, PREDICTIONS, **QUICK)[three[0]]


def test_what_needs_validation_items_is_left_out_where_they_are_few(after_two: dict) -> None:
    held_out, tested = len(left("validation", 1, 2)), len(left("test", 1, 2))
    assert 0 < held_out < FEWEST
    reason = f"{held_out} of {LIMIT} validation items, those that no other member was trained on; at least"
    on_test = f"ensemble of 3 runs: {tested} of {LIMIT} test items, those that no other member was trained or"
    for suite in PREDICTIONS:
        notes = "\n".join(after_two[suite].notes)
        assert f"ensemble of 3 runs: {reason}" in notes
        assert on_test in notes
        assert "2 runs" not in notes  # nothing of an earlier ensemble stays
    of_clean = of_ensemble(after_two["clean"])
    assert {(record.set, record.detail["unseen_test_items"]) for record in of_clean} == {("test", tested)}
    scores = {record.detail["score"] for record in of_ensemble(after_two["ood"])}
    assert scores == {"max_softmax", "entropy", "energy", "gen", "mutual_information"}
    assert not of_ensemble(after_two["selective"])
    curves = after_two["selective"].curves["risk_coverage"]
    assert "ensemble" not in curves
    assert "model" in curves
    assert set(after_two["clean"].curves["items"]["ensemble"]) == {"test"}


def test_an_ensemble_by_another_rule_is_evaluated_again(two: list[Path], found: dict, tmp_path: Path) -> None:
    """As older versions named its members alone."""
    pair = copies(two[:2], tmp_path)
    file = pair[0] / "evaluation" / "clean.json"
    plain = json.loads(file.read_text())
    plain["environment"]["ensemble"] = json.dumps(json.loads(plain["environment"]["ensemble"])["members"])
    plain["notes"] += ["no ensemble: its members were trained on all of the first run's items"]
    plain["records"] = [r for r in plain["records"] if not r["predictor"].startswith("ensemble")]
    file.write_text(json.dumps(plain))
    again = evaluate_several(pair, ["clean"], **QUICK)[pair[0]]["clean"]
    assert again.records == found[two[0]]["clean"].records
    assert again.notes == found[two[0]]["clean"].notes


def test_members_that_know_everything(runs: list[Path], tmp_path: Path) -> None:
    """Here the only test item that the limit leaves."""
    seed = next(seed for seed in range(1, 20) if 0 not in left("test", seed))
    train_recipe(digits_recipe(name=f"tiny-seed{seed}", seed=seed), tmp_path / "knows")
    pair = [*copies(runs[:1], tmp_path), tmp_path / "knows"]
    few = {"predictors": ["model"], "samples": 0, "limit": 1, "fresh": True}
    found = evaluate_several(pair, ["clean", "ood"], device="cpu", **few)
    known = "0 of 1 test items, those that no other member was trained or validated on"
    for result in found[pair[0]].values():
        assert f"ensemble of 2 runs: {known}" in result.notes
        assert not of_ensemble(result)


def test_one_split_for_all_seeds(tmp_path: Path) -> None:
    """Then no item is known to another member; each item's values, limits and corruptions as other kinds."""
    runs = []
    for seed in (0, 1):
        recipe = digits_recipe(name=f"tiny-seed{seed}", seed=seed).replace({"data.options.split_seed": 5})
        runs.append(train_recipe(recipe, tmp_path / f"tiny-seed{seed}").folder)
    more = {"corruptions": ["fog", "contrast"], "severities": [5], "corrupted_limit": 30}
    suites = evaluate_several(
        runs, ("clean", "corrupted", "ood"), **{**QUICK, "predictors": ["model"]}, **more,
        held_corruptions=["contrast"],
    )[runs[0]]  # fmt: skip
    for name, place, items in (("clean", "test", LIMIT), ("corrupted", "corrupted/mean", 30)):
        suite = suites[name]
        assert not any("unseen" in note for note in suite.notes)
        assert not any(key.startswith("unseen") for record in of_ensemble(suite) for key in record.detail)
        assert set(suite.curves["by_item"]) == {record.predictor for record in of_ensemble(suite)}
        for label, by_set in suite.curves["by_item"].items():
            for metric in ("accuracy", "nll"):
                each = by_set[place][metric]
                assert len(each) == items == suite.curves["items"][label][place]
                assert np.mean(each) == pytest.approx(suite.value(place, metric, label), abs=1e-9)
    assert suites["clean"].value("validation", "nll", "ensemble") is not None
    assert f"reduced: at most {LIMIT} items of each set" in suites["clean"].notes
    assert "reduced: at most 30 items of each set" in suites["corrupted"].notes
    assert "ood/contrast-5" in {record.set for record in suites["ood"].records}
