"""Finished results are of the data that is there: other files under the same names are judged again."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpattention.evaluation.gp_layer import GPLastLayer
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.prediction_cache import RawPrediction
from gpattention.evaluation.records import SuiteResult
from gpattention.experiments import train_recipe
from gpattention.experiments.judging import file_content, one_run, session
from gpattention.experiments.judging.evaluating import evaluate_run
from gpattention.experiments.judging.file_content import content_digest
from gpattention.experiments.judging.run_sets import RunSets
from gpattention.training import recipe_from_dict
from tests.data import official

QUICK = {"samples": 0, "limit": 10, "device": "cpu", "predictors": ["model"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of data, and a run on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=20)
    (root / "ood").mkdir()
    recipe = recipe_from_dict(
        {
            "data": {"name": "cifar10", "options": {"subset": True}},
            "model": {"attention": "cgp", "config": {"width": 16, "heads": 2, "depth": 1, "patch": 16}},
            "optimizer": {"batch_size": 90},
            "phases": {"epochs": 1},
        }
    )
    train_recipe(recipe, root / "run", root=root)
    return root, root / "run"


def save_own_set(root: Path, seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (9, 32, 32, 3), np.uint8)
    np.savez(root / "ood" / "mine.npz", images=images)


def test_a_replaced_set_of_ones_own(trained: tuple[Path, Path]) -> None:
    root, run = trained

    def found() -> SuiteResult:
        return evaluate_run(run, ["ood"], root=root, **QUICK)["ood"]

    save_own_set(root, 0)
    first = found()
    assert found().records == first.records
    save_own_set(root, 1)
    second = found()
    assert second.value("ood/mine", "auroc", score="entropy") != first.value(
        "ood/mine", "auroc", score="entropy"
    )
    save_own_set(root, 0)
    assert found().records == first.records


def test_images_of_other_kinds_do_not_concern_clean_ones(trained: tuple[Path, Path]) -> None:
    root, run = trained
    save_own_set(root, 0)
    before = evaluate_run(run, ["clean"], root=root, **QUICK)["clean"]
    (root / "ood" / "mine.npz").unlink()
    after = evaluate_run(run, ["clean"], root=root, **QUICK)["clean"]
    assert after.seconds == before.seconds  # of the same file


LAST_LAYERS = {**QUICK, "samples": 2, "predictors": ["model", "laplace", "gp_layer"]}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Predictors that predict from now on."""
    names, real = [], session.Session._predict

    def predict(self: session.Session, name: str, items: ItemSet) -> RawPrediction:
        names.append(name)
        return real(self, name, items)

    monkeypatch.setattr(session.Session, "_predict", predict)
    return names


def test_last_layers_of_other_training_items(
    trained: tuple[Path, Path], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, run = trained
    first = evaluate_run(run, ["clean"], root=root, **LAST_LAYERS)["clean"]
    seen.clear()
    assert evaluate_run(run, ["clean"], root=root, **LAST_LAYERS)["clean"].records == first.records
    real = one_run.run_sets

    def relabelled(*given: object, **more: object) -> RunSets:
        sets = real(*given, **more)  # type: ignore[arg-type]
        return replace(sets, train=replace(sets.train, labels=sets.train.labels.roll(1)))

    monkeypatch.setattr(one_run, "run_sets", relabelled)
    other = evaluate_run(run, ["clean"], root=root, **LAST_LAYERS)["clean"]
    assert set(seen) == {"laplace", "gp_layer"}  # the model's own predictions are kept
    assert other.value("test", "nll", predictor="gp_layer") != first.value(
        "test", "nll", predictor="gp_layer"
    )
    fitted = {**LAST_LAYERS, "predictors": ["gp_layer"], "seed": 1}
    evaluate_run(run, ["clean"], root=root, **fitted)
    seen.clear()
    defaults = GPLastLayer.__init__.__kwdefaults__
    monkeypatch.setattr(GPLastLayer.__init__, "__kwdefaults__", {**defaults, "seed": 5})
    (run / "evaluation" / "clean.json").unlink()
    evaluate_run(run, ["clean"], root=root, **fitted)
    assert set(seen) == {"gp_layer"}  # with other random features


def test_predictions_of_another_version(
    trained: tuple[Path, Path], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, run = trained
    evaluate_run(run, ["clean"], root=root, **QUICK)
    seen.clear()
    monkeypatch.setattr("gpattention.__version__", "0.0.1")
    evaluate_run(run, ["clean"], root=root, **QUICK)
    assert set(seen) == {"model"}


def test_a_model_of_other_options_and_the_same_weights(trained: tuple[Path, Path], seen: list[str]) -> None:
    root, run = trained
    evaluate_run(run, ["clean"], root=root, **QUICK)
    file = run / "model" / "config.json"
    described = json.loads(before := file.read_text())
    (run / "evaluation" / "clean.json").unlink()
    seen.clear()
    described["config"]["dropout"] = 0.3
    file.write_text(json.dumps(described))
    try:
        evaluate_run(run, ["clean"], root=root, **QUICK)
    finally:
        file.write_text(before)
    assert set(seen) == {"model"}


def test_pictures_of_frost_that_are_gone(trained: tuple[Path, Path]) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    root, run = trained
    (root / "frost").mkdir()
    picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    image.fromarray(picture).save(root / "frost" / "frost1.png")
    wanted = {"types": ["frost"], "severities": [5], "root": root, **QUICK}
    given = evaluate_run(run, ["corrupted"], **wanted)["corrupted"]
    (root / "frost" / "frost1.png").unlink()
    (root / "frost").rmdir()
    generated = evaluate_run(run, ["corrupted"], **wanted)["corrupted"]
    assert generated.value("corrupted/frost/5", "nll") != given.value("corrupted/frost/5", "nll")
    settings = json.loads(generated.environment["settings"])
    assert settings["corrupted"]["frost"] == "generated pictures"


class TestContentDigest:
    def test_names_and_contents(self, tmp_path: Path) -> None:
        folder = tmp_path / "set"
        folder.mkdir()
        seen = set()
        for name, content in (("a.png", b"1"), ("a.png", b"2"), ("b.png", b"2"), ("note.txt", b"2")):
            for file in folder.iterdir():
                file.unlink()
            (folder / name).write_bytes(content)
            seen.add(content_digest([folder]))
        assert len(seen) == 4

    def test_a_file_is_read_once_until_it_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, read = file_content.file_digest, []
        monkeypatch.setattr(file_content, "file_digest", lambda file: (read.append(file), real(file))[1])
        file = tmp_path / "mine.npz"
        file.write_bytes(b"12")
        first = content_digest([file])
        assert content_digest([file]) == first
        file.write_bytes(b"34")
        os.utime(file, ns=(0, 0))
        assert content_digest([file]) != first
        assert read == [file, file]
