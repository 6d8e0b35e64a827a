"""The items that runs on CIFAR and CoLA are judged on: published, regenerated, missing, of one's own."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from gpattention.data import CIFAR10, CIFAR100, load_cifar, load_corrupted
from gpattention.evaluation.records import SuiteResult
from gpattention.experiments import open_run, train_recipe
from gpattention.experiments.judging.evaluating import evaluate_run, evaluate_runs
from gpattention.experiments.judging.judges import load_outside
from gpattention.experiments.judging.outside_sets import find_outside
from gpattention.experiments.judging.run_sets import run_sets
from gpattention.metrics import auroc, mcc, nll
from gpattention.training import recipe_from_dict
from tests.data import official
from tests.experiments.judging.conftest import TYPES

QUICK = {"samples": 2, "device": "cpu", "predictors": ["model"]}


class TestOutside:
    def test_what_is_there_and_what_is_missing(self, root: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        for place in ("dtd/images/banded", "ood/holidays"):
            (root / place).mkdir(parents=True)
            image.fromarray(np.full((40, 50, 3), 7, np.uint8)).save(root / place / "1.png")
        np.savez(root / "ood" / "tiny-standin.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
        np.savez(root / "ood" / "wrong.npz", images=np.zeros((3, 9, 9, 3), np.uint8))
        (root / "ood" / ".hidden").mkdir()
        found = find_outside(load_cifar(CIFAR10, root, subset=True), root)
        assert set(found.images) == {"textures-subset", "holidays", "tiny-standin", "wrong"}
        assert found.images["textures-subset"]().shape == (1, 3, 32, 32)
        told = "\n".join(found.notes)
        assert "ood/textures-subset: 1 of 5640 images" in told
        assert "ood/tiny-standin is a stand-in" in told
        assert "ood/holidays is a set of your own" in told
        for name in ("lsun-crop", "lsun-resize", "tinyimagenet-crop", "tinyimagenet-resize"):
            assert f"ood/{name} is missing: put " in told
        assert "ood/cifar100 is missing: get('cifar100', root) downloads" in told

    def test_two_sets_of_one_name(self, root: Path) -> None:
        official.write_cifar100_python(root)
        (root / "ood").mkdir()
        np.savez(root / "ood" / "cifar100-subset.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
        found = find_outside(load_cifar(CIFAR10, root, subset=True), root)
        expected = load_cifar(CIFAR100, root, subset=True).test.images
        assert found.images["cifar100-subset"]().equal(expected)
        assert any("cifar100-subset.npz is left out" in note for note in found.notes)

    def test_the_other_cifar(self, root: Path) -> None:
        official.write_cifar100_python(root)
        found = find_outside(load_cifar(CIFAR10, root, subset=True), root)
        assert set(found.images) == {"cifar100-subset"}
        assert found.images["cifar100-subset"]().equal(load_cifar(CIFAR100, root, subset=True).test.images)
        count = len(load_cifar(CIFAR100, root, subset=True).test)
        assert f"ood/cifar100-subset: {count} of 10000 test images" in found.notes
        back = find_outside(load_cifar(CIFAR100, root, subset=True), root)
        assert set(back.images) == {"cifar10-subset"}

    def test_nothing_but_what_the_data_brings(self, root: Path) -> None:
        data = load_cifar(CIFAR10, root, subset=True)
        assert find_outside(data, root).images == {}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A folder of data, and runs of two seeds on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=40)
    np.savez(root / "wrong.npz", images=np.zeros((3, 9, 9, 3), np.uint8))
    (root / "ood").mkdir()
    np.savez(root / "ood" / "black.npz", images=np.zeros((9, 32, 32, 3), np.uint8))
    shutil.move(root / "wrong.npz", root / "ood" / "wrong.npz")
    folders = []
    for seed in (0, 1):
        recipe = recipe_from_dict(
            {
                "name": "tiny-cifar",
                "seed": seed,
                "data": {"name": "cifar10", "options": {"subset": True}},
                "model": {"attention": "cgp", "config": {"width": 16, "heads": 2, "depth": 1, "patch": 16}},
                "optimizer": {"batch_size": 90},
                "phases": {"epochs": 1},
            }
        )
        folders.append(root / f"run{seed}")
        train_recipe(recipe, folders[-1], root=root)
    return root, folders[0], folders[1]


def test_a_run_on_cifar(cifar: tuple[Path, Path, Path], few: None) -> None:
    root, run, _ = cifar
    found = evaluate_run(run, ["clean", "corrupted", "ood"], root=root, **QUICK)
    assert found["clean"].data == "cifar10-subset"
    assert {r.set for r in found["ood"].records} == {"ood/black"}
    assert any(note.startswith("ood/wrong could not be read") for note in found["ood"].notes)
    assert (
        load_corrupted("cifar10-c", root, folder="CIFAR-10-C-regenerated", subset=True).corruptions == TYPES
    )
    each = [found["corrupted"].value(f"corrupted/{t}/{s}", "nll") for t in TYPES for s in range(1, 6)]
    assert found["corrupted"].value("corrupted/mean", "nll") == pytest.approx(fmean(each))
    assert found["corrupted"].value("corrupted/noise", "accuracy") is None


def test_all_test_images_serve_an_ensemble_on_cifar(cifar: tuple[Path, Path, Path], few: None) -> None:
    """They are the same for every seed, also where no validation image is left."""
    root, first, second = cifar
    found = evaluate_runs([second, first], ["clean", "corrupted"], root=root, **QUICK)[first]
    records = [r for r in found["clean"].records if r.predictor == "ensemble"]
    assert {r.set for r in records} == {"test"}
    assert len(records) == 11
    assert not any("unseen_test_items" in r.detail for r in records)
    assert not any("test items" in note for note in found["clean"].notes)
    assert any("not judged on validation" in note for note in found["clean"].notes)
    assert 0 <= found["corrupted"].value("corrupted/fog/2", "ece", "ensemble") <= 1
    assert not any("ensemble" in note for note in found["corrupted"].notes)
    assert not list((first / "evaluation" / "predictions").glob("of-*"))  # the members' own predictions serve


def test_what_members_predict_of_anothers_items_is_kept_aside(
    cifar: tuple[Path, Path, Path], few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpattention.experiments.judging.ensembles.FEWEST", 1)
    root, first, second = cifar
    found = evaluate_runs([first, second], ["clean"], root=root, **QUICK)[first]["clean"]
    assert any("validation items" in note for note in found.notes)
    aside = list((first / "evaluation" / "predictions").glob("of-*/*/*.safetensors"))
    assert {file.stem for file in aside} == {"validation"}
    for file in aside:
        file.write_bytes(b"damaged")
    again = evaluate_runs([first, second], ["clean"], root=root, fresh=True, **QUICK)[first]["clean"]
    assert again.records == found.records


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("cola")
    official.write_cola(root, (60, 12, 8))
    folders = []
    for seed in (0, 1):
        recipe = recipe_from_dict(
            {
                "name": f"tiny-cola-seed{seed}",
                "seed": seed,
                "data": {"name": "cola", "options": {"subset": True}},
                "model": {
                    "type": "text", "attention": "cgp",
                    "config": {"width": 16, "heads": 2, "depth": 1, "embedding_width": 8},
                },
                "optimizer": {"batch_size": 10},
                "phases": {"epochs": 1},
            }
        )  # fmt: skip
        folders.append(root / f"run{seed}")
        train_recipe(recipe, folders[-1], root=root)
    return root, folders


def suites(cola: tuple[Path, list[Path]]) -> dict[str, SuiteResult]:
    return evaluate_run(
        cola[1][0], ["clean", "corrupted", "ood", "selective", "oversmoothing"], root=cola[0], **QUICK
    )


def test_sentences_out_of_domain_are_judged_too(cola: tuple[Path, list[Path]]) -> None:
    found = suites(cola)
    run = open_run(cola[1][0])
    outside = load_outside(run_sets(run, cola[0]))[0][0]
    told = run.model.predict(outside.stored, samples=2, seed=0)
    expected = mcc(told.probs, outside.labels)
    assert found["clean"].value("ood/out-of-domain", "mcc") == pytest.approx(expected)
    inside = run.model.predict(run_sets(run, cola[0]).test.stored, samples=2, seed=0)
    told_apart = auroc(inside.entropy, told.entropy)
    assert found["ood"].value("ood/out-of-domain", "auroc", score="entropy") == pytest.approx(told_apart)
    batch = next(r for r in found["clean"].records if r.metric == "batch_ece")
    assert batch.detail["batch"] == 32
    assert found["corrupted"].records == ()
    assert "there are no corruptions of texts" in found["corrupted"].notes


def test_texts_have_no_shifts(cola: tuple[Path, list[Path]]) -> None:
    found = evaluate_run(cola[1][0], ["clean"], root=cola[0], shift_temperature=True, **QUICK)["clean"]
    assert "no temperature under shift: there are no shifts of texts" in found.notes
    assert not any("shift" in record.predictor for record in found.records)


def test_words_and_their_variance(cola: tuple[Path, list[Path]]) -> None:
    for entry in suites(cola)["clean"].curves["gallery"]["most_certain"]:
        assert entry["words"][-1] == "."
        assert len(entry["token_variance"]) == len(entry["words"])


def test_an_ensemble_of_other_vocabularies(cola: tuple[Path, list[Path]]) -> None:
    root, folders = cola
    found = evaluate_runs(folders, ["clean"], root=root, **QUICK)[folders[0]]["clean"]
    first, second = (run_sets(open_run(folder), root) for folder in folders)
    known = {*second.train.words, *second.validation.words}
    kept = [i for i, words in enumerate(first.test.words) if words not in known]
    assert 0 < len(kept) < len(first.test)
    items = first.test.select(torch.tensor(kept))
    assert not second.adopt(items).stored["tokens"].equal(items.stored["tokens"])  # other numbers, same words
    logits = [
        open_run(folder).model.predict(sets.adopt(items).stored, samples=2, seed=0).logits
        for folder, sets in zip(folders, (first, second), strict=True)
    ]
    expected = nll(torch.cat(logits).double().softmax(-1).mean(0), items.labels)
    assert found.value("test", "nll", "ensemble") == pytest.approx(expected, abs=1e-6)
    outside = [r for r in found.records if (r.set, r.predictor) == ("ood/out-of-domain", "ensemble")]
    assert outside
    assert not any("unseen_test_items" in record.detail for record in outside)  # all of them are judged


def test_other_sentences_than_trained_on(cola: tuple[Path, list[Path]], tmp_path: Path) -> None:
    official.write_cola(tmp_path, (60, 12, 8))
    root = tmp_path
    shutil.copytree(cola[1][0], root / "run")
    content = json.loads((root / "run" / "preprocessing" / "preprocessing.json").read_text())
    content["length"] += 1
    (root / "run" / "preprocessing" / "preprocessing.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was trained on, got other data of the name 'cola'"):
        evaluate_run(root / "run", ["clean"], root=root, **QUICK)


def test_a_limit_takes_all_classes_of_a_folder(cifar: tuple[Path, Path, Path]) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    root, folder, _ = cifar
    for place in range(4):
        (root / "ood" / "kinds" / f"class{place}").mkdir(parents=True)
        for number in range(10):
            pixels = np.full((32, 32, 3), 10 * place + number, np.uint8)
            image.fromarray(pixels).save(root / "ood" / "kinds" / f"class{place}" / f"{number}.png")
    run = open_run(folder)
    try:
        whole, some = run_sets(run, root), run_sets(run, root, limit=8)
        values = some.outside["ood/kinds"]().stored[:, 0, 0, 0]  # type: ignore[index]
        assert values.tolist() == [0, 5, 10, 15, 20, 25, 30, 35]
        assert some.test.stored.equal(whole.test.stored[:8])  # type: ignore[union-attr, index]
        # figures of other items are not taken for these
        told = some.described("ood")["outside"]["ood/kinds"]
        assert told == f"{whole.described('ood')['outside']['ood/kinds']} spread"
    finally:
        shutil.rmtree(root / "ood" / "kinds")


def test_a_limit_takes_sentences_of_all_sources(cola: tuple[Path, list[Path]]) -> None:
    run = open_run(cola[1][0])
    whole, some = (run_sets(run, cola[0], limit=limit).outside["ood/out-of-domain"]() for limit in (None, 3))
    assert len(whole) > 3
    assert some.words == tuple(whole.words[i * len(whole) // 3] for i in range(3))  # type: ignore[index]


def test_a_limit_of_nothing(cola: tuple[Path, list[Path]]) -> None:
    with pytest.raises(ValueError, match="limit to be at least 1, got 0"):
        run_sets(open_run(cola[1][0]), cola[0], limit=0)
