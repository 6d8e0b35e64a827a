"""A first phase that is taken over gives the bits of one that is trained."""

import json
from pathlib import Path

import pytest
import torch

from gpattention.training import CheckpointError, Recipe, fit, take_first_phase
from gpattention.training.checkpoint import list_checkpoints, read_checkpoint
from gpattention.training.recipe import recipe_from_dict
from tests.training.toy import toy_data, toy_recipe


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    plain = recipe.to_dict()
    plain[section] = {**plain[section], **values}
    return recipe_from_dict(plain)


def test_second_phases_of_one_first_phase(tmp_path: Path) -> None:
    data = toy_data()
    source = fit(toy_recipe("cgp"), data, tmp_path / "source")
    other = changed(toy_recipe("scgp", model__options={"num_inducing": 3}), "regularizer", end=0.5)
    whole = fit(other, data, tmp_path / "whole")
    take_first_phase(other, tmp_path / "taken", source.folder)
    taken = fit(other, data, tmp_path / "taken", resume=True)
    assert taken.rows == whole.rows
    for (name, a), b in zip(taken.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    events = [json.loads(line) for line in (tmp_path / "taken" / "events.jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[0]["step"]) == ("first phase taken", 8)


def test_a_taken_phase_can_be_taken_again(tmp_path: Path) -> None:
    fit(toy_recipe("cgp"), toy_data(), tmp_path / "a")
    take_first_phase(toy_recipe("direct"), tmp_path / "b", tmp_path / "a")
    take_first_phase(toy_recipe("scgp"), tmp_path / "c", tmp_path / "b")
    first, last = (read_checkpoint(list_checkpoints(tmp_path / run / "first-phase")[0]) for run in "ac")
    assert first.state == last.state
    assert first.tensors.keys() == last.tensors.keys()
    assert all(torch.equal(x, last.tensors[name]) for name, x in first.tensors.items())


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("optimizer", {"batch_size": 4}, "optimizer.batch_size to be 4, got 8"),
        ("phases", {"epochs": 3}, "phases.epochs to be 3, got 2"),
        ("phases", {"kernel_epochs": 1}, "phases.kernel_epochs to be 1, got 2"),
        ("phases", {"kernel_epochs": 0}, "no first phase"),
        ("phases", {"kernel_options": {"kernel": "ard_rbf"}}, "options of phase 1.kernel"),
        ("model", {"options": {"normalize": "none"}}, "options of phase 1.normalize"),
        ("model", {"attention": "softmax"}, "starts from kernel attention, got 'softmax'"),
        ("model", {"config": {"width": 32, "heads": 2, "depth": 2}}, "model.config.width to be 32, got 16"),
    ],
)  # fmt: skip
def test_other_first_phases_are_refused(
    tmp_path: Path, section: str, values: dict[str, object], told: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "recipe.json").write_text(json.dumps(toy_recipe("cgp").to_dict()))
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        take_first_phase(changed(toy_recipe("cgp"), section, **values), tmp_path / "run", source)
    assert not (tmp_path / "run").exists()


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run in"):
        take_first_phase(toy_recipe(), tmp_path / "run", tmp_path / "none")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.json").write_text(json.dumps(toy_recipe().to_dict()))
    with pytest.raises(CheckpointError, match="has not reached the end of its first phase"):
        take_first_phase(toy_recipe(), tmp_path / "run", tmp_path / "begun")


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    fit(toy_recipe("cgp"), toy_data(), tmp_path / "a")
    with pytest.raises(FileExistsError, match="holds a run already"):
        take_first_phase(toy_recipe("direct"), tmp_path / "a", tmp_path / "a")
