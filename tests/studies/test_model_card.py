"""Model cards: what they say is what was measured, their code runs; and shared models as runs again."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpattention.cli.main import main
from gpattention.data import load_digits
from gpattention.evaluation import EvaluationSettings, evaluate_run
from gpattention.models import VisionTransformer
from gpattention.runs import find_runs, load_preprocessing, load_recipe, open_run
from gpattention.runs.recipe import write_recipe
from gpattention.runs.records import SuiteResult, read_events, read_suites
from gpattention.studies import model_card
from gpattention.studies.model_card import (
    in_words,
    shown_path,
    wall_seconds,
    write_model_card,
    write_shared_run,
)
from gpattention.studies.plan_results import write_results
from gpattention.studies.plans import evaluate_plan, is_finished, load_plan, train_plan
from gpattention.training import CheckpointError, train_recipe
from gpattention.training.status import read_statuses
from tests.disks import failing_at
from tests.runs.tiny_runs import digits_recipe, train_cola


def evaluated(run: Path, *suites: str, **options: Any) -> Mapping[str, SuiteResult]:
    given = {"limit": 30, "samples": 2, "device": "cpu", "predictors": ("model",), **options}
    return evaluate_run(run, EvaluationSettings(suites=suites or ("clean",), **given))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds that are evaluated, a softmax that is not, a card, and runs of texts with their card."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train_recipe(replace(digits_recipe(), seed=seed), folder / f"tiny-seed{seed}")
        evaluated(folder / f"tiny-seed{seed}", "clean", "ood", predictors=("model", "mean"))
    train_recipe(digits_recipe("softmax"), folder / "softmax")
    write_model_card(folder / "tiny-seed0", folder / "card")
    return folder


@pytest.fixture
def trained(runs: Path, tmp_path: Path) -> Path:
    """A run that a test may spoil."""
    run = shutil.copytree(runs / "tiny-seed0", tmp_path / "trained" / "run")
    shutil.rmtree(run / "evaluation")
    return run


def card_of(run: Path, folder: Path) -> str:
    write_model_card(run, folder)
    return (folder / "README.md").read_text()


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
        text = card_of(runs / name, Path("models") / name)
        namespace: dict[str, object] = {}
        exec(code_of(Path("models") / name), namespace)
        label, confidence = capsys.readouterr().out.split()[:2]
        assert label in load_preprocessing(runs / name).classes
        assert 1 / 8 <= float(confidence) <= 1
        assert ("calibrated" in namespace) == (name != "softmax")  # which was not evaluated
    assert "The run was not evaluated." in text
    cola = train_cola(tmp_path / "run", tmp_path / "data")
    evaluated(cola, root=tmp_path / "data")
    text = card_of(cola, Path("card"))
    assert "sorts sentences into 2 classes" in text
    assert "| ood/out-of-domain | model |" in text
    exec(code_of(Path("card")), {})
    write_shared_run("card", "shared")  # with the vocabulary
    again = evaluated(Path("shared"), root=tmp_path / "data", fresh=True)["clean"].records
    assert again == evaluated(cola, root=tmp_path / "data", fresh=True)["clean"].records
    file = Path("run/preprocessing/preprocessing.json")
    contextual = {"kind": "glove", "path": "glove.txt", "fingerprint": "x"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "contextual": contextual}))
    vectors = "with the frozen vectors `glove.txt` (glove), whose files must be there"
    assert vectors in card_of(cola, Path("card"))


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


def test_times_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wall(text: str) -> float:
        pairs = [each.split(maxsplit=1) for each in text.split(",")]
        return wall_seconds([{"time": float(time), "event": event} for time, event in pairs])

    assert wall_seconds(()) == 0
    assert wall("3 phase, 5 validated, 9 phase, 10 finished") == 7
    assert wall("3 phase, 5 stopped, 90 phase, 91 resumed, 95 finished") == 2 + 5
    two = "1 phase, 2 phase, 4 stopped, 40 phase, 41 phase, 42 resumed, 50 finished"
    assert wall(two) == 3 + 10
    assert wall("3 first phase taken, 8 phase, 9 resumed, 10 finished") == 2
    assert [in_words(s) for s in (3.21, 90, 7199, 7260)] == ["3.2 s", "2 min", "2 h 0 min", "2 h 1 min"]
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b") == "a/b"
    assert shown_path(Path("a")) == "a"
    assert shown_path(tmp_path.parent / "other") == "other"


def test_a_shared_model_is_evaluated_as_its_run_and_not_trained_over(
    runs: Path, trained: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared" / "run"
    assert all(file.is_file() for file in write_shared_run(runs / "card", shared))
    assert find_runs(shared.parent) == [shared]
    again, before = open_run(shared), open_run(trained)
    assert again.recipe == before.recipe
    assert not again.rows
    assert not again.finished
    assert evaluated(shared)["clean"].records == evaluated(trained)["clean"].records
    weights = (shared / "model" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds a shared model, whose training is not there"):
        train_recipe(digits_recipe(), shared, resume=True)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train_recipe(digits_recipe(), shared)
    with pytest.raises(FileExistsError, match="a folder without a run for the shared model, got"):
        write_shared_run(runs / "card", shared)
    assert (shared / "model" / "model.safetensors").read_bytes() == weights
    assert read_statuses([shared])[0].state == "shared"
    text = card_of(shared, tmp_path / "card")
    assert "| state | a shared model, trained elsewhere |" in text
    assert "not trained to its end" not in text


def test_a_model_that_is_no_run_is_not_replaced_but_a_copy_that_was_killed_goes_on(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model/config.json", "checkpoints/x", "metrics.csv"):
        precious = tmp_path / name.replace("/", "-") / name
        precious.parent.mkdir(parents=True)
        precious.write_text("precious")
        with pytest.raises(FileExistsError, match=f"no recipe.json but holds {name.partition('/')[0]}"):
            write_shared_run(runs / "card", tmp_path / name.replace("/", "-"))
        assert precious.read_text() == "precious"
    for number in range(1, 5):
        with monkeypatch.context() as patch:
            failing_at(patch, "replace", number)
            with pytest.raises(OSError, match="No space left"):
                write_shared_run(runs / "card", tmp_path / "shared")
        assert not is_finished(tmp_path / "shared")
    write_shared_run(runs / "card", tmp_path / "shared")
    assert is_finished(tmp_path / "shared")
    assert [event["event"] for event in read_events(tmp_path / "shared")] == ["shared"]


def test_what_is_missing_large_or_damaged_is_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("config.json", "model.safetensors", "recipe.toml", "preprocessing/preprocessing.json"):
        card = shutil.copytree(runs / "card", tmp_path / missing.replace("/", "-"))
        if missing == "model.safetensors":
            (card / missing).write_bytes(b"nothing")
            with pytest.raises(ValueError, match=r"model\.safetensors"):
                write_shared_run(card, tmp_path / "shared")
        (card / missing).unlink()
        with pytest.raises(FileNotFoundError, match=f"model shared by `models card` in .*, got no {missing}"):
            write_shared_run(card, tmp_path / "shared")
    with pytest.raises(FileNotFoundError, match="expected a run with a model in"):
        write_model_card(tmp_path, tmp_path / "shared")
    monkeypatch.setattr(model_card, "LARGEST", 5_000)
    with pytest.raises(ValueError, match=r"expected a model of at most 0.0 MB, got 0\.\d MB in "):
        write_model_card(runs / "tiny-seed0", tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_a_card_tells_of_the_weights_beside_it_alone(trained: Path, tmp_path: Path) -> None:
    evaluated(trained)
    model = open_run(trained).model
    with torch.no_grad():
        model.head.weight *= 3
    model.save_pretrained(trained / "model")  # as training that goes on does
    with pytest.raises(ValueError, match=r"weights in .*run/model, got .* \(clean\): evaluate"):
        write_model_card(trained, tmp_path / "card")
    evaluated(trained)
    assert write_model_card(trained, tmp_path / "card")
    (trained / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        write_model_card(trained, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_commands(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "card", str(runs / "tiny-seed0"), "-o", str(tmp_path / "card")]) == 0
    assert "README.md (" in capsys.readouterr().out
    assert main(["models", "card", str(tmp_path / "none"), "-o", str(tmp_path / "card")]) == 2
    out = tmp_path / "the way back"  # commands can be copied whatever a folder is called
    assert main(["models", "run", str(runs / "card"), "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"with: gpattention evaluate '{out}'" in text
    assert "recipe.json (" in text
    assert main(["evaluate", str(out), "--suite", "clean", "--limit", "20", "--device", "cpu"]) == 0
    (out / "model" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"--run '{out}' goes on"):
        open_run(out)
    assert main(["models", "run", str(tmp_path / "none"), "-o", str(tmp_path / "other")]) == 2
    assert "expected a model shared by" in capsys.readouterr().err


def test_a_plan_evaluates_shared_models_and_trains_the_others(runs: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path / "tiny.toml", replace(digits_recipe(), seed=1), "tiny")
    file, text = tmp_path / "plan.toml", (
        'evaluate = ["--limit", "20", "--samples", "2", "--predictors", "model"]\n'
        '[[runs]]\nshared = "{}"\nname = "taken"\n{}[[runs]]\nrecipe = "tiny"\nseeds = [0, 1]\n'
    )  # fmt: skip
    file.write_text(text.format(runs / "card", "seeds = [1]\n"))
    with pytest.raises(ValueError, match=r"unknown key 'seeds' in .* with a shared model, which is not"):
        load_plan(file)
    file.write_text(text.format("nowhere", ""))
    with pytest.raises(FileNotFoundError, match="no shared model 'nowhere', seen from it or from here"):
        load_plan(file)
    shutil.copytree(runs / "card", tmp_path / "models" / "tiny")
    file.write_text(text.format("models/tiny", ""))  # named from the plan
    plan = load_plan(file)
    assert [t.folder for t in plan.trainings] == ["taken-seed0", "tiny-seed0", "tiny-seed1"]
    assert "tiny-seed0" not in plan.sources()  # a shared model has no first phase to give
    part = plan.only(["taken"])
    for _ in range(2):  # a second time there is nothing to do
        assert train_plan(part, tmp_path / "runs", device="cpu") == []
    weights = Path("model") / "model.safetensors"
    taken = (tmp_path / "runs" / "taken-seed0" / weights).read_bytes()
    assert taken == (runs / "tiny-seed0" / weights).read_bytes()
    assert [outcome.code for outcome in evaluate_plan(part, tmp_path / "runs", device="cpu")] == [0]
    files = {file.name for file in write_results(part, tmp_path / "runs", tmp_path / "out")}
    assert "summary.md" in files
    assert not any(name.startswith("training-") for name in files)
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| taken-seed0 |  | elsewhere: a shared model |" in page
    assert "not finished" not in page
    shutil.rmtree(tmp_path / "runs")
    again = write_results(part, tmp_path / "runs", tmp_path / "out")  # from the records alone
    assert {file.name for file in again} == files
    assert (tmp_path / "out" / "README.md").read_text() == page
