"""Evaluation of whole runs: records, resumption, refusals, other weights, other data."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, ks_2samp

from gpattention.data import load_digits
from gpattention.data.corruptions import CORRUPTIONS, corrupt
from gpattention.data.shifts import SEVERITIES as SHIFT_SEVERITIES
from gpattention.data.shifts import shift, shifts_of
from gpattention.evaluation import SCORES, AdaptiveTemperature, Strangeness
from gpattention.evaluation import corrupted as corrupted_source
from gpattention.evaluation import run as one_run
from gpattention.evaluation.last_layers import GPLastLayer
from gpattention.evaluation.predict import fitted_temperature
from gpattention.evaluation.predictions import DamagedPredictionError, ItemSet, RawPrediction
from gpattention.evaluation.predictors import fit_temperature
from gpattention.evaluation.run import Evaluation, EvaluationSettings
from gpattention.evaluation.sets import RunSets
from gpattention.evaluation.suites import SUITES
from gpattention.metrics import accuracy, auroc, ece, nll
from gpattention.models import VisionTransformer
from gpattention.reports import build_report
from gpattention.runs import OTHER_WEIGHTS, read_runs
from gpattention.runs.records import SuiteResult, read_suites, write_suite
from gpattention.studies.paper import read_groups
from tests.data import official
from tests.evaluation.evaluating import copies, counted, evaluate, evaluate_several, train_on

QUICK: dict[str, Any] = {"samples": 2, "limit": 24, "device": "cpu"}
TYPES, SEVERITIES = ("gaussian_noise", "fog", "contrast", "saturate"), (1, 5)


@pytest.fixture(scope="module")
def runs(pristine: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same recipe with two seeds, and another one."""
    return copies([*pristine[:2], pristine[3]], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module", autouse=True)
def few_corruptions() -> Iterator[None]:
    """Of the 95."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrupted_source, "CORRUPTIONS", {name: CORRUPTIONS[name] for name in TYPES})
        patch.setattr(corrupted_source, "SEVERITIES", SEVERITIES)
        yield


@pytest.fixture(scope="module")
def everything(runs: list[Path]) -> dict[str, SuiteResult]:
    return evaluate(runs[0], **QUICK)


def records_of(found: dict[str, SuiteResult]) -> dict[str, tuple]:
    return {name: result.records for name, result in found.items()}


def predictors(result: SuiteResult) -> set[str]:
    return {record.predictor for record in result.records}


def heat(result: SuiteResult) -> dict[str, float]:
    """Temperatures by predictor."""
    return {r.predictor: r.detail["temperature"] for r in result.records if "temperature" in r.detail}


def test_all_suites_are_written_as_returned(runs: list[Path], everything: dict) -> None:
    assert tuple(everything) == tuple(name for name, suite in SUITES.items() if suite.usual)
    assert records_of(read_suites(runs[0])) == records_of(everything)
    for name in everything:
        assert "NaN" not in (runs[0] / "evaluation" / f"{name}.json").read_text()


def test_numbers_are_those_of_the_model(runs: list[Path], everything: dict) -> None:
    data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")
    images, labels = data.test.images[:24], data.test.labels[:24]
    clean, corrupted = everything["clean"], everything["corrupted"]
    drawn = model.predict(data.inputs(images), samples=2, seed=0)
    for metric, function in (("accuracy", accuracy), ("nll", nll), ("ece", ece)):
        assert clean.value("test", metric) == pytest.approx(function(drawn.probs, labels), abs=1e-6)
    mean = model.predict(data.inputs(images), samples=0)
    assert clean.value("test", "nll", "mean") == pytest.approx(nll(mean.probs, labels), abs=1e-6)
    coloured = corrupt(images.expand(-1, 3, -1, -1), "contrast", 5)
    grey = coloured.float().mean(1, keepdim=True).round().to(torch.uint8)
    expected = nll(model.predict(data.inputs(grey), samples=2, seed=0).probs, labels)
    assert corrupted.value("corrupted/contrast/5", "nll") == pytest.approx(expected, abs=1e-6)
    types = {record.set.split("/")[1] for record in corrupted.records if record.set.count("/") == 2}
    assert types == set(TYPES)
    noise = [corrupted.value(f"corrupted/gaussian_noise/{s}", "nll") for s in SEVERITIES]
    assert corrupted.value("corrupted/noise", "nll") == pytest.approx(np.mean(noise))
    assert all("regenerated" in note or "reduced" in note for note in corrupted.notes[:2])


def test_what_else_is_recorded(everything: dict) -> None:
    names = {"model", "mean", "mc_dropout"}
    for suite in ("clean", "corrupted", "ood", "selective"):
        assert predictors(everything[suite]) == names | {f"{name}+temperature" for name in names}
    clean, corrupted, ood = (everything[name] for name in ("clean", "corrupted", "ood"))
    assert (clean.run, clean.data, clean.seed, clean.attention) == ("tiny-seed0", "digits", 0, "cgp")
    assert set(clean.curves) == {"reliability", "gallery", "health", "items"}
    assert clean.curves["items"]["model+temperature"] == {"validation": 24, "test": 24}
    assert len(clean.curves["gallery"]["most_certain"][0]["token_variance"]) == 16
    assert "reduced: at most 24 items of each set" in clean.notes
    assert json.loads(clean.environment["settings"])["samples"] == 2
    assert corrupted.curves["items"]["mean"] == {"corrupted/mean": 24}
    sets = {r.set for r in corrupted.records if r.set.count("/") == 2}
    assert sum(corrupted.curves["reliability"]["mean"]["count"]) == 24 * len(sets)
    sets = {f"ood/{name}" for name in ("near", "noise", "patterns", "inverted", "shuffled")}
    assert {record.set for record in ood.records} == set(ood.curves["roc"]) == sets
    assert 0 <= ood.value("ood/near", "auroc", score="gp_variance") <= 1
    assert ood.curves["items"]["model"]["ood/near"] == 24
    assert everything["efficiency"].records[0].detail["tokens"] == 16
    assert len(everything["oversmoothing"].curves["similarity"]["block"]) == 1


def test_what_strangeness_tells_from_test_items(runs: list[Path], everything: dict) -> None:
    data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")
    noise = data.ood["noise"].images
    spread = noise[torch.arange(24) * len(noise) // 24]
    inside, test, outside = (
        model.signals(data.inputs(images))
        for images in (data.validation.images[:24], data.test.images[:24], spread)
    )
    fitted = Strangeness.fit(inside, data.validation.labels[:24])
    ood = everything["ood"]
    expected = auroc(fitted.score(test), fitted.score(outside))
    assert ood.value("ood/noise", "auroc", score="strangeness") == pytest.approx(expected)
    scores = {r.detail["score"] for r in ood.records if r.predictor == "model"}
    assert scores == set(SCORES)
    others = {r.detail["score"] for r in ood.records if r.predictor != "model"}
    assert not others & {"strangeness", "mahalanobis", "variance_density"}  # they are the model's


def test_flags_of_images_that_chose_nothing(runs: list[Path]) -> None:
    """Half of the test images of a trained model to fit to: the others are as usual as these."""
    data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")
    images = data.test.images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    half, rest = order.tensor_split(2)
    signals = model.signals(data.inputs(images))
    fitted, new = Strangeness.fit(signals[half], data.test.labels[half]), signals[rest]
    n, m = len(fitted.calibration), len(rest)
    assert ks_2samp(fitted.calibration.numpy(), fitted.score(new).numpy()).pvalue > 0.001
    for rate in (0.05, 0.2):
        most = int(rate * (n + 1))
        low, high = betabinom(m, most, n + 1 - most).interval(0.999)
        assert low <= int(fitted.flag(new, rate).sum()) <= high
    assert int(fitted.flag(model.signals(data.inputs(data.ood["noise"].images)), 0.05).sum()) > high


def test_a_temperature_by_strangeness(runs: list[Path], tmp_path: Path) -> None:
    pair = copies(runs[:2], tmp_path)
    quick = {**QUICK, "predictors": ["model"]}
    evaluated = evaluate_several(pair, ["clean"], adaptive_temperature=True, fresh=True, **quick)
    found = evaluated[pair[0]]["clean"]
    names = {"model", "ensemble"}
    suffixes = ("", "+temperature", "+adaptive_temperature")
    assert predictors(found) == {f"{name}{after}" for name in names for after in suffixes}
    data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")

    def items(images: torch.Tensor, labels: torch.Tensor) -> Any:
        inputs = data.inputs(images)
        return model.predict(inputs, samples=2, seed=0).logits, model.signals(inputs), labels

    images, labels = data.validation.images[:24], data.validation.labels[:24]
    every = [shift(images, name, s) for name in shifts_of(1) for s in SHIFT_SEVERITIES]
    logits, signals, repeated = items(torch.cat(every), labels.repeat(len(every)))
    each = 24 * len(SHIFT_SEVERITIES)
    shifted = {
        name: (logits[:, i * each :][:, :each], signals[i * each :][:each], repeated[:each])
        for i, name in enumerate(shifts_of(1))
    }
    fitted = AdaptiveTemperature.fit(*items(images, labels), shifted=shifted)
    logits, signals, labels = items(data.test.images[:24], data.test.labels[:24])
    heats = fitted.temperature(logits, signals)
    probs = (logits.double() / heats[:, None]).softmax(-1).mean(0)
    assert found.value("test", "nll", "model+adaptive_temperature") == pytest.approx(
        nll(probs, labels), rel=1e-4
    )
    (detail,) = {
        r.detail["temperature"]
        for r in found.records
        if (r.set, r.predictor, r.metric) == ("test", "model+adaptive_temperature", "nll")
    }
    assert detail == pytest.approx(float(heats.log().mean().exp()), rel=1e-4)
    assert evaluate(pair[0], ["clean"], **quick)["clean"].records == found.records  # what is there stays


def test_a_temperature_fitted_under_shift(runs: list[Path], everything: dict, tmp_path: Path) -> None:
    pair = copies(runs[:2], tmp_path)
    evaluated = evaluate_several(pair, ["clean", "corrupted"], shift_temperature=True, **QUICK)
    found = evaluated[pair[0]]["clean"]
    data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")
    images, labels = data.validation.images[:24], data.validation.labels[:24]
    shifted = [shift(images, name, s) for name in shifts_of(1) for s in SHIFT_SEVERITIES]
    logits = model.predict(data.inputs(torch.cat(shifted)), samples=2, seed=0).logits
    expected = fit_temperature(logits, labels.repeat(len(shifted)))
    assert heat(found)["model+shift_temperature"] == pytest.approx(expected, rel=1e-4)
    assert heat(found)["model+shift_temperature"] != heat(found)["model+temperature"]
    names = {"model", "mean", "mc_dropout", "ensemble"}
    three = {f"{name}{after}" for name in names for after in ("", "+temperature", "+shift_temperature")}
    assert predictors(found) == predictors(evaluated[pair[0]]["corrupted"]) == three
    # what was there is the same, and comes back alone only anew
    for record in everything["clean"].records:
        again = found.value(record.set, record.metric, record.predictor)
        assert again == pytest.approx(record.value, abs=1e-7)
    assert evaluate(pair[0], ["clean"], **QUICK)["clean"].records == found.records
    again = evaluate(pair[0], ["clean"], **QUICK, fresh=True)["clean"]
    assert again.records == everything["clean"].records


def test_predictors_of_a_model_that_does_not_draw(runs: list[Path]) -> None:
    found = evaluate(runs[2], ["clean"], **QUICK)["clean"]
    assert predictors(found) == {"model", "model+temperature", "mc_dropout", "mc_dropout+temperature"}
    assert any("mean is left out" in note for note in found.notes)
    found = evaluate(runs[2], ["selective"], predictors=["laplace"], **QUICK)["selective"]
    assert predictors(found) == {"laplace", "laplace+temperature"}


def test_a_run_without_preprocessing_is_still_evaluated(tmp_path: Path, pristine: list[Path]) -> None:
    """As those of older versions, and of `fit` called by itself."""
    (before,), (run,) = copies(pristine[:1], tmp_path / "before"), copies(pristine[:1], tmp_path)
    shutil.rmtree(run / "preprocessing")
    few = {"predictors": ["mean"], "limit": 5, "device": "cpu"}
    expected, found = (evaluate(each, ["clean"], **few)["clean"] for each in (before, run))
    assert found.value("test", "nll", "mean") == expected.value("test", "nll", "mean") > 0
    assert "gallery" not in found.curves  # it shows the model's own prediction


# Resumption


@pytest.fixture
def copy(runs: list[Path], everything: dict, tmp_path: Path) -> Path:
    """An evaluated run that a test may spoil."""
    return copies(runs[:1], tmp_path)[0]


def test_finished_suites_are_read(copy: Path, everything: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    assert records_of(evaluate(copy, **QUICK)) == records_of(everything)
    assert seen == []
    found = evaluate(copy, ["clean"], predictors=["model"], samples=3, limit=24, device="cpu")["clean"]
    assert sorted(seen) == ["test", "validation"]  # other settings are other results
    assert found.samples == 3
    assert found.value("test", "nll") != everything["clean"].value("test", "nll")


def test_a_stopped_suite_goes_on_where_it_stopped(
    copy: Path, everything: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "evaluation" / "corrupted.json").unlink()
    kept = copy / "evaluation" / "predictions" / "model" / "corrupted"
    (kept / "fog" / "1.safetensors").unlink()
    # grey images have no colours to take away: that set is the test set and has no file of its own
    files = {f"corrupted/{c}/{s}": kept / c / f"{s}.safetensors" for c in TYPES for s in SEVERITIES}
    missing = {name for name, file in files.items() if not file.exists()}
    assert missing == {"corrupted/fog/1", "corrupted/saturate/1"}
    seen, steps = counted(monkeypatch), []
    found = evaluate(copy, ["corrupted"], progress=lambda *x: steps.append(x), **QUICK)
    assert set(seen) == missing
    assert found["corrupted"].records == everything["corrupted"].records
    assert steps[-1] == ("corrupted", 24_000, 24_000)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


def test_damage_is_refused_and_fresh_repairs(copy: Path, everything: dict) -> None:
    written = copy / "evaluation" / "clean.json"
    for damaged in ("{", "[]", '{"format": "gpattention-evaluation-1"}', written.read_text()[:-9]):
        written.write_text(damaged)
        with pytest.raises(ValueError, match=rf"{re.escape(str(written))} .* --fresh \(fresh=True\)"):
            evaluate(copy, ["clean"], **QUICK)
        assert written.read_text() == damaged
    written.unlink()  # only what is missing is computed
    file = copy / "evaluation" / "predictions" / "model" / "test.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedPredictionError, match="fresh=True"):
        evaluate(copy, ["clean"], **QUICK)
    found = evaluate(copy, ["clean"], fresh=True, **QUICK)
    assert found["clean"].records == everything["clean"].records


@pytest.mark.parametrize(("changes", "message"), [
    ({"suites": ["dirty"]}, "suites to be among clean.*'dirty'"),
    ({"suites": []}, "at least one of suites"),
    ({"predictors": ["oracle"]}, "predictors to be among model.*'oracle'"),
    ({"corruptions": ["rain"]}, "corruptions to be among .*'rain'"),
    ({"severities": [6]}, "severities to be among .*6"),
    ({"samples": -1}, "samples .*-1"),
    ({"limit": 0}, "limit .*0"),
    ({"batch_size": 0}, "batch_size .*0"),
])  # fmt: skip
def test_settings_are_refused_before_anything_is_read(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(tmp_path, **changes)
    with pytest.raises(FileNotFoundError, match="expected a run in"):
        evaluate(tmp_path, ["clean"])


def test_other_data_than_trained_on(copy: Path) -> None:
    file = copy / "preprocessing" / "preprocessing.json"
    content = json.loads(file.read_text())
    content["normalisation"]["mean"] = [0.123]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"expected the data that .* was trained on"):
        evaluate(copy, ["clean"], **QUICK)


# A quick trial does not replace a complete evaluation of the same weights

TRIAL = {**QUICK, "limit": 20, "predictors": ("model",), "corruptions": ("fog", "contrast")}


@pytest.fixture(scope="module")
def evaluated(pristine: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    (folder,) = copies(pristine[:1], tmp_path_factory.mktemp("trial"))
    evaluate(folder, ["clean"], **{**TRIAL, "predictors": ("model", "mean")})
    evaluate(folder, ["corrupted"], **TRIAL)
    return folder


@pytest.fixture
def trial(evaluated: Path, tmp_path: Path) -> Path:
    return copies([evaluated], tmp_path)[0]


@pytest.mark.parametrize(("suite", "less", "message"), [
    ("clean", {"limit": 10}, r"clean\.json has .*\(limit: 20\), which limit 10 would replace"),
    ("clean", {"limit": 10, "samples": 3}, r"limit 10 would replace: .*--fresh"),
    ("corrupted", {"corruptions": ("fog",)}, r"\(types: fog,contrast\), which types fog would replace"),
    ("corrupted", {"severities": (1, 5)}, r"\(severities: all\), which severities 1,5 would replace"),
])  # fmt: skip
def test_fewer_items_are_refused_before_any_work(trial: Path, suite: str, less: dict, message: str) -> None:
    file = trial / "evaluation" / f"{suite}.json"
    before = file.read_bytes()
    with pytest.raises(ValueError, match=message):
        evaluate(trial, [suite], **{**TRIAL, **less})
    assert file.read_bytes() == before
    evaluate(trial, [suite], **{**TRIAL, **less}, fresh=True)
    assert file.read_bytes() != before


def test_predictors_of_before_stay(trial: Path) -> None:
    file = trial / "evaluation" / "clean.json"
    before = file.read_bytes()
    own = heat(evaluate(trial, ["clean"], **TRIAL)["clean"])
    assert file.read_bytes() == before  # finished: nothing is computed
    assert own["model+temperature"] != own["mean+temperature"]  # the mean has one of its own
    assert fitted_temperature(trial) == own["model+temperature"]
    assert fitted_temperature(trial, samples=0) == own["mean+temperature"]
    found = evaluate(trial, ["clean"], **{**TRIAL, "predictors": ("mc_dropout",)})["clean"]
    assert {"model", "mean", "mc_dropout"} <= predictors(found)


def test_more_items_and_other_weights_replace(trial: Path, pristine: list[Path]) -> None:
    more = evaluate(trial, ["clean"], **{**TRIAL, "limit": 30})["clean"]
    assert "reduced: at most 30 items of each set" in more.notes
    shutil.copytree(pristine[1] / "model", trial / "model", dirs_exist_ok=True)
    less = evaluate(trial, ["clean"], **{**TRIAL, "limit": 5})["clean"]
    assert "reduced: at most 5 items of each set" in less.notes


# Numbers belong to the weights that were read, and those who read them later compare

MEAN: dict[str, Any] = {"samples": 0, "limit": 24, "device": "cpu", "predictors": ["model"]}


@pytest.fixture
def run(pristine: list[Path], tmp_path: Path) -> Path:
    return copies(pristine[:1], tmp_path)[0]


def go_on_training(run: Path, scale: float = 3.0) -> None:
    """Other weights in the place of those that are there, as a trainer saves them."""
    model = VisionTransformer.from_pretrained(run / "model")
    with torch.no_grad():
        model.head.weight *= scale
        model.head.bias *= scale
    model.save_pretrained(run / "model")


def test_the_temperature_of_other_weights_is_refused(run: Path) -> None:
    clean = evaluate(run, ["clean", "selective"], **MEAN)["clean"]
    expected = heat(clean)["model+temperature"]
    assert fitted_temperature(run, samples=0) == expected
    go_on_training(run)
    with pytest.raises(ValueError, match=r"got that of other weights in .*\(clean, selective\)"):
        fitted_temperature(run, samples=0)
    evaluate(run, ["selective"], **MEAN)  # `clean` still is that of the older weights
    assert fitted_temperature(run, samples=0) == pytest.approx(3 * expected, rel=1e-3)
    (run / "evaluation" / "selective.json").unlink()
    for settings in ("{", "[]", "{}"):  # of unknown weights
        write_suite(run, replace(clean, environment={"settings": settings}))
        with pytest.raises(ValueError, match="of other weights"):
            fitted_temperature(run, samples=0)


def test_numbers_of_other_weights_say_so_wherever_they_stand(run: Path) -> None:
    def stale() -> set[str]:
        return {name for name, suite in read_runs([run])[0].suites.items() if OTHER_WEIGHTS in suite.notes}

    note = f"ood: {OTHER_WEIGHTS}"
    evaluate(run, ["clean", "ood"], **MEAN)
    assert stale() == set()
    assert note not in build_report(read_runs([run]))
    go_on_training(run)
    evaluate(run, ["clean"], **MEAN)
    assert stale() == {"ood"}
    assert note in build_report(read_runs([run]))  # the summary has a column of them
    ((evaluated,),) = (group.runs for group in read_groups(run))
    assert {suite for suite, found in evaluated.suites.items() if OTHER_WEIGHTS in found.notes} == {"ood"}
    (run / "model" / "model.safetensors").unlink()  # records alone, as `reproduce` keeps them
    assert stale() == set()


def test_an_evaluation_says_that_training_goes_on(run: Path) -> None:
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text("".join(x for x in events.splitlines(True) if '"finished"' not in x))
    before = evaluate(run, ["clean"], **MEAN)["clean"]
    assert "reduced: training has come to epoch 2 of 2" in before.notes
    (run / "events.jsonl").write_text(events)  # whose weights are the same
    after = evaluate(run, ["clean"], **MEAN)["clean"]
    assert not any("training" in note for note in after.notes)
    assert after.records == before.records


def test_weights_saved_during_an_evaluation_are_not_those_of_its_numbers(run: Path) -> None:
    evaluation = Evaluation(run, EvaluationSettings(["clean"], **MEAN))
    go_on_training(run)
    during = evaluation.suite("clean").value("test", "nll")
    later = evaluate(run, ["clean"], **MEAN)["clean"].value("test", "nll")
    fresh = evaluate(run, ["clean"], fresh=True, **MEAN)["clean"].value("test", "nll")
    assert later == fresh != during
    assert read_suites(run)["clean"].value("test", "nll") == fresh


def test_weights_saved_while_they_are_read_are_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened, times = one_run.open_run, [], 2

    def saved_meanwhile(folder: Path) -> object:
        opened.append(real(folder))
        if len(opened) <= times:
            go_on_training(folder)
        return opened[-1]

    monkeypatch.setattr(one_run, "open_run", saved_meanwhile)
    found, digest = one_run.open_with_digest(run)
    assert len(opened) == 3
    assert digest == one_run.digest_of_weights(run)
    saved = VisionTransformer.from_pretrained(run / "model").head.weight
    assert found.model.head.weight.equal(saved)
    times = 99
    with pytest.raises(RuntimeError, match=r"the weights of .*cgp0 to stay while they are read"):
        one_run.open_with_digest(run)


# Finished results are of the data that is there: other files under the same names are evaluated again

Suite = Callable[..., SuiteResult]
TEN: dict[str, Any] = {"samples": 0, "limit": 10, "device": "cpu", "predictors": ["model"]}


@pytest.fixture(scope="module")
def on_cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of data, and a run on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=20)
    (root / "ood").mkdir()
    return root, train_on("cifar10", root)


@pytest.fixture
def suite(on_cifar: tuple[Path, Path]) -> Suite:
    root, run = on_cifar
    return lambda name="clean", **changes: evaluate(run, [name], root=root, **{**TEN, **changes})[name]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Predictors that predict from now on."""
    names, real = [], one_run.Evaluation._predict

    def predict(self: one_run.Evaluation, name: str, items: ItemSet) -> RawPrediction:
        names.append(name)
        return real(self, name, items)

    monkeypatch.setattr(one_run.Evaluation, "_predict", predict)
    return names


def save_own_set(root: Path, seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (9, 32, 32, 3), np.uint8)
    np.savez(root / "ood" / "mine.npz", images=images)


def test_a_replaced_set_of_ones_own(on_cifar: tuple[Path, Path], suite: Suite) -> None:
    root, _ = on_cifar
    save_own_set(root, 0)
    first, clean = suite("ood"), suite()
    assert suite("ood").records == first.records
    save_own_set(root, 1)
    auroc = [found.value("ood/mine", "auroc", score="entropy") for found in (first, suite("ood"))]
    assert auroc[0] != auroc[1]
    save_own_set(root, 0)
    assert suite("ood").records == first.records
    (root / "ood" / "mine.npz").unlink()
    assert suite().seconds == clean.seconds  # the same file: such images do not concern clean ones


def test_last_layers_of_other_training_items(
    on_cifar: tuple[Path, Path], suite: Suite, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = {"samples": 2, "predictors": ["model", "laplace", "gp_layer"]}
    first = suite(**fitted)
    seen.clear()
    assert suite(**fitted).records == first.records
    real = one_run.run_sets

    def relabelled(*given: object, **more: object) -> RunSets:
        sets = real(*given, **more)  # type: ignore[arg-type]
        return replace(sets, train=replace(sets.train, labels=sets.train.labels.roll(1)))

    monkeypatch.setattr(one_run, "run_sets", relabelled)
    other = suite(**fitted)
    assert set(seen) == {"laplace", "gp_layer"}  # the model's own predictions are kept
    assert other.value("test", "nll", "gp_layer") != first.value("test", "nll", "gp_layer")
    fitted |= {"predictors": ["gp_layer"], "seed": 1}
    suite(**fitted)
    seen.clear()
    defaults = GPLastLayer.__init__.__kwdefaults__
    monkeypatch.setattr(GPLastLayer.__init__, "__kwdefaults__", {**defaults, "seed": 5})
    (on_cifar[1] / "evaluation" / "clean.json").unlink()
    suite(**fitted)
    assert set(seen) == {"gp_layer"}  # with other random features


def test_predictions_of_another_version_or_of_other_options(
    on_cifar: tuple[Path, Path], suite: Suite, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights are not the same model."""
    suite()
    with monkeypatch.context() as patch:
        seen.clear()
        patch.setattr("gpattention.__version__", "0.0.1")
        suite()
        assert set(seen) == {"model"}
    suite()
    (on_cifar[1] / "evaluation" / "clean.json").unlink()
    file = on_cifar[1] / "model" / "config.json"
    described = json.loads(before := file.read_text())
    described["config"]["dropout"] = 0.3
    file.write_text(json.dumps(described))
    seen.clear()
    try:
        suite()
    finally:
        file.write_text(before)
    assert set(seen) == {"model"}
