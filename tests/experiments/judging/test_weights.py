"""Numbers belong to the weights that were read, and those who read them later compare."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.evaluation.records import read_suites, write_suite
from gpattention.experiments.judging import weights
from gpattention.experiments.judging.evaluating import evaluate_run
from gpattention.experiments.judging.one_run import Evaluation, Settings
from gpattention.experiments.predicting import fitted_temperature
from gpattention.experiments.reporting import read_runs
from gpattention.models import VisionTransformer
from gpattention.reports import build_report
from gpattention.reports.words import OTHER_WEIGHTS
from gpattention.studies.paper.table import read_groups
from tests.experiments.tiny_runs import train_digits

QUICK = {"samples": 0, "limit": 24, "device": "cpu", "predictors": ["model"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "run")


def go_on_training(run: Path, scale: float = 3.0) -> None:
    """Other weights in the place of those that are there, as a trainer saves them."""
    model = VisionTransformer.from_pretrained(run / "model")
    with torch.no_grad():
        model.head.weight *= scale
        model.head.bias *= scale
    model.save_pretrained(run / "model")


def test_the_temperature_of_other_weights_is_refused(run: Path) -> None:
    before = evaluate_run(run, ["clean", "selective"], **QUICK)["clean"]
    expected = next(r.detail["temperature"] for r in before.records if r.predictor == "model+temperature")
    assert fitted_temperature(run, samples=0) == expected
    go_on_training(run)
    with pytest.raises(ValueError, match=r"fitted to the weights in .*model, got that of other weights in .*"
                       r"\(clean, selective\): evaluate the run again"):  # fmt: skip
        fitted_temperature(run, samples=0)
    evaluate_run(run, ["selective"], **QUICK)  # `clean` still is that of the older weights
    assert fitted_temperature(run, samples=0) == pytest.approx(3 * expected, rel=1e-3)


def test_a_temperature_of_unknown_weights_is_refused(run: Path) -> None:
    found = evaluate_run(run, ["clean"], **QUICK)["clean"]
    for settings in ("{", "[]", "{}"):
        write_suite(run, replace(found, environment={"settings": settings}))
        with pytest.raises(ValueError, match="of other weights"):
            fitted_temperature(run, samples=0)


def test_a_report_says_which_numbers_are_of_other_weights(run: Path) -> None:
    evaluate_run(run, ["clean", "selective"], **QUICK)
    assert OTHER_WEIGHTS not in read_runs([run])[0].suites["clean"].notes
    go_on_training(run)
    evaluate_run(run, ["clean"], **QUICK)
    suites = read_runs([run])[0].suites
    assert OTHER_WEIGHTS not in suites["clean"].notes
    assert suites["selective"].notes[0] == OTHER_WEIGHTS
    (run / "model" / "model.safetensors").unlink()  # records alone, as `reproduce` keeps them
    assert OTHER_WEIGHTS not in read_runs([run])[0].suites["selective"].notes


def test_numbers_of_other_weights_say_so_wherever_they_stand(run: Path) -> None:
    told = f"ood: {OTHER_WEIGHTS}"
    evaluate_run(run, ["clean", "ood"], **QUICK)
    assert told not in build_report(read_runs([run]))
    go_on_training(run)
    evaluate_run(run, ["clean"], **QUICK)
    assert told in build_report(read_runs([run]))  # the summary has a column of them
    ((evaluated,),) = (group.runs for group in read_groups(run))
    assert {suite for suite, found in evaluated.suites.items() if OTHER_WEIGHTS in found.notes} == {"ood"}


def test_an_evaluation_says_that_training_goes_on(run: Path) -> None:
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text("".join(x for x in events.splitlines(True) if '"finished"' not in x))
    before = evaluate_run(run, ["clean"], **QUICK)["clean"]
    assert "reduced: training has come to epoch 2 of 2" in before.notes
    (run / "events.jsonl").write_text(events)  # whose weights are the same
    after = evaluate_run(run, ["clean"], **QUICK)["clean"]
    assert not any("training" in note for note in after.notes)
    assert after.records == before.records


def test_weights_saved_during_an_evaluation_are_not_those_of_its_numbers(run: Path) -> None:
    evaluation = Evaluation(run, Settings.of(["clean"], ["model"], samples=0, limit=24, device="cpu"))
    go_on_training(run)
    during = evaluation.suite("clean").value("test", "nll")
    later = evaluate_run(run, ["clean"], **QUICK)["clean"].value("test", "nll")
    fresh = evaluate_run(run, ["clean"], fresh=True, **QUICK)["clean"].value("test", "nll")
    assert later == fresh != during
    assert read_suites(run)["clean"].value("test", "nll") == fresh


def test_weights_saved_while_they_are_read_are_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened = weights.open_run, []

    def saved_meanwhile(folder: Path) -> object:
        opened.append(real(folder))
        if len(opened) <= times:
            go_on_training(folder)
        return opened[-1]

    monkeypatch.setattr(weights, "open_run", saved_meanwhile)
    times = 2
    found, digest = weights.open_with_digest(run)
    assert len(opened) == 3
    assert digest == weights.digest_of_weights(run)
    saved = VisionTransformer.from_pretrained(run / "model").head.weight
    assert found.model.head.weight.equal(saved)
    times = 99
    with pytest.raises(RuntimeError, match=r"the weights of .*run to stay while they are read, got others"):
        weights.open_with_digest(run)
