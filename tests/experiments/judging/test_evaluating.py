"""Evaluation of whole runs: records, resumption, refusals."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load_digits
from gpattention.data.corruptions import CORRUPTIONS, corrupt
from gpattention.data.shifts import SEVERITIES as SHIFT_SEVERITIES
from gpattention.data.shifts import shift, shifts_of
from gpattention.evaluation.prediction_cache import DamagedPredictionError
from gpattention.evaluation.records import read_suites
from gpattention.evaluation.suites import SUITES
from gpattention.evaluation.temperature import fit_temperature
from gpattention.experiments import train_recipe
from gpattention.experiments.judging import corrupted_source
from gpattention.experiments.judging.evaluating import evaluate_run, evaluate_runs
from gpattention.metrics import accuracy, ece, nll
from gpattention.models import VisionTransformer
from gpattention.runs import name_without_seed
from tests.experiments.judging.counting import counted
from tests.experiments.tiny_runs import digits_recipe

QUICK = {"samples": 2, "limit": 24, "device": "cpu"}
TYPES, SEVERITIES = ("gaussian_noise", "fog", "contrast", "saturate"), (1, 5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same recipe with two seeds, and another one."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train_recipe(digits_recipe(name=f"tiny-seed{seed}", seed=seed), folder / f"cgp{seed}")
    train_recipe(digits_recipe("softmax", name="plain"), folder / "softmax")
    return [folder / "cgp0", folder / "cgp1", folder / "softmax"]


@pytest.fixture(scope="module", autouse=True)
def few_corruptions() -> Iterator[None]:
    """Of the 95."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrupted_source, "CORRUPTIONS", {name: CORRUPTIONS[name] for name in TYPES})
        patch.setattr(corrupted_source, "SEVERITIES", SEVERITIES)
        yield


@pytest.fixture(scope="module")
def everything(runs: list[Path]) -> dict:
    return evaluate_run(runs[0], **QUICK)


class TestOneRun:
    def test_all_suites_are_written_as_returned(self, runs: list[Path], everything: dict) -> None:
        assert tuple(everything) == tuple(SUITES)
        written = read_suites(runs[0])
        assert {name: result.records for name, result in written.items()} == {
            name: result.records for name, result in everything.items()
        }
        for name in SUITES:
            assert "NaN" not in (runs[0] / "evaluation" / f"{name}.json").read_text()

    def test_numbers_are_those_of_the_model(self, runs: list[Path], everything: dict) -> None:
        data = load_digits(0)
        model = VisionTransformer.from_pretrained(runs[0] / "model")
        told = model.predict(data.inputs(data.test.images[:24]), samples=2, seed=0)
        labels = data.test.labels[:24]
        clean = everything["clean"]
        for metric, function in (("accuracy", accuracy), ("nll", nll), ("ece", ece)):
            assert clean.value("test", metric) == pytest.approx(function(told.probs, labels), abs=1e-6)
        mean = model.predict(data.inputs(data.test.images[:24]), samples=0)
        assert clean.value("test", "nll", "mean") == pytest.approx(nll(mean.probs, labels), abs=1e-6)

    def test_corrupted_numbers_too(self, runs: list[Path], everything: dict) -> None:
        data = load_digits(0)
        model = VisionTransformer.from_pretrained(runs[0] / "model")
        coloured = corrupt(data.test.images[:24].expand(-1, 3, -1, -1), "contrast", 5)
        grey = coloured.float().mean(1, keepdim=True).round().to(torch.uint8)
        told = model.predict(data.inputs(grey), samples=2, seed=0)
        found = everything["corrupted"]
        expected = nll(told.probs, data.test.labels[:24])
        assert found.value("corrupted/contrast/5", "nll") == pytest.approx(expected, abs=1e-6)
        types = {record.set.split("/")[1] for record in found.records if record.set.count("/") == 2}
        assert types == set(TYPES)
        assert found.value("corrupted/noise", "nll") == pytest.approx(
            np.mean([found.value(f"corrupted/gaussian_noise/{s}", "nll") for s in SEVERITIES])
        )
        assert all("regenerated" in found.notes[i] or "reduced" in found.notes[i] for i in (0, 1))

    def test_every_predictor_with_and_without_temperature(self, everything: dict) -> None:
        names = {"model", "mean", "mc_dropout"}
        both = names | {f"{name}+temperature" for name in names}
        for suite in ("clean", "corrupted", "ood", "selective"):
            assert {record.predictor for record in everything[suite].records} == both
        heat = [
            r.detail["temperature"] for r in everything["clean"].records if r.predictor == "model+temperature"
        ]
        assert len(set(heat)) == 1

    def test_a_temperature_fitted_under_shift(
        self, runs: list[Path], everything: dict, tmp_path: Path
    ) -> None:
        pair = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
        evaluated = evaluate_runs(pair, ["clean", "corrupted"], shift_temperature=True, **QUICK)
        found = evaluated[pair[0]]["clean"]
        data, model = load_digits(0), VisionTransformer.from_pretrained(runs[0] / "model")
        images, labels = data.validation.images[:24], data.validation.labels[:24]
        shifted = [shift(images, name, s) for name in shifts_of(1) for s in SHIFT_SEVERITIES]
        told = model.predict(data.inputs(torch.cat(shifted)), samples=2, seed=0)
        expected = fit_temperature(told.logits, labels.repeat(len(shifted)))
        heat = {
            r.predictor: r.detail["temperature"] for r in found.records if r.predictor.startswith("model+")
        }
        assert heat["model+shift_temperature"] == pytest.approx(expected, rel=1e-4)
        assert heat["model+shift_temperature"] != heat["model+temperature"]
        names = {"model", "mean", "mc_dropout", "ensemble"}
        three = {f"{name}{after}" for name in names for after in ("", "+temperature", "+shift_temperature")}
        assert {record.predictor for record in found.records} == three
        assert {record.predictor for record in evaluated[pair[0]]["corrupted"].records} == three
        # what was there is the same, and comes back alone only anew
        for record in everything["clean"].records:
            again = found.value(record.set, record.metric, record.predictor)
            assert again == pytest.approx(record.value, abs=1e-7)
        assert evaluate_run(pair[0], ["clean"], **QUICK)["clean"].records == found.records
        again = evaluate_run(pair[0], ["clean"], **QUICK, fresh=True)["clean"]
        assert again.records == everything["clean"].records

    def test_other_kinds(self, everything: dict) -> None:
        found = everything["ood"]
        sets = {record.set for record in found.records}
        assert sets == {f"ood/{name}" for name in ("near", "noise", "patterns", "inverted", "shuffled")}
        assert set(found.curves["roc"]) == sets
        assert 0 <= found.value("ood/near", "auroc", score="gp_variance") <= 1

    def test_what_else_is_told(self, everything: dict) -> None:
        clean = everything["clean"]
        assert (clean.run, clean.data, clean.seed, clean.attention) == ("tiny-seed0", "digits", 0, "cgp")
        assert set(clean.curves) == {"reliability", "gallery", "health", "items"}
        assert clean.curves["items"]["model+temperature"] == {"validation": 24, "test": 24}
        pooled = everything["corrupted"].curves
        assert pooled["items"]["mean"] == {"corrupted/mean": 24}
        sets = {r.set for r in everything["corrupted"].records if r.set.count("/") == 2}
        assert sum(pooled["reliability"]["mean"]["count"]) == 24 * len(sets)
        assert everything["ood"].curves["items"]["model"]["ood/near"] == 24
        assert len(clean.curves["gallery"]["most_certain"][0]["token_variance"]) == 16
        assert "reduced: at most 24 items of each set" in clean.notes
        assert json.loads(clean.environment["settings"])["samples"] == 2
        tokens = [r.detail["tokens"] for r in everything["efficiency"].records]
        assert tokens[0] == 16
        assert len(everything["oversmoothing"].curves["similarity"]["block"]) == 1

    def test_without_competitors(self, runs: list[Path]) -> None:
        found = evaluate_run(runs[2], ["clean"], **QUICK)["clean"]
        assert {r.predictor for r in found.records} == {
            "model", "model+temperature", "mc_dropout", "mc_dropout+temperature",
        }  # fmt: skip
        assert any("mean is left out" in note for note in found.notes)

    def test_last_layers(self, runs: list[Path]) -> None:
        found = evaluate_run(runs[2], ["selective"], predictors=["laplace"], **QUICK)["selective"]
        assert {r.predictor for r in found.records} == {"laplace", "laplace+temperature"}


class TestResumption:
    def test_finished_suites_are_read(
        self, runs: list[Path], everything: dict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = counted(monkeypatch)
        again = evaluate_run(runs[0], **QUICK)
        assert seen == []
        assert {name: result.records for name, result in again.items()} == {
            name: result.records for name, result in everything.items()
        }

    def test_other_settings_are_other_results(
        self, runs: list[Path], everything: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        seen = counted(monkeypatch)
        run = copied(runs[0], tmp_path)
        found = evaluate_run(run, ["clean"], predictors=["model"], samples=3, limit=24, device="cpu")
        assert sorted(seen) == ["test", "validation"]
        assert found["clean"].samples == 3
        assert found["clean"].value("test", "nll") != everything["clean"].value("test", "nll")

    def test_a_stopped_suite_goes_on_where_it_stopped(
        self, runs: list[Path], everything: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        run = copied(runs[0], tmp_path)
        (run / "evaluation" / "corrupted.json").unlink()
        kept = run / "evaluation" / "predictions" / "model" / "corrupted"
        (kept / "fog" / "1.safetensors").unlink()
        # grey images have no colours to take away: that set is the test set and has no file of its own
        missing = {f"corrupted/{c}/{s}" for c in TYPES for s in SEVERITIES if not _file(kept, c, s).exists()}
        assert missing == {"corrupted/fog/1", "corrupted/saturate/1"}
        seen = counted(monkeypatch)
        told = []
        found = evaluate_run(run, ["corrupted"], progress=lambda *x: told.append(x), **QUICK)
        assert set(seen) == missing
        assert found["corrupted"].records == everything["corrupted"].records
        assert told[-1] == ("corrupted", 24_000, 24_000)
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)

    def test_damage_is_refused_and_fresh_repairs(
        self, runs: list[Path], everything: dict, tmp_path: Path
    ) -> None:
        run = copied(runs[0], tmp_path)
        told = run / "evaluation" / "clean.json"
        for damaged in ("{", "[]", '{"format": "gpattention-evaluation-1"}', told.read_text()[:-9]):
            told.write_text(damaged)
            with pytest.raises(ValueError, match=rf"{re.escape(str(told))} .* --fresh \(fresh=True\)"):
                evaluate_run(run, ["clean"], **QUICK)
            assert told.read_text() == damaged
        told.unlink()  # only what is missing is computed
        file = run / "evaluation" / "predictions" / "model" / "test.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(DamagedPredictionError, match="fresh=True"):
            evaluate_run(run, ["clean"], **QUICK)
        found = evaluate_run(run, ["clean"], fresh=True, **QUICK)
        assert found["clean"].records == everything["clean"].records

    def test_other_weights_are_noticed(
        self, runs: list[Path], everything: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        run = copied(runs[0], tmp_path)
        model = VisionTransformer.from_pretrained(run / "model")
        with torch.no_grad():
            model.head.bias += 1
        model.save_pretrained(run / "model")
        seen = counted(monkeypatch)
        evaluate_run(run, ["clean"], predictors=["model"], **QUICK)
        assert sorted(seen) == ["test", "validation"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"suites": ["dirty"]}, "suite to be one of clean"),
            ({"suites": []}, "at least one of suites"),
            ({"predictors": ["oracle"]}, "predictor to be one of model"),
            ({"samples": -1}, "samples to be a whole number >= 0"),
            ({"limit": 0}, "limit to be a whole number >= 1"),
            ({"batch_size": 0}, "batch_size to be a whole number >= 1"),
        ],
    )
    def test_before_anything_is_read(self, changes: dict, message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            evaluate_run(tmp_path, **changes)

    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="expected a run in"):
            evaluate_run(tmp_path, ["clean"])

    def test_other_data_than_trained_on(self, runs: list[Path], tmp_path: Path) -> None:
        run = copied(runs[0], tmp_path)
        file = run / "preprocessing" / "preprocessing.json"
        content = json.loads(file.read_text())
        content["normalisation"]["mean"] = [0.123]
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"expected the data that .* was trained on"):
            evaluate_run(run, ["clean"], **QUICK)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cgp-seed3", "cgp"), ("cgp_s12", "cgp"), ("cgp-seed-3", "cgp"), ("digits-cgp", "digits-cgp"),
        ("scgp-m16", "scgp-m16"),
    ],
)  # fmt: skip
def test_names_without_seeds(name: str, expected: str) -> None:
    assert name_without_seed(name) == expected


def _file(folder: Path, corruption: str, severity: int) -> Path:
    return folder / corruption / f"{severity}.safetensors"


def copied(run: Path, folder: Path) -> Path:
    """A run that a test may spoil."""
    target = folder / run.name
    shutil.copytree(run, target)
    return target


def test_a_run_without_preprocessing_is_still_evaluated(tmp_path: Path, runs: list[Path]) -> None:
    """As those of older versions, and of `fit` called by itself."""
    before, run = copied(runs[0], tmp_path / "before"), copied(runs[0], tmp_path)
    shutil.rmtree(run / "preprocessing")
    for each in (before, run):
        shutil.rmtree(each / "evaluation", ignore_errors=True)
    expected, found = (
        evaluate_run(each, ["clean"], predictors=["mean"], limit=5, device="cpu")["clean"]
        for each in (before, run)
    )
    assert found.value("test", "nll", "mean") == expected.value("test", "nll", "mean") > 0
    assert "gallery" not in found.curves  # it shows the model's own prediction
