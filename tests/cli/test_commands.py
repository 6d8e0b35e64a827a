"""The command line: it trains, resumes, shows a table, and tells mistakes in one line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpattention.cli import main
from gpattention.experiments import run_demo
from gpattention.experiments.demo import MODELS, demo_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "digits-cgp.toml"
FEW = ["--epochs", "1", "--kernel-epochs", "1"]
SMALL = ["--set", "phases.kernel_epochs=1", "--set", "phases.epochs=1", "--set", "model.config.width=16"]


def test_demo_trains_compares_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--run", str(tmp_path), "--models", "softmax,scgp", *FEW]) == 0
    out = capsys.readouterr().out
    assert "softmax" in out
    assert "near AUROC" in out
    page = (tmp_path / "report.html").read_text()
    assert "Kinds of attention on handwritten digits" in page
    assert page.count("<svg") > 5
    for model in ("softmax", "scgp"):
        assert (tmp_path / model / "evaluation" / "corrupted.json").is_file()
    assert "http" not in page.replace("http-equiv", "")
    result = run_demo(tmp_path, models=("softmax",), epochs=1, kernel_epochs=0)  # an earlier demo is replaced
    assert 0 <= result.rows[0].accuracy <= 1


def test_train_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--run", str(tmp_path / "run")]
    assert main(["train", str(RECIPE), *SMALL, *run]) == 0
    out, err = capsys.readouterr()
    assert "validation accuracy" in out
    assert re.fullmatch(
        r"digits-cgp epoch 2/2 gp +loss \d\.\d{3}  accuracy \d\.\d{3}  NLL \d\.\d{3}  \d+ s\n", err
    )
    assert main(["train", str(RECIPE), *SMALL, *run]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["train", str(RECIPE), *SMALL, *run, "--resume"]) == 0
    assert main(["train", "--resume", *run]) == 0  # the run knows its recipe
    capsys.readouterr()
    assert main(["train", "--resume", *run, "--set", "seed=1", "--set", "phases.epochs=3"]) == 2
    told = "seed is 0 there and 1 here, phases.epochs is 1 there and 3 here. A changed recipe is a new run"
    assert told in capsys.readouterr().err


def test_train_tells_of_the_weights_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ((0.9, 0.5), (0.8, 0.3), (0.7, 0.4))
    rows = tuple(
        {"epoch": epoch, "phase": "gp", "validation_accuracy": accuracy, "validation_nll": nll}
        for epoch, (accuracy, nll) in enumerate(values, start=1)
    )
    trained = SimpleNamespace(rows=rows, folder=Path("run"))
    monkeypatch.setattr("gpattention.cli.train.train_recipe", lambda *_, **__: trained)
    for select, told in {
        "best": "0.9000, NLL 0.5000 (epoch 1",
        "last": "0.7000, NLL 0.4000 (epoch 3",
    }.items():
        assert main(["train", str(RECIPE), "--set", f"checkpoint.select={select}"]) == 0
        assert f"validation accuracy {told}, whose weights are kept)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--resume"], ["--run", "runs/x"]], ids=" ".join)
def test_train_without_a_recipe_needs_a_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    assert stop.value.code == 2
    assert "expected a recipe, or --resume with --run FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.toml"], "no recipe nowhere.toml"),
        (["train", str(RECIPE), "--set", "optimizer.batchsize=3"], "did you mean 'batch_size'"),
        (["train", str(RECIPE), "--set", "model.attention=nothing"], "got 'nothing'"),
        (["demo", "--models", "nothing"], "got nothing"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    with pytest.raises((ValueError, FileNotFoundError)):
        main(["--debug", *arguments])


def test_models_lists_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert all(kind in listed for kind in MODELS)
    assert main([]) == 2


def test_a_demo_replaces_no_other_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "softmax").mkdir()
    for written in ('{"name": "thesis"}', "{"):
        (tmp_path / "softmax" / "recipe.json").write_text(written)
        assert main(["demo", "--run", str(tmp_path), "--models", "softmax", *FEW]) == 2
        assert "holds a run that is not the demo's" in capsys.readouterr().err
        assert (tmp_path / "softmax" / "recipe.json").read_text() == written


def test_demo_recipes_are_the_same_but_for_the_attention() -> None:
    first, *others = (demo_recipe(name).to_dict() for name in MODELS)
    for other in others:
        assert {k: v for k, v in other.items() if k not in ("name", "model")} == {
            k: v for k, v in first.items() if k not in ("name", "model")
        }
        assert other["model"]["config"] == first["model"]["config"]
