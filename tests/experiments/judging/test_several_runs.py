"""Several seeds: their ensemble, on items that no other member knows, and their means."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load_digits
from gpattention.evaluation.records import Record, SuiteResult, read_suites
from gpattention.experiments import read_results, train_recipe
from gpattention.experiments.judging.ensembles import FEWEST
from gpattention.experiments.judging.evaluating import evaluate_runs
from gpattention.metrics import nll
from gpattention.models import VisionTransformer
from tests.experiments.judging.counting import counted
from tests.experiments.tiny_runs import digits_recipe

LIMIT = 60  # of which two seeds leave enough validation items for thresholds, three do not
QUICK = {"samples": 2, "limit": LIMIT, "device": "cpu"}
PREDICTIONS = ("clean", "ood", "selective")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same recipe with three seeds, and another one."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        train_recipe(digits_recipe(name=f"tiny-seed{seed}", seed=seed), folder / f"cgp{seed}")
    train_recipe(digits_recipe("softmax", name="plain"), folder / "softmax")
    return [folder / "cgp0", folder / "cgp1", folder / "cgp2", folder / "softmax"]


@pytest.fixture(scope="module")
def two(runs: list[Path]) -> list[Path]:
    """Seeds and another recipe."""
    return [runs[0], runs[1], runs[3]]


@pytest.fixture(scope="module")
def found(two: list[Path]) -> dict:
    return evaluate_runs(two, PREDICTIONS, predictors=["model", "mean"], **QUICK)


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


class TestTwoSeeds:
    def test_the_ensemble_is_judged_on_items_that_the_other_does_not_know(
        self, two: list[Path], found: dict
    ) -> None:
        """Neither by training nor by the choice of its weights and temperature."""
        first, second = load_digits(0), load_digits(1)
        unseen = left("test", 1)
        assert 0 < len(unseen) < LIMIT
        logits = [
            VisionTransformer.from_pretrained(run / "model")
            .predict(data.inputs(first.test.images[unseen]), samples=2, seed=0)
            .logits
            for run, data in ((two[0], first), (two[1], second))
        ]
        probs = torch.cat(logits).double().softmax(-1).mean(0)
        expected = nll(probs, first.test.labels[unseen])
        clean = found[two[0]]["clean"]
        assert clean.value("test", "nll", "ensemble") == pytest.approx(expected, abs=1e-6)
        assert any(f"{len(unseen)} of {LIMIT} test items" in note for note in clean.notes)

    def test_every_record_counts_the_items_of_its_own_set(self, two: list[Path], found: dict) -> None:
        counts = {"validation": len(left("validation", 1)), "test": len(left("test", 1))}
        assert FEWEST <= counts["validation"] != counts["test"]
        for suite in PREDICTIONS:
            for record in of_ensemble(found[two[0]][suite]):
                name = "validation" if record.set == "validation" else "test"
                told = {key: x for key, x in record.detail.items() if key.startswith("unseen")}
                assert told == {f"unseen_{name}_items": counts[name]}

    def test_it_stands_beside_the_first_run(self, two: list[Path], found: dict) -> None:
        for suite in PREDICTIONS:
            own = {r.predictor for r in found[two[0]][suite].records}
            assert {"ensemble", "ensemble+temperature", "model"} <= own
            for other in two[1:]:
                assert not of_ensemble(found[other][suite])
        assert read_suites(two[0])["clean"].records == found[two[0]]["clean"].records
        assert "ensemble" in found[two[0]]["selective"].curves["risk_coverage"]

    def test_again_without_predicting(
        self, two: list[Path], found: dict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = counted(monkeypatch)
        again = evaluate_runs(two, PREDICTIONS, predictors=["model", "mean"], **QUICK)
        assert seen == []
        assert again[two[0]]["ood"].records == found[two[0]]["ood"].records

    def test_means_over_seeds(self, two: list[Path], found: dict) -> None:
        results = read_results(two)
        figure = results.find("tiny", "clean", "test", "nll")
        assert figure is not None
        values = [found[run]["clean"].value("test", "nll") for run in two[:2]]
        assert figure.values == dict(enumerate(values))
        assert (figure.mean, figure.deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
        single = results.find("plain", "clean", "test", "nll")
        assert single is not None
        assert single.error is None
        near = [
            what for what, _ in results.figures()
            if (what["recipe"], what["set"], what["metric"], what["predictor"])
            == ("tiny", "ood/near", "auroc", "model")
        ]  # fmt: skip
        assert len({what["score"] for what in near}) == len(near) == 7
        table = results.summary()
        hot = table[
            (table.set == "test") & (table.metric == "ece") & (table.recipe == "tiny")
            & (table.predictor == "model+temperature") & (table.suite == "clean")
        ]  # fmt: skip
        assert len(hot) == 1  # temperatures of seeds differ, and are still one row

    def test_a_progress_with_names(self, two: list[Path], found: dict, tmp_path: Path) -> None:
        told = []
        run = shutil.copytree(two[0], tmp_path / "cgp0")
        evaluate_runs([run], ["selective"], progress=lambda *x: told.append(x), fresh=True, **QUICK)
        assert {what for what, _, _ in told} == {"cgp0 selective"}


@pytest.fixture(scope="module")
def after_two(
    runs: list[Path], found: dict, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, SuiteResult]:
    """Three seeds, where two of them were an ensemble before."""
    folder = tmp_path_factory.mktemp("three")
    three = [shutil.copytree(run, folder / run.name) for run in runs[:3]]
    evaluated = evaluate_runs(three, PREDICTIONS, predictors=["model", "mean"], **QUICK)
    return evaluated[three[0]]


class TestThreeSeeds:
    """Too few validation items are left for thresholds and templates, but test items are."""

    def test_what_needs_validation_items_is_left_out_for_that_reason(self, after_two: dict) -> None:
        held_out, tested = len(left("validation", 1, 2)), len(left("test", 1, 2))
        assert 0 < held_out < FEWEST
        assert tested > 0
        reason = (
            f"{held_out} of {LIMIT} validation items, those that no other member was trained on; at least "
            f"{FEWEST} are needed"
        )
        on_test = (
            f"ensemble of 3 runs: {tested} of {LIMIT} test items, those that no other member was trained or "
            "validated on"
        )
        lacking = {
            "clean": "not judged on validation",
            "ood": "no scores by templates of validation items",
            "selective": "left out, its thresholds come from validation items",
        }
        for suite, told in lacking.items():
            assert f"ensemble of 3 runs: {told}: {reason}" in after_two[suite].notes
            assert on_test in after_two[suite].notes
        assert {record.set for record in of_ensemble(after_two["clean"])} == {"test"}
        scores = {record.detail["score"] for record in of_ensemble(after_two["ood"])}
        assert scores == {"max_softmax", "entropy", "energy", "mutual_information"}
        assert not of_ensemble(after_two["selective"])

    def test_nothing_of_an_earlier_ensemble_stays(self, after_two: dict) -> None:
        for result in after_two.values():
            assert not any("2 runs" in note for note in result.notes)
        assert "ensemble" not in after_two["selective"].curves["risk_coverage"]
        assert "model" in after_two["selective"].curves["risk_coverage"]
        assert set(after_two["clean"].curves["items"]["ensemble"]) == {"test"}
        assert {record.detail["unseen_test_items"] for record in of_ensemble(after_two["clean"])} == {
            len(left("test", 1, 2))
        }


def test_an_ensemble_by_another_rule_is_judged_again(two: list[Path], found: dict, tmp_path: Path) -> None:
    """As older versions named its members alone."""
    pair = [shutil.copytree(run, tmp_path / run.name) for run in two[:2]]
    file = pair[0] / "evaluation" / "clean.json"
    plain = json.loads(file.read_text())
    plain["environment"]["ensemble"] = json.dumps(json.loads(plain["environment"]["ensemble"])["members"])
    plain["notes"] += ["no ensemble: its members were trained on all of the first run's items"]
    plain["records"] = [r for r in plain["records"] if not r["predictor"].startswith("ensemble")]
    file.write_text(json.dumps(plain))
    again = evaluate_runs(pair, ["clean"], predictors=["model", "mean"], **QUICK)[pair[0]]["clean"]
    assert again.records == found[two[0]]["clean"].records
    assert again.notes == found[two[0]]["clean"].notes


def test_members_that_know_everything(runs: list[Path], tmp_path: Path) -> None:
    """Here the only test item that the limit leaves."""
    seed = next(seed for seed in range(1, 20) if 0 not in left("test", seed))
    train_recipe(digits_recipe(name=f"tiny-seed{seed}", seed=seed), tmp_path / "knows")
    pair = [shutil.copytree(runs[0], tmp_path / "cgp0"), tmp_path / "knows"]
    few = {"predictors": ["model"], "samples": 0, "limit": 1, "fresh": True}
    found = evaluate_runs(pair, ["clean", "ood"], device="cpu", **few)
    known = "0 of 1 test items, those that no other member was trained or validated on"
    for suite, told in (("clean", "not judged on test"), ("ood", "left out")):
        result = found[pair[0]][suite]
        assert f"ensemble of 2 runs: {told}: {known}" in result.notes
        assert "test" not in {record.set for record in of_ensemble(result)}
    assert not of_ensemble(found[pair[0]]["ood"])
