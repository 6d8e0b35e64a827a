"""Predictions of raw inputs are the model's own, in order, whatever the inputs come in."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpattention.data import load_digits
from gpattention.evaluation.predict import fitted_temperature, predict_inputs, read_sentences
from gpattention.runs import open_run
from gpattention.runs.records import Record, SuiteResult, write_suite
from tests.runs.tiny_runs import train_cola


@pytest.fixture
def digits(pristine: list[Path]) -> Path:
    return pristine[0]


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cola")
    return train_cola(folder / "run", folder / "data")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for i, pixels in enumerate(load_digits().test.images[:5, 0].numpy()):
        place = folder / "more" if i == 4 else folder
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
    return folder


def test_images_are_predicted_as_the_model_predicts_their_pixels(digits: Path, pictures: Path) -> None:
    found = predict_inputs(digits, [pictures], samples=4, seed=3)
    data = load_digits()
    own = open_run(digits).model.predict(data.inputs(data.test.images[:5]), samples=4, seed=3)
    assert [Path(p.input).name for p in found] == [f"{i}.png" for i in range(5)]
    for i, prediction in enumerate(found):
        assert prediction.label == data.classes[int(own.label[i])]
        assert prediction.probabilities[prediction.label] == prediction.confidence
        assert prediction.entropy == pytest.approx(float(own.entropy[i]), abs=1e-5)
        assert prediction.mutual_information == pytest.approx(float(own.mutual_information[i]), abs=1e-5)
        expected = dict(zip(data.classes, own.probs[i].tolist(), strict=True))
        assert prediction.probabilities == pytest.approx(expected, abs=1e-6)
    for prediction in predict_inputs(digits, [pictures], samples=0):
        assert prediction.mutual_information is None  # without draws nothing disagrees


def test_files_in_chunks_are_those_of_one_call(
    digits: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(pictures.glob("*.png"))
    whole = predict_inputs(digits, files)
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr("gpattention.evaluation.predict.AT_ONCE", 3)
    cut = predict_inputs(digits, files, progress=lambda *x: steps.append(x))
    assert steps == [(3, 4), (4, 4)]
    for a, b in zip(whole, cut, strict=True):
        assert (a.input, a.label) == (b.input, b.label)
        assert a.entropy == pytest.approx(b.entropy, abs=1e-6)


def test_sentences(cola: Path) -> None:
    sentences = ["Someone said no to it.", "Nobody has read these words!"]
    first = predict_inputs(cola, sentences)
    assert [p.input for p in first] == sentences
    assert {p.label for p in first} <= set(open_run(cola).preprocessing.classes)
    assert predict_inputs(cola, sentences) == first
    assert predict_inputs(cola, sentences, seed=1) != first
    assert predict_inputs(cola, sentences, root=cola.parent / "data") == first


def test_a_temperature_divides_logits(digits: Path, pictures: Path) -> None:
    plain = predict_inputs(digits, [pictures], samples=0)
    hot = predict_inputs(digits, [pictures], samples=0, temperature=2.5)
    for a, b in zip(plain, hot, strict=True):
        logs = torch.tensor(list(a.probabilities.values())).log() / 2.5
        expected = logs.softmax(-1).tolist()
        assert list(b.probabilities.values()) == pytest.approx(expected, abs=1e-5)
        assert b.entropy > a.entropy


def test_the_fitted_temperature_is_the_evaluations(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no fitted temperature in .*evaluate the run first"):
        fitted_temperature(tmp_path)
    plain = Record("test", "model", "nll", 0.5)
    scaled = Record("test", "model+temperature", "nll", 0.4, {"temperature": 1.75})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    described = {"settings": json.dumps({"model": hashlib.sha256(b"weights").hexdigest()})}
    result = SuiteResult("clean", "tiny", "digits", 0, "cgp", 10, (plain, scaled), environment=described)
    write_suite(tmp_path, result)
    assert fitted_temperature(tmp_path) == 1.75
    write_suite(tmp_path, replace(result, samples=0))  # of the mean prediction, then
    assert fitted_temperature(tmp_path, samples=0) == 1.75
    with pytest.raises(FileNotFoundError, match="no fitted temperature"):
        fitted_temperature(tmp_path)
    write_suite(tmp_path, replace(result, samples=0, attention="softmax"))  # which has no other
    assert fitted_temperature(tmp_path) == 1.75


@pytest.mark.parametrize(("run", "inputs", "options", "error", "message"), [
    ("digits", ["nothing"], {}, FileNotFoundError, "image file or a folder of them, got 'nothing'"),
    ("digits", ["empty"], {}, FileNotFoundError, "expected image files in empty, got none"),
    ("digits", ["a.txt"], {}, ValueError, "a.txt: expected an image file"),
    ("digits", ["empty"], {"temperature": 0}, ValueError, "temperature > 0, got 0"),
    ("cola", ["a.txt"], {}, ValueError, "expected a sentence, .*got the file a.txt: see --file"),
    ("cola", [], {}, ValueError, "expected at least one input, got none"),
    ("nowhere", ["x"], {}, FileNotFoundError, "expected a run in"),
])  # fmt: skip
def test_refusals(
    run: str, inputs: list[str], options: dict, error: type[Exception], message: str, digits: Path,
    cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a.txt").write_text("A sentence.\n")
    with pytest.raises(error, match=message):
        predict_inputs({"digits": digits, "cola": cola}.get(run, tmp_path / run), inputs, **options)


def test_sentences_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sentences.txt"
    file.write_bytes("One.\r\n\n  Two \u2028 words. \nThree".encode())
    assert read_sentences(file) == ["One.", "Two \u2028 words.", "Three"]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected text in UTF-8"):
        read_sentences(file)
    for missing in ("other", ""):  # the second is the folder
        with pytest.raises(FileNotFoundError, match=f"no file {tmp_path / missing}"):
            read_sentences(tmp_path / missing)
    reading, writing = os.pipe()  # as a shell's <(...) makes one
    os.write(writing, b"One.\n\nTwo.\n")
    os.close(writing)
    assert read_sentences(f"/dev/fd/{reading}") == ["One.", "Two."]
    os.close(reading)
