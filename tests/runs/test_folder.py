"""Training by recipe, and run folders read again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpattention.models import TextTransformer, VisionTransformer
from gpattention.runs import (
    Recipe,
    find_runs,
    open_run,
    open_trained,
    prepare,
)
from gpattention.studies.model_card import write_model_card
from gpattention.training import CheckpointError, train_recipe
from tests.runs import tiny_runs
from tests.runs.tiny_cola import write_tiny_cola

SMALL = tiny_runs.MODEL


def digits(**changes: Any) -> Recipe:
    usual: dict[str, Any] = {"optimizer": {"batch_size": 400, "learning_rate": 5e-3}, "phases": {"epochs": 2}}
    return tiny_runs.digits_recipe("softmax", **usual | changes)


def cola(attention: str = "softmax", epochs: int = 1) -> Recipe:
    changes = {
        "data.options.contextual": {"kind": "none"}, "model.attention": attention,
        "model.config": {**SMALL, "dropout": 0.0}, "optimizer.batch_size": 10,
        "optimizer.learning_rate": 1e-2, "phases.epochs": epochs, "checkpoint.every": epochs,
        "checkpoint.select": "last",
    }  # fmt: skip
    return tiny_runs.cola_recipe().replace(changes)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_recipe(digits(), tmp_path_factory.mktemp("runs") / "a").folder


def test_an_opened_run_is_what_was_trained(digits_run: Path) -> None:
    run = open_run(digits_run)
    assert (run.recipe, run.finished) == (digits(), True)
    assert isinstance(run.model, VisionTransformer)
    assert not run.model.training
    assert [row["epoch"] for row in run.rows] == [1, 2]
    assert (run.rows[-1]["phase"], run.rows[-1]["floor_share"]) == ("gp", None)
    data = prepare(run.recipe)
    validation = run.preprocessing.images(data.data.validation.images)  # type: ignore[union-attr]
    prediction = run.model.predict(validation, samples=0)
    accuracy = float((prediction.label == data.training.validation_labels).double().mean())
    assert accuracy == pytest.approx(max(row["validation_accuracy"] for row in run.rows))
    assert run.preprocessing is run.preprocessing


@pytest.mark.parametrize("attention", ["softmax", "cgp"])
def test_texts_are_learned(attention: str, tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path / "data", rows=(120, 20, 8))
    seen: list[int] = []
    train_recipe(cola(attention, 12), tmp_path / "run", root=root, progress=lambda p: seen.append(p.step))
    assert seen == list(range(1, len(seen) + 1))
    run = open_run(tmp_path / "run")
    assert isinstance(run.model, TextTransformer)
    inputs = run.preprocessing.sentences(["The old cat didn't sat.", "A dog didn't cat."])
    labels = run.model.predict(inputs).label.tolist()
    assert [run.preprocessing.classes[i] for i in labels] == ["acceptable", "unacceptable"]
    assert run.rows[-1]["validation_accuracy"] == 1.0


def test_resuming_needs_the_same_run_and_data(digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train_recipe(digits(), folder, resume=True)
    assert not (folder / "preprocessing").exists()
    with pytest.raises(CheckpointError, match="to resume: seed is 0 there and 1 here"):
        train_recipe(digits(seed=1), digits_run, resume=True)  # another seed has another split
    root = write_tiny_cola(tmp_path / "data")
    first = train_recipe(cola(), folder, root=root)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train_recipe(cola(), folder, root=root)
    again = train_recipe(cola(), folder, root=root, resume=True)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    train = root / "cola_public" / "tokenized" / "in_domain_train.tsv"
    train.write_text(train.read_text().replace("dog", "wolf"))
    with pytest.raises(ValueError, match="got other data of the same name"):
        train_recipe(cola(), folder, root=root, resume=True)


LARGEST = 2**43


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"attention": "cgp", "config": {"width": 17}}}, "multiple of heads"),
        ({"seed": LARGEST + 1}, f"seed from -{LARGEST} to {LARGEST}, got {LARGEST + 1}"),
        ({"seed": -LARGEST - 1}, f"seed from .*, got -{LARGEST + 1}"),
    ],
)
def test_mistakes_leave_no_folder(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train_recipe(digits(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [LARGEST, -LARGEST])
def test_the_largest_seeds_train(seed: int, tmp_path: Path) -> None:
    assert len(train_recipe(digits(seed=seed), tmp_path / "run").rows) == 2


def test_runs_are_found_below_a_folder(digits_run: Path, tmp_path: Path) -> None:
    assert find_runs(digits_run.parent) == find_runs(digits_run) == [digits_run]
    unfinished = tmp_path / "b" / "c"
    unfinished.mkdir(parents=True)
    (unfinished / "recipe.json").write_text((digits_run / "recipe.json").read_text())
    assert find_runs(tmp_path) == []
    assert find_runs(tmp_path, unfinished=True) == [unfinished]
    with pytest.raises(FileNotFoundError, match=r"expected a model in .*train --resume --run .*c goes on"):
        open_run(unfinished)
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected a run in"):
        open_run(tmp_path)


def test_damaged_runs_are_refused(digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = folder / "model"
    model.mkdir(parents=True)
    recipe = (digits_run / "recipe.json").read_text()
    for text, content, message in (
        ("{", "{}", r"recipe\.json"),
        (recipe, "{", r"config\.json is not JSON"),
        (recipe, "[]", r"config\.json: expected an object, got list"),
        (recipe, '{"model": "Other"}', "one of VisionTransformer, TextTransformer, got 'Other'"),
    ):
        (folder / "recipe.json").write_text(text)
        (model / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            open_run(folder)
    for file in ("config.json", "model.safetensors"):
        (model / file).write_bytes((digits_run / "model" / file).read_bytes())
    run = open_run(folder)
    assert (run.rows, run.events, run.finished) == ((), (), False)
    (folder / "events.jsonl").write_text('{"event": "validated"}\n{"eve')  # killed while it wrote
    assert open_run(folder).events == ({"event": "validated"},)
    for content, message in (
        ("half a li\n{}\n", r"events\.jsonl, line 1 is not JSON"),
        ('{}\n{"time": null}\n', r"events\.jsonl, line 2: expected 'time'"),
    ):
        (folder / "events.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            open_run(folder)


def test_a_shared_model_is_opened_as_a_run_without_records(digits_run: Path, tmp_path: Path) -> None:
    card = tmp_path / "card"
    write_model_card(digits_run, card)
    shared, run = open_trained(card), open_trained(digits_run)
    assert (shared.recipe, shared.preprocessing) == (run.recipe, run.preprocessing)
    assert (shared.rows, shared.events, len(run.rows)) == ((), (), 2)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, shared.model.state_dict()[name])
    (card / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a shared model in .* no config.json beside"):
        open_trained(card)


def test_a_first_phase_taken_over(tmp_path: Path) -> None:
    def trained(kind: str, name: str, **options: Any) -> Any:
        phases = {"kernel_epochs": 1, "epochs": 1}
        recipe = digits(model={"attention": kind, "config": SMALL}, phases=phases)
        return train_recipe(recipe, tmp_path / name, **options).rows

    trained("cgp", "cgp")
    whole = trained("direct", "whole")
    assert trained("direct", "taken", first_phase=tmp_path / "cgp") == whole
    assert open_run(tmp_path / "taken").preprocessing.kind == "images"
    assert trained("direct", "taken", resume=True, first_phase=tmp_path / "not looked at") == whole
