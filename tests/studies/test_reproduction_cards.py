"""Model cards: what they tell is what was measured, and their code runs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.cli.main import main
from gpattention.data import load_digits
from gpattention.evaluation.records import read_suites
from gpattention.experiments import evaluate_run, load_preprocessing, open_run, train_recipe
from gpattention.models import VisionTransformer
from gpattention.studies.reproduction import model_card
from gpattention.studies.reproduction.model_card import write_model_card
from gpattention.training import load_recipe
from tests.experiments.tiny_runs import digits_recipe, train_cola


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train_recipe(replace(digits_recipe(), seed=seed), folder / f"tiny-seed{seed}")
        evaluate_run(folder / f"tiny-seed{seed}", ["clean", "ood"], limit=30, samples=2, device="cpu")
    train_recipe(digits_recipe("softmax"), folder / "softmax")
    return folder


def code_of(folder: Path) -> str:
    found = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert found is not None
    assert '\nfolder = "' in found[1]  # as a formatter would have it
    return found[1]


def test_the_folder_predicts_as_the_run(runs: Path, tmp_path: Path) -> None:
    files = write_model_card(runs / "tiny-seed0", tmp_path / "card")
    assert {str(file.relative_to(tmp_path / "card")) for file in files} == {
        "config.json", "model.safetensors", "preprocessing/preprocessing.json", "recipe.toml", "README.md",
    }  # fmt: skip
    run = open_run(runs / "tiny-seed0")
    images = load_digits().test.images[:5]
    inputs = load_preprocessing(tmp_path / "card").images(images)
    assert torch.equal(inputs, run.preprocessing.images(images))
    model = VisionTransformer.from_pretrained(tmp_path / "card")
    assert torch.equal(model.predict(inputs, seed=0).probs, run.model.predict(inputs, seed=0).probs)
    assert load_recipe(tmp_path / "card" / "recipe.toml") == run.recipe


def test_the_code_of_a_card_runs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-seed0", "softmax"):
        write_model_card(runs / name, Path("models") / name)
        namespace: dict[str, object] = {}
        exec(code_of(Path("models") / name), namespace)
        told = capsys.readouterr().out.split()
        assert told[0] in load_preprocessing(runs / name).classes
        assert 1 / 8 <= float(told[1]) <= 1
        assert ("calibrated" in namespace) == (name != "softmax")  # which was not evaluated
    assert "The run was not evaluated." in (tmp_path / "models" / "softmax" / "README.md").read_text()


def test_a_model_that_does_not_draw_is_not_said_to(runs: Path, tmp_path: Path) -> None:
    judged = {name: tmp_path / name for name in ("tiny-seed0", "softmax")}
    text = {}
    for name, folder in judged.items():
        shutil.copytree(runs / name, folder)
        evaluate_run(folder, ["clean"], limit=30, samples=2, device="cpu", predictors=["model"], fresh=True)
        write_model_card(folder, tmp_path / f"card-of-{name}")
        text[name] = (tmp_path / f"card-of-{name}" / "README.md").read_text()
    for words in ("mutual_information", "mutual information", "draws"):
        assert words in text["tiny-seed0"]
        assert words not in text["softmax"]
    assert "| regulariser | none |" in text["softmax"]
    assert "| regulariser | weight 0 to 0.01, per token and dimension |" in text["tiny-seed0"]
    assert "the entropy of the\n  prediction tells items" in text["softmax"]


def test_a_card_tells_what_was_measured(runs: Path, tmp_path: Path) -> None:
    write_model_card(runs / "tiny-seed1", tmp_path / "card", name="A tiny model")
    text = (tmp_path / "card" / "README.md").read_text()
    clean = read_suites(runs / "tiny-seed1")["clean"]
    assert text.startswith("# A tiny model\n")
    for predictor in ("model", "model+temperature", "mean"):
        accuracy, nll = (clean.value("test", metric, predictor) for metric in ("accuracy", "nll"))
        assert accuracy is not None
        assert nll is not None
        assert f"| test | {predictor} | 30 | {100 * accuracy:.2f} | {nll:.3f} |" in text
    both = [read_suites(runs / f"tiny-seed{seed}")["clean"].value("test", "nll") for seed in (0, 1)]
    assert f"{sum(v for v in both if v is not None) / 2:.3f} ± " in text
    assert "Mean and standard error of the seeds 0, 1:" in text
    assert "| near | " in text
    assert "- reduced: at most 30 items of each set" in text
    assert "1 epochs of kernel attention, then 1 as it is" in text
    again = (tmp_path / "card" / "README.md").read_bytes()
    write_model_card(runs / "tiny-seed1", tmp_path / "card", name="A tiny model")
    assert (tmp_path / "card" / "README.md").read_bytes() == again


def test_large_models_are_refused(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_card, "LARGEST", 5_000)
    with pytest.raises(ValueError, match=r"expected a model of at most 0.0 MB, got 0\.\d MB in "):
        write_model_card(runs / "tiny-seed0", tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run with a model in"):
        write_model_card(tmp_path, tmp_path / "card")


def test_a_run_that_was_stopped(runs: Path, tmp_path: Path) -> None:
    events = runs / "softmax" / "events.jsonl"
    whole = events.read_text()
    try:
        events.write_text("")
        write_model_card(runs / "softmax", tmp_path / "card")
    finally:
        events.write_text(whole)
    assert "| state | not trained to its end |" in (tmp_path / "card" / "README.md").read_text()


def test_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_cola(tmp_path / "run", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    evaluate_run(run, ["clean"], root=tmp_path / "data", samples=2, device="cpu", predictors=["model"])
    write_model_card(run, "card")
    text = Path("card/README.md").read_text()
    assert "sorts sentences into 2 classes" in text
    assert "| ood/out-of-domain | model |" in text
    assert Path("card/preprocessing/vocabulary.json").is_file()
    exec(code_of(Path("card")), {})
    frozen = json.loads(Path("run/preprocessing/preprocessing.json").read_text())
    frozen["contextual"] = {"kind": "glove", "path": "glove.txt", "fingerprint": "x"}
    Path("run/preprocessing/preprocessing.json").write_text(json.dumps(frozen))
    write_model_card(run, "card")
    assert (
        "with the frozen vectors `glove.txt` (glove), whose files must be there"
        in Path("card/README.md").read_text()
    )


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("kind")
    assert main(["models", "card", str(runs / "tiny-seed0"), "-o", str(tmp_path / "card")]) == 0
    assert "README.md (" in capsys.readouterr().out
    assert main(["models", "card", str(tmp_path / "none"), "-o", str(tmp_path / "card")]) == 2
