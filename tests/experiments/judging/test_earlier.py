"""A quick trial does not replace a complete evaluation of the same weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpattention.experiments.judging.evaluating import evaluate_run
from gpattention.experiments.predicting import fitted_temperature
from gpattention.experiments.runs import train_recipe
from tests.experiments.tiny_runs import digits_recipe

QUICK: dict[str, Any] = {"device": "cpu", "samples": 2, "limit": 20}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "cgp"
    train_recipe(digits_recipe(), folder)
    evaluate_run(folder, ["clean"], predictors=("model", "mean"), **QUICK)
    evaluate_run(folder, ["corrupted"], predictors=("model",), types=("fog", "contrast"), **QUICK)
    return folder


@pytest.fixture
def run(evaluated: Path, tmp_path: Path) -> Path:
    return shutil.copytree(evaluated, tmp_path / "cgp")


def predictors(result: Any) -> set[str]:
    return {record.predictor for record in result.records}


@pytest.mark.parametrize(
    ("suite", "less", "told"),
    [
        (
            "clean",
            {"limit": 10},
            r"clean\.json has .* more items \(limit: 20\), which limit 10 would replace",
        ),
        (
            "clean",
            {"limit": 10, "samples": 3},
            r"limit 10 would replace: evaluate as it was, or with --fresh",
        ),
        ("corrupted", {"types": ("fog",)}, r"\(types: fog,contrast\), which types fog would replace"),
        ("corrupted", {"severities": (1, 5)}, r"\(severities: all\), which severities 1,5 would replace"),
    ],
)
def test_fewer_items_are_refused_before_any_work(run: Path, suite: str, less: dict, told: str) -> None:
    file = run / "evaluation" / f"{suite}.json"
    before = file.read_bytes()
    given = {**QUICK, "predictors": ("model",), "types": ("fog", "contrast"), **less}
    with pytest.raises(ValueError, match=told):
        evaluate_run(run, [suite], **given)
    assert file.read_bytes() == before
    evaluate_run(run, [suite], **given, fresh=True)
    assert file.read_bytes() != before


def test_predictors_of_before_stay(run: Path) -> None:
    file = run / "evaluation" / "clean.json"
    before = file.read_bytes()
    assert "mean+temperature" in predictors(
        evaluate_run(run, ["clean"], predictors=("model",), **QUICK)["clean"]
    )
    assert file.read_bytes() == before  # finished: nothing is computed
    found = evaluate_run(run, ["clean"], predictors=("mc_dropout",), **QUICK)["clean"]
    assert {"model", "mean", "mc_dropout"} <= predictors(found)


def test_more_items_and_other_weights_replace(run: Path, tmp_path: Path) -> None:
    more = evaluate_run(run, ["clean"], predictors=("model",), **{**QUICK, "limit": 30})["clean"]
    assert "reduced: at most 30 items of each set" in more.notes
    train_recipe(digits_recipe(seed=3), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "model", run / "model", dirs_exist_ok=True)
    less = evaluate_run(run, ["clean"], predictors=("model",), **{**QUICK, "limit": 5})["clean"]
    assert "reduced: at most 5 items of each set" in less.notes


def test_the_mean_has_a_temperature_of_its_own(run: Path) -> None:
    found = evaluate_run(run, ["clean"], predictors=("model", "mean"), **QUICK)["clean"].records
    own = {r.predictor: r.detail["temperature"] for r in found if r.predictor.endswith("+temperature")}
    assert own["model+temperature"] != own["mean+temperature"]
    assert fitted_temperature(run) == own["model+temperature"]
    assert fitted_temperature(run, samples=0) == own["mean+temperature"]
