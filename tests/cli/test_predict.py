"""`gpattention predict`: tables, JSON, sentences from files, shared models."""

import io
import json
import warnings
from pathlib import Path

import pytest

from gpattention.evaluation import predict_inputs
from tests.cli.conftest import Run

CPU = ("--device", "cpu")


def test_a_table_of_images(trained: Path, digit: Path, run: Run) -> None:
    heads, *rows = run("predict", trained, digit, digit.parent, *CPU).out.splitlines()
    assert heads.split() == ["input", "label", "confidence", "entropy", "mutual", "information"]
    assert len(rows) == 2
    assert "..." in rows[0]  # long names lose their middle, not their end
    assert "a.png" in rows[0]
    expected = predict_inputs(trained, [digit])[0]
    assert rows[0].split()[1:3] == [expected.label, f"{expected.confidence:.3f}"]
    assert rows[0].split()[4] == f"{expected.mutual_information:.3f}"
    row = run("predict", trained, digit, "--samples", "0", *CPU).out.splitlines()[1]
    assert row.split()[4] == "-"  # nothing was drawn that could disagree


def test_json_is_one_document_with_all_there_is(trained: Path, digit: Path, run: Run) -> None:
    options = ["--seed", "2", "--temperature", "1.5", "--json", *CPU]
    document = json.loads(run("predict", trained, digit, "--samples", "3", *options).out)
    assert (document["model"], document["data"]) == ("cgp", "digits")
    assert (document["draws"], document["seed"], document["temperature"]) == (3, 2, 1.5)
    (prediction,) = document["predictions"]
    expected = predict_inputs(trained, [digit], samples=3, seed=2, temperature=1.5)[0]
    assert prediction["probabilities"] == pytest.approx(expected.probabilities)
    assert prediction["mutual_information"] == pytest.approx(expected.mutual_information)
    assert prediction["input"] == str(digit)
    for samples in ("0", "1"):  # nothing can disagree
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = run("predict", trained, digit, "--samples", samples, *options).out
        assert json.loads(out)["predictions"][0]["mutual_information"] is None


def test_sentences_from_arguments_files_and_standard_input(
    cola: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("Second sentence.\n\nThird one.\n")
    whole = run("predict", cola, "The first.", "--file", file).out
    assert len(whole.splitlines()) == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("The first.\nSecond sentence.\nThird one.\n"))
    assert run("predict", cola, "--file", "-").out == whole
