"""A shared model as a run again: judged as the run it came from, and never trained over."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.cli.main import main
from gpattention.evaluation.records import SuiteResult
from gpattention.experiments import evaluate_run, find_runs, open_run, train_recipe
from gpattention.experiments.recipe_file import write_recipe
from gpattention.experiments.status import read_statuses
from gpattention.studies.reproduction import (
    evaluate_plan,
    load_plan,
    train_plan,
    write_model_card,
    write_results,
    write_shared_run,
)
from gpattention.studies.reproduction.working import is_finished
from gpattention.training import CheckpointError
from gpattention.training.records import read_events
from tests.disks import failing_at
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


def test_a_model_that_is_no_run_is_not_replaced_but_a_copy_that_was_killed_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model/config.json", "checkpoints/x", "metrics.csv"):
        precious = tmp_path / name.replace("/", "-") / name
        precious.parent.mkdir(parents=True)
        precious.write_text("precious")
        with pytest.raises(FileExistsError, match=f"no recipe.json but holds {name.partition('/')[0]}"):
            write_shared_run(trained / "card", tmp_path / name.replace("/", "-"))
        assert precious.read_text() == "precious"
    for number in range(1, 5):
        with monkeypatch.context() as patch:
            failing_at(patch, "replace", number)
            with pytest.raises(OSError, match="No space left"):
                write_shared_run(trained / "card", tmp_path / "shared")
        assert not is_finished(tmp_path / "shared")
    write_shared_run(trained / "card", tmp_path / "shared")
    assert is_finished(tmp_path / "shared")
    assert [event["event"] for event in read_events(tmp_path / "shared")] == ["shared"]


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


def test_a_card_tells_of_the_weights_beside_it_alone(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    judged(run)
    model = open_run(run).model
    with torch.no_grad():
        model.head.weight *= 3
    model.save_pretrained(run / "model")  # as training that goes on does
    with pytest.raises(
        ValueError, match=r"figures of the weights in .*run/model, got .* \(clean\): evaluate"
    ):
        write_model_card(run, tmp_path / "card")
    judged(run)
    assert write_model_card(run, tmp_path / "card")
    (run / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        write_model_card(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_commands_can_be_copied_whatever_a_folder_is_called(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "the way back"
    assert main(["models", "run", str(trained / "card"), "-o", str(out)]) == 0
    assert f"judge it with: gpattention evaluate '{out}'" in capsys.readouterr().out
    (out / "model" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"--run '{out}' goes on"):
        open_run(out)


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


def plan_of(trained: Path, folder: Path, more: str = "") -> Path:
    """A plan with the shared model beside a recipe whose first phase is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    write_recipe(folder / "tiny.toml", replace(digits_recipe(), seed=1), "tiny")
    path = folder / "plan.toml"
    path.write_text(
        'evaluate = ["--limit", "20", "--samples", "2", "--predictors", "model"]\n'
        f'[[runs]]\nshared = "{trained / "card"}"\nname = "taken"\n{more}'
        '[[runs]]\nrecipe = "tiny"\nseeds = [0, 1]\n'
    )
    return path


def test_a_plan_judges_shared_models_and_trains_the_others(trained: Path, tmp_path: Path) -> None:
    plan = load_plan(plan_of(trained, tmp_path))
    assert [t.folder for t in plan.trainings] == ["taken-seed0", "tiny-seed0", "tiny-seed1"]
    assert "tiny-seed0" not in plan.sources()  # a shared model has no first phase to give
    part = plan.only(["taken"])
    assert train_plan(part, tmp_path / "runs", device="cpu") == []
    weights = Path("model") / "model.safetensors"
    taken = tmp_path / "runs" / "taken-seed0"
    assert (taken / weights).read_bytes() == (trained / "run" / weights).read_bytes()
    assert train_plan(part, tmp_path / "runs", device="cpu") == []  # a second time there is nothing to do
    assert [outcome.code for outcome in evaluate_plan(part, tmp_path / "runs", device="cpu")] == [0]
    files = {file.name for file in write_results(part, tmp_path / "runs", tmp_path / "out")}
    assert "summary.md" in files
    assert not any(name.startswith("training-") for name in files)
    told = (tmp_path / "out" / "README.md").read_text()
    assert "| taken-seed0 |  | elsewhere: a shared model |" in told
    assert "not finished" not in told
    shutil.rmtree(tmp_path / "runs")
    again = write_results(part, tmp_path / "runs", tmp_path / "out")  # from the records alone
    assert {file.name for file in again} == files
    assert (tmp_path / "out" / "README.md").read_text() == told


def test_what_a_shared_model_of_a_plan_cannot_have(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown key 'seeds' in .* with a shared model, which is not trained"
    ):
        load_plan(plan_of(trained, tmp_path, "seeds = [1]\n"))
    path = plan_of(trained, tmp_path)
    path.write_text(path.read_text().replace(str(trained / "card"), "nowhere"))
    with pytest.raises(FileNotFoundError, match="no shared model 'nowhere', seen from it or from here"):
        load_plan(path)


def test_a_shared_model_is_named_from_its_plan(trained: Path, tmp_path: Path) -> None:
    path = plan_of(trained, tmp_path / "plans")
    write_model_card(trained / "run", tmp_path / "models" / "tiny")
    path.write_text(path.read_text().replace(str(trained / "card"), "../models/tiny"))
    assert load_plan(path).trainings[0].shared == tmp_path / "plans" / ".." / "models" / "tiny"
