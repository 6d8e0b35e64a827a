"""`gpattention predict`: tables, JSON, files, and mistakes in one line."""

import io
import json
import warnings
from pathlib import Path

import pytest
from PIL import Image

from gpattention.cli import main
from gpattention.data import load_digits
from gpattention.experiments.predicting import predict_inputs
from tests.experiments.tiny_runs import train_cola, train_digits

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(tmp_path_factory.mktemp("digits") / "run")


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cola")
    return train_cola(folder / "run", folder / "data")


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    file = tmp_path / f"{'a' * 70}.png"
    Image.fromarray(load_digits().test.images[0, 0].numpy()).save(file)
    return file


def test_a_table_of_images(digits: Path, digit: Path, capsys: Output) -> None:
    assert main(["predict", str(digits), str(digit), str(digit.parent), "--device", "cpu"]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["input", "label", "confidence", "entropy", "mutual", "information"]
    assert len(rows) == 2
    assert "..." in rows[0]  # long names lose their middle, not their end
    assert "a.png" in rows[0]
    expected = predict_inputs(digits, [digit])[0]
    assert rows[0].split()[1:3] == [expected.label, f"{expected.confidence:.3f}"]
    assert rows[0].split()[4] == f"{expected.mutual_information:.3f}"
    assert main(["predict", str(digits), str(digit), "--samples", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "-"  # nothing was drawn that could disagree


def test_json_is_one_document_with_all_there_is(digits: Path, digit: Path, capsys: Output) -> None:
    options = ["--samples", "3", "--seed", "2", "--temperature", "1.5", "--json", "--device", "cpu"]
    assert main(["predict", str(digits), str(digit), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["data"]) == ("cgp", "digits")
    assert (told["draws"], told["seed"], told["temperature"]) == (3, 2, 1.5)
    (prediction,) = told["predictions"]
    expected = predict_inputs(digits, [digit], samples=3, seed=2, temperature=1.5)[0]
    assert prediction["probabilities"] == pytest.approx(expected.probabilities)
    assert prediction["mutual_information"] == pytest.approx(expected.mutual_information)
    assert prediction["input"] == str(digit)


@pytest.mark.parametrize("samples", ["0", "1"])
def test_json_says_null_where_nothing_can_disagree(
    digits: Path, digit: Path, samples: str, capsys: Output
) -> None:
    options = ["--samples", samples, "--json", "--device", "cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["predict", str(digits), str(digit), *options]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["mutual_information"] is None


def test_sentences_from_arguments_files_and_standard_input(
    cola: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("Second sentence.\n\nThird one.\n")
    assert main(["predict", str(cola), "The first.", "--file", str(file)]) == 0
    whole = capsys.readouterr().out
    assert len(whole.splitlines()) == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("The first.\nSecond sentence.\nThird one.\n"))
    assert main(["predict", str(cola), "--file", "-"]) == 0
    assert capsys.readouterr().out == whole


def test_a_shared_model_predicts_as_its_run(
    digits: Path, digit: Path, tmp_path: Path, capsys: Output
) -> None:
    card = tmp_path / "card"
    assert main(["models", "card", str(digits), "-o", str(card)]) == 0
    capsys.readouterr()
    for folder in (digits, card):
        assert main(["predict", str(folder), str(digit), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == lines[2:]
    assert predict_inputs(card, [digit]) == predict_inputs(digits, [digit])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "x.png"], "expected a run in nowhere"),
        (["RUN"], "expected at least one input"),
        (["RUN", "nothing.png"], "got 'nothing.png'"),
        (["RUN", "DIGIT", "--temperature", "fitted"], "no fitted temperature"),
        (["RUN", "DIGIT", "--samples", "-1"], "expected samples"),
        (["RUN", "--file", "nothing.txt"], "no file nothing.txt"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str], message: str, digits: Path, digit: Path, capsys: Output
) -> None:
    given = [{"RUN": str(digits), "DIGIT": str(digit)}.get(word, word) for word in arguments]
    assert main(["predict", *given]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
