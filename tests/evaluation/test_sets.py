"""The items that runs on CIFAR and CoLA are evaluated on: published, regenerated, missing, of one's own."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpattention.data import CIFAR10, CIFAR100, TEXT_SHIFTS, load_cifar, load_corrupted, shift_texts
from gpattention.data.shifts import SEVERITIES as SHIFT_SEVERITIES
from gpattention.evaluation import ItemSet, fit_temperature
from gpattention.evaluation.sets import (
    SHIFTED_ITEMS,
    RunSets,
    find_outside,
    idle_shifts,
    run_sets,
    shift_places,
    shifted_items,
)
from gpattention.metrics import auroc, mcc, nll
from gpattention.models.embeddings import NoEmbedding, Vocabulary
from gpattention.runs import TextEncoder, open_run
from gpattention.strangeness import AdaptiveTemperature
from tests.data import official
from tests.evaluation.conftest import TYPES
from tests.evaluation.evaluating import copies, counted, evaluate, evaluate_several, train_on

QUICK = {"samples": 2, "device": "cpu", "predictors": ["model"]}


def test_what_is_outside_and_what_is_missing(root: Path) -> None:
    for place in ("dtd/images/banded", "ood/holidays"):
        (root / place).mkdir(parents=True)
        Image.fromarray(np.full((40, 50, 3), 7, np.uint8)).save(root / place / "1.png")
    np.savez(root / "ood" / "tiny-standin.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
    np.savez(root / "ood" / "wrong.npz", images=np.zeros((3, 9, 9, 3), np.uint8))
    (root / "ood" / ".hidden").mkdir()
    found = find_outside(load_cifar(CIFAR10, root, subset=True), root)
    assert set(found.images) == {f"ood/{x}" for x in ("textures-subset", "holidays", "tiny-standin", "wrong")}
    assert found.images["ood/textures-subset"]().shape == (1, 3, 32, 32)
    notes = "\n".join(found.notes)
    assert "ood/textures-subset: 1 of 5640 images" in notes
    assert "ood/tiny-standin is a stand-in" in notes
    assert "ood/holidays is a set of your own" in notes
    for name in ("lsun-crop", "lsun-resize", "tinyimagenet-crop", "tinyimagenet-resize"):
        assert f"ood/{name} is missing: put " in notes
    assert "ood/cifar100 is missing: get('cifar100', root) downloads" in notes


def test_the_other_cifar(root: Path) -> None:
    assert find_outside(load_cifar(CIFAR10, root, subset=True), root).images == {}
    official.write_cifar100_python(root)
    (root / "ood").mkdir()
    np.savez(root / "ood" / "cifar100-subset.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
    found = find_outside(load_cifar(CIFAR10, root, subset=True), root)
    images = load_cifar(CIFAR100, root, subset=True).test.images
    assert set(found.images) == {"ood/cifar100-subset"}
    assert found.images["ood/cifar100-subset"]().equal(images)
    assert f"ood/cifar100-subset: {len(images)} of 10000 test images" in found.notes
    assert any("cifar100-subset.npz is left out" in note for note in found.notes)  # of the same name
    back = find_outside(load_cifar(CIFAR100, root, subset=True), root)
    assert "ood/cifar10-subset" in back.images


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A folder of data, and runs of two seeds on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=40)
    (root / "ood").mkdir()
    np.savez(root / "ood" / "black.npz", images=np.zeros((9, 32, 32, 3), np.uint8))
    np.savez(root / "ood" / "wrong.npz", images=np.zeros((3, 9, 9, 3), np.uint8))
    return root, train_on("cifar10", root), train_on("cifar10", root, 1)


def test_a_run_on_cifar(cifar: tuple[Path, Path, Path], few: None) -> None:
    root, run, _ = cifar
    found = evaluate(run, ["clean", "corrupted", "ood"], root=root, **QUICK)
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
    found = evaluate_several([second, first], ["clean", "corrupted"], root=root, **QUICK)[first]
    records = [r for r in found["clean"].records if r.predictor == "ensemble"]
    assert {r.set for r in records} == {"test"}
    assert len(records) == 11
    assert not any("unseen_test_items" in r.detail for r in records)
    assert not any("test items" in note for note in found["clean"].notes)
    assert any("at least 20 are needed" in note for note in found["clean"].notes)
    assert 0 <= found["corrupted"].value("corrupted/fog/2", "ece", "ensemble") <= 1
    assert not any("ensemble" in note for note in found["corrupted"].notes)
    assert not list((first / "evaluation" / "predictions").glob("of-*"))  # the members' own predictions serve


def test_what_members_predict_of_anothers_items_is_kept_aside(
    cifar: tuple[Path, Path, Path], few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpattention.evaluation.run.FEWEST", 1)
    root, first, second = cifar
    found = evaluate_several([first, second], ["clean"], root=root, **QUICK)[first]["clean"]
    assert any("validation items" in note for note in found.notes)
    aside = list((first / "evaluation" / "predictions").glob("of-*/*/*.safetensors"))
    assert {file.stem for file in aside} == {"validation"}
    for file in aside:
        file.write_bytes(b"damaged")
    again = evaluate_several([first, second], ["clean"], root=root, fresh=True, **QUICK)[first]["clean"]
    assert again.records == found.records


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("cola")
    official.write_cola(root, (60, 12, 8))
    return root, [train_on("cola", root, seed) for seed in (0, 1)]


def test_sentences_out_of_domain_are_evaluated_too(cola: tuple[Path, list[Path]]) -> None:
    root, (folder, _) = cola
    suites = ["clean", "corrupted", "ood", "selective", "oversmoothing"]
    found = evaluate(folder, suites, root=root, **QUICK)
    run = open_run(folder)
    sets = run_sets(run, root)
    outside = sets.load_outside()[0][0]
    far, near = (run.model.predict(items.stored, samples=2, seed=0) for items in (outside, sets.test))
    clean, name = found["clean"], "ood/out-of-domain"
    assert clean.value(name, "mcc") == pytest.approx(mcc(far.probs, outside.labels))
    expected = auroc(near.entropy, far.entropy)
    assert found["ood"].value(name, "auroc", score="entropy") == pytest.approx(expected)
    assert {r.detail["batch"] for r in clean.records if r.metric == "batch_ece"} == {32}
    assert found["corrupted"].records == ()
    assert "there are no corruptions of texts" in found["corrupted"].notes
    for entry in clean.curves["gallery"]["most_certain"]:
        assert entry["words"][-1] == "."
        assert len(entry["token_variance"]) == len(entry["words"])


def test_an_ensemble_of_other_vocabularies(cola: tuple[Path, list[Path]]) -> None:
    root, folders = cola
    found = evaluate_several(folders, ["clean"], root=root, **QUICK)[folders[0]]["clean"]
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
    assert not any("unseen_test_items" in record.detail for record in outside)  # all of them are evaluated


def test_other_sentences_than_trained_on(cola: tuple[Path, list[Path]], tmp_path: Path) -> None:
    (run,) = copies(cola[1][:1], tmp_path)
    file = run / "preprocessing" / "preprocessing.json"
    content = json.loads(file.read_text())
    content["length"] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was trained on, got other data of the name 'cola'"):
        evaluate(run, ["clean"], root=cola[0], **QUICK)


def test_a_limit_takes_all_classes_of_a_folder(cifar: tuple[Path, Path, Path]) -> None:
    root, folder, _ = cifar
    for place in range(4):
        (root / "ood" / "kinds" / f"class{place}").mkdir(parents=True)
        for number in range(10):
            pixels = np.full((32, 32, 3), 10 * place + number, np.uint8)
            Image.fromarray(pixels).save(root / "ood" / "kinds" / f"class{place}" / f"{number}.png")
    run = open_run(folder)
    try:
        whole, some = run_sets(run, root), run_sets(run, root, limit=8)
        values = some.outside["ood/kinds"]().stored[:, 0, 0, 0]  # type: ignore[index]
        assert values.tolist() == [0, 5, 10, 15, 20, 25, 30, 35]
        assert some.test.stored.equal(whole.test.stored[:8])  # type: ignore[union-attr, index]
        # figures of other items are not taken for these
        described, of_whole = (sets.described("ood")["outside"]["ood/kinds"] for sets in (some, whole))
        assert described == f"{of_whole} spread"
    finally:
        shutil.rmtree(root / "ood" / "kinds")


def test_a_limit_takes_sentences_of_all_sources(cola: tuple[Path, list[Path]]) -> None:
    run = open_run(cola[1][0])
    whole, some = (run_sets(run, cola[0], limit=limit).outside["ood/out-of-domain"]() for limit in (None, 3))
    assert len(whole) > 3
    assert some.words == tuple(whole.words[i * len(whole) // 3] for i in range(3))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"limit .*got 0"):
        run_sets(run, cola[0], limit=0)


# Sentences under shift


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Sentences whose class one word says, wrongly in a fifth of them, and runs of two seeds on them."""
    root, draw = tmp_path_factory.mktemp("learned"), random.Random(0)
    for name, count in (("in_domain_train", 800), ("in_domain_dev", 20), ("out_of_domain_dev", 20)):
        lines = []
        for _ in range(count):
            good = draw.random() < 0.5
            words = draw.choices(["we", "they", "saw", "it", "now", "here"], k=draw.randint(1, 7))
            words.insert(draw.randint(0, len(words)), "fine" if good else "wrong")
            lines.append(f"gj04\t{int(good == (draw.random() < 0.8))}\t\t{' '.join(words)} .\n")
        for form in ("raw", "tokenized"):
            file = root / "cola_public" / form / f"{name}.tsv"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines), encoding="utf-8")
    return root, [train_on("cola", root, seed) for seed in (0, 1)]


def shifted_by_hand(sets: RunSets) -> dict[str, list[list[str]]]:
    """The words of all validation sentences under each shift, one severity after the other."""
    items = sets.validation
    assert len(items) <= SHIFTED_ITEMS
    texts = [" ".join(words) for words in items.words or ()]
    length = items.stored["tokens"].shape[1]  # type: ignore[index]
    return {
        name: [t.split()[:length] for s in SHIFT_SEVERITIES for t in shift_texts(texts, name, s)]
        for name in TEXT_SHIFTS
    }


def test_temperatures_of_sentences_under_shift(
    learned: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, (folder, _) = learned[0], copies(learned[1], tmp_path)
    heats = {"shift_temperature": True, "adaptive_temperature": True}
    found = evaluate(folder, ["clean", "selective"], root=root, **heats, **QUICK)
    run, clean = open_run(folder), found["clean"]
    sets, model = run_sets(run, root), run.model
    suffixes = ("", "+temperature", "+shift_temperature", "+adaptive_temperature")
    for result in found.values():
        assert {r.predictor for r in result.records} == {f"model{after}" for after in suffixes}
        assert not any("shift" in note for note in result.notes)

    def items(inputs: Any, labels: torch.Tensor) -> Any:
        return model.predict(inputs, samples=2, seed=0).logits, model.signals(inputs), labels

    labels = sets.validation.labels.repeat(3)  # type: ignore[union-attr]
    by_hand = {name: dict(sets.encoder(words)) for name, words in shifted_by_hand(sets).items()}  # type: ignore[misc]
    together = {name: torch.cat([each[name] for each in by_hand.values()]) for name in sets.test.stored}
    shifted = shifted_items(sets.validation, sets.encoder)
    assert all(torch.equal(shifted.stored[name], x) for name, x in together.items())  # type: ignore[index]
    assert torch.equal(shifted.labels, labels.repeat(len(by_hand)))  # type: ignore[arg-type]
    logits, signals, all_labels = items(together, shifted.labels)  # type: ignore[arg-type]
    fitted = {r.predictor: r.detail["temperature"] for r in clean.records if "temperature" in r.detail}
    expected = fit_temperature(logits, all_labels)
    assert fitted["model+shift_temperature"] == pytest.approx(expected, rel=1e-4)
    assert len(set(fitted.values())) == 3
    each = len(labels)
    groups = {
        name: (logits[:, i * each :][:, :each], signals[i * each :][:each], labels)
        for i, name in enumerate(by_hand)
    }
    adaptive = AdaptiveTemperature.fit(*items(sets.validation.stored, labels[: each // 3]), shifted=groups)
    logits, signals, labels = items(sets.test.stored, sets.test.labels)  # type: ignore[arg-type]
    probs = (logits.double() / adaptive.temperature(logits, signals)[:, None]).softmax(-1).mean(0)
    name = "model+adaptive_temperature"
    assert clean.value("test", "nll", name) == pytest.approx(nll(probs, labels), rel=1e-4)
    # predictions under shift are kept as others are, and results of before there were shifts are not taken
    seen = counted(monkeypatch)
    assert evaluate(folder, ["clean"], root=root, **heats, **QUICK)["clean"].records == clean.records
    file = folder / "evaluation" / "clean.json"
    written = file.read_text()
    file.write_text(written.replace(r"\"shifts\"", r"\"other\""))
    assert file.read_text() != written
    again = evaluate(folder, ["clean"], root=root, **heats, **QUICK)["clean"]
    assert again.records == clean.records
    assert json.loads(json.loads(file.read_text())["environment"]["settings"])["shifts"] == list(TEXT_SHIFTS)
    assert seen == []


@pytest.mark.parametrize("lowercase", [False, True])
def test_shifts_that_a_vocabulary_cannot_see(lowercase: bool) -> None:
    sentences = [["the", "cat", "sat"], ["a", "dog", "ran", "home"]] * 150
    encoder = TextEncoder(Vocabulary.from_sentences(sentences, lowercase=lowercase), NoEmbedding(), 4)
    labels = torch.arange(300) % 2
    items = ItemSet("validation", encoder(sentences), labels, words=tuple(map(tuple, sentences)))
    shifted = shifted_items(items, encoder)
    assert len(shifted) == len(TEXT_SHIFTS) * 3 * 250
    assert max(len(words) for words in shifted.words or ()) == 4  # of doubled words the last are cut
    assert torch.equal(shifted.labels, labels[:250].repeat(18))  # type: ignore[arg-type]
    where = shift_places(shifted)["doubled"]
    cut = [t.split()[:4] for t in shift_texts([" ".join(s) for s in sentences[:250]], "doubled", 1)]
    assert torch.equal(shifted.stored["tokens"][where][:250], encoder(cut)["tokens"])  # type: ignore[index]
    assert idle_shifts(shifted, items) == (("recased",) if lowercase else ())
    for wrong in (replace(items, words=None), replace(items, labels=None)):
        with pytest.raises(
            ValueError, match=r"sentences with words and an encoder, with labels .* validation"
        ):
            shifted_items(wrong, encoder)
    with pytest.raises(ValueError, match="sentences with words and an encoder"):
        shifted_items(items)
