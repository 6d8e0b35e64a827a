"""`gpattention adopt`: tables on the screen and in files, and polite words where something is missing."""

import csv
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.runs.tiny_cola import mislabel, write_tiny_cola
from tests.runs.tiny_encoder import write_tiny_encoder
from tests.runs.tiny_runs import digits_recipe

pytest.importorskip("transformers")


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of one candidate."""
    from gpattention.hosts import FitOptions

    def options(**given: object) -> FitOptions:
        return FitOptions(**{**given, "steps": 1, "samples": 2, "levels": ("global",), "select": False})

    monkeypatch.setattr(sys.modules["gpattention.hosts.attach"], "FitOptions", options)


def plain_nll(file: Path) -> list[dict[str, str]]:
    wanted = {"method": "plain", "set": "test", "metric": "nll"}.items()
    with file.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if wanted <= row.items()]


@pytest.mark.usefixtures("quick_fit")
def test_cola(tmp_path: Path, run: Run) -> None:
    root = write_tiny_cola(tmp_path / "data", (160, 40, 30))
    mislabel(root)
    encoder = write_tiny_encoder(tmp_path / "bert")
    out = tmp_path / "out"
    words = [
        "adopt", "cola", "--encoder", str(encoder), "--data", str(root), "--subset", "--seeds", "0,1",
        "--epochs", "2", "--learning-rate", "0.01", "--batch-size", "16", "--kinds", "direct",
        "--further-epochs", "1", "--further-learning-rate", "0.005", "--samples", "2",
        "--runs", str(tmp_path / "runs"), "--device", "cpu", "-o", str(out),
    ]  # fmt: skip
    output, err = run(*words)
    assert "| attached, as `fit` chose |" in output
    for row in ("tuned on", "converted to direct, tuned on", "converted to direct, tuned on, temperature",
                "minus temperature | test in MCC", "minus tuned on, temperature | test in MCC"):  # fmt: skip
        assert f"| {row} |" in output
    for what in ("host", "tuned-on", "converted-direct"):
        assert f"seed 1 {what} fine-tuning" in err
    assert {file.name for file in out.iterdir()} == {
        "cola.md", "cola.csv", "cola-cells.csv", "cola.png", "cola.svg",
    }  # fmt: skip
    page = (out / "cola.md").read_text()
    assert "further_epochs=1, further_learning_rate=0.005, " in page
    assert str(root) not in page
    single = [float(row["value"]) for row in plain_nll(out / "cola-cells.csv")]
    (mean,) = plain_nll(out / "cola.csv")
    assert float(mean["mean"]) == pytest.approx(sum(single) / 2)
    assert float(mean["standard_error"]) == pytest.approx(abs(single[0] - single[1]) / 2)
    assert "fine-tuning" not in run(*words).err  # what is finished is read
    output = run(*words, "--finished", "--against", "plain").out
    assert "| minus plain | test in MCC |" in output
    assert "minus temperature" not in output
    output = run(*words, "--finished", "--convert-from", "pretrained").out
    assert "converted to direct" not in output  # none is finished
    assert "convert_from='pretrained'" in (out / "cola.md").read_text()


@pytest.mark.usefixtures("quick_fit")
def test_images(tmp_path: Path, run: Run) -> None:
    from gpattention.training import train_recipe

    for attention in ("softmax", "cgp"):
        train_recipe(digits_recipe(attention, name=f"tiny-{attention}"), tmp_path / "runs" / attention)
    words = [
        "adopt", "images", str(tmp_path / "runs"), "--limit", "40", "--samples", "2", "--corruptions", "fog",
        "--severities", "3", "--device", "cpu", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    output = run(*words).out
    assert "## tiny-softmax" in output
    assert "| test corr. NLL |" in output
    assert "| test AUROC entropy |" in output
    assert "Figures are on test items; all that is fitted or chosen uses validation items alone." in output
    assert "note: reduced: at most 40 images of each set" in output
    assert "cgp is left out" in output
    assert (tmp_path / "out" / "images.md").is_file()


def test_missing_data_is_told_politely(tmp_path: Path, run: Run) -> None:
    encoder = write_tiny_encoder(tmp_path / "bert")
    err = run("adopt", "cola", "--encoder", encoder, "--data", tmp_path, code=2).err
    assert "expected cola_public" in err
