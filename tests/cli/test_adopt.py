"""`gpattention adopt`: tables on the screen and in files, and polite words where something is missing."""

import csv
from pathlib import Path

import pytest

from gpattention.cli import main
from tests.experiments.tiny_cola import mislabel, write_tiny_cola
from tests.experiments.tiny_encoder import write_tiny_encoder
from tests.experiments.tiny_runs import digits_recipe

pytest.importorskip("transformers")
Output = pytest.CaptureFixture[str]


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of one candidate."""
    from gpattention.adopt import handle
    from gpattention.adopt.fitting import FitOptions

    def options(**given: object) -> FitOptions:
        return FitOptions(**{**given, "steps": 1, "samples": 2, "levels": ("global",), "select": False})

    monkeypatch.setattr(handle, "FitOptions", options)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.usefixtures("quick_fit")
def test_cola(tmp_path: Path, capsys: Output) -> None:
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
    assert main(words) == 0
    told, err = capsys.readouterr()
    assert "| attached, as `fit` chose |" in told
    for row in ("tuned on", "converted to direct, tuned on", "converted to direct, tuned on, temperature"):
        assert f"| {row} |" in told
    assert "| minus temperature | in MCC |" in told
    assert "| minus tuned on, temperature | in MCC |" in told
    for what in ("host", "tuned-on", "converted-direct"):
        assert f"seed 1 {what} fine-tuning" in err
    assert {file.name for file in out.iterdir()} == {
        "cola.md", "cola.csv", "cola-cells.csv", "cola.png", "cola.svg",
    }  # fmt: skip
    page = (out / "cola.md").read_text()
    assert "--further-epochs 1 --further-learning-rate 0.005 " in page
    assert "--data FOLDER" in page
    assert str(root) not in page
    single = [
        float(row["value"])
        for row in rows(out / "cola-cells.csv")
        if (row["method"], row["set"], row["metric"]) == ("plain", "test", "nll")
    ]
    (mean,) = [
        row for row in rows(out / "cola.csv")
        if (row["method"], row["set"], row["metric"]) == ("plain", "test", "nll")
    ]  # fmt: skip
    assert float(mean["mean"]) == pytest.approx(sum(single) / 2)
    assert float(mean["standard_error"]) == pytest.approx(abs(single[0] - single[1]) / 2)
    assert main(words) == 0  # what is finished is read
    assert "fine-tuning" not in capsys.readouterr().err
    assert main([*words, "--finished", "--against", "plain"]) == 0
    told = capsys.readouterr().out
    assert "| minus plain | in MCC |" in told
    assert "minus temperature" not in told
    assert main([*words, "--finished", "--convert-from", "pretrained"]) == 0
    assert "converted to direct" not in capsys.readouterr().out  # none is finished
    page = (out / "cola.md").read_text()
    assert "--convert-from pretrained" in page
    assert "--further" not in page


@pytest.mark.usefixtures("quick_fit")
def test_images(tmp_path: Path, capsys: Output) -> None:
    from gpattention.experiments import train_recipe

    for attention in ("softmax", "cgp"):
        train_recipe(digits_recipe(attention, name=f"tiny-{attention}"), tmp_path / "runs" / attention)
    words = [
        "adopt", "images", str(tmp_path / "runs"), "--limit", "40", "--samples", "2", "--corruptions", "fog",
        "--severities", "3", "--device", "cpu", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(words) == 0
    told, err = capsys.readouterr()
    assert "## tiny-softmax" in told
    assert "AUROC entropy" in told
    assert "note: reduced: at most 40 images of each set" in told
    assert "cgp is left out" in told
    for part in ("fit", "clean", "corrupted", "ood"):
        assert f"softmax {part}: " in err
    assert (tmp_path / "out" / "images.md").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cola", "--encoder", "package:no_such/model"], "pip install no-such"),
        (["cola", "--seeds", "a"], "--seeds to be whole numbers"),
        (["cola", "--kinds", "gp"], "method to be one of plain"),
        (["cola", "--against", "magic"], "--against to be one of plain"),
        (["cola", "--further-epochs", "0"], "further epochs to be a whole number >= 1, got 0"),
        (["cola", "--further-learning-rate", "-1"], "further learning_rate > 0, got -1.0"),
        (["cola", "--further-prior-scale", "0"], "further prior_scale > 0, got 0.0"),
        (["images", "nowhere"], "no folder nowhere"),
        (["images", "x", "--severities", "low"], "--severities to be whole numbers"),
    ],
)
def test_mistakes_take_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["adopt", *words, "--data", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_missing_data_is_told_politely(tmp_path: Path, capsys: Output) -> None:
    encoder = write_tiny_encoder(tmp_path / "bert")
    capsys.readouterr()
    assert main(["adopt", "cola", "--encoder", str(encoder), "--data", str(tmp_path)]) == 2
    assert "expected cola_public" in capsys.readouterr().err
