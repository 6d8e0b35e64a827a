"""A shared model as a run again: judged as the run it came from, and never trained over."""

from pathlib import Path

import pytest

from gpattention.cli.main import main
from gpattention.evaluation.records import SuiteResult
from gpattention.experiments import evaluate_run, find_runs, open_run, train_recipe
from gpattention.experiments.reproduction.model_card import write_model_card
from gpattention.experiments.reproduction.shared_run import write_shared_run
from gpattention.experiments.status import read_statuses
from gpattention.training import CheckpointError
from tests.experiments.tiny_runs import digits_recipe, train_cola


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_recipe(digits_recipe(), folder / "run")
    write_model_card(folder / "run", folder / "card")
    return folder


def judged(run: Path, **options: object) -> SuiteResult:
    found = evaluate_run(run, ["clean"], limit=30, samples=2, device="cpu", predictors=["model"], **options)  # type: ignore[arg-type]
    return found["clean"]


def test_a_shared_model_is_judged_as_its_run(trained: Path, tmp_path: Path) -> None:
    files = write_shared_run(trained / "card", tmp_path / "shared")
    assert all(file.is_file() for file in files)
    assert find_runs(tmp_path) == [tmp_path / "shared"]
    again, before = open_run(tmp_path / "shared"), open_run(trained / "run")
    assert again.recipe == before.recipe
    assert not again.rows
    assert not again.finished
    assert judged(tmp_path / "shared").records == judged(trained / "run").records


def test_texts_keep_their_words(tmp_path: Path) -> None:
    run = train_cola(tmp_path / "run", tmp_path / "data")
    write_model_card(run, tmp_path / "card")
    write_shared_run(tmp_path / "card", tmp_path / "shared")
    found = judged(tmp_path / "shared", root=tmp_path / "data")
    assert found.records == judged(run, root=tmp_path / "data").records


def test_it_is_not_trained_over(trained: Path, tmp_path: Path) -> None:
    write_shared_run(trained / "card", tmp_path / "shared")
    weights = (tmp_path / "shared" / "model" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds a shared model, whose training is not there"):
        train_recipe(digits_recipe(), tmp_path / "shared", resume=True)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train_recipe(digits_recipe(), tmp_path / "shared")
    assert (tmp_path / "shared" / "model" / "model.safetensors").read_bytes() == weights
    assert read_statuses([tmp_path])[0].state == "shared"


def test_a_card_of_it_does_not_call_it_unfinished(trained: Path, tmp_path: Path) -> None:
    write_shared_run(trained / "card", tmp_path / "shared")
    write_model_card(tmp_path / "shared", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "| state | a shared model, trained elsewhere |" in text
    assert "not trained to its end" not in text


def test_a_run_is_not_replaced(trained: Path, tmp_path: Path) -> None:
    train = trained / "run" / "recipe.json"
    before = train.read_bytes()
    with pytest.raises(FileExistsError, match="expected a folder without a run for the shared model, got"):
        write_shared_run(trained / "card", trained / "run")
    assert train.read_bytes() == before


@pytest.mark.parametrize(
    "missing", ["config.json", "model.safetensors", "recipe.toml", "preprocessing/preprocessing.json"]
)
def test_what_is_missing_is_named(trained: Path, tmp_path: Path, missing: str) -> None:
    write_model_card(trained / "run", tmp_path / "card")
    (tmp_path / "card" / missing).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"expected a model shared by `models card` in .*, got no {missing}"
    ):
        write_shared_run(tmp_path / "card", tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_damaged_weights_make_no_run(trained: Path, tmp_path: Path) -> None:
    write_model_card(trained / "run", tmp_path / "card")
    (tmp_path / "card" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        write_shared_run(tmp_path / "card", tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "run", str(trained / "card"), "-o", str(tmp_path / "shared")]) == 0
    told = capsys.readouterr().out
    assert f"judge it with: gpattention evaluate {tmp_path / 'shared'}" in told
    assert "recipe.json (" in told
    assert (
        main(["evaluate", str(tmp_path / "shared"), "--suite", "clean", "--limit", "20", "--device", "cpu"])
        == 0
    )
    assert main(["models", "run", str(tmp_path / "none"), "-o", str(tmp_path / "other")]) == 2
    assert "expected a model shared by" in capsys.readouterr().err
