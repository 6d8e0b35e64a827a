"""Training on a toy problem: both phases, every kind, schedules, failures."""

import csv
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpattention import models
from gpattention.attention import list_attention
from gpattention.models import Prediction
from gpattention.runs import OptimizerRecipe, Recipe, TrainingData, read_events, recipe_from_dict
from gpattention.training import (
    CheckpointError,
    Schedule,
    TrainingFailedError,
    TrainingStep,
    TrainingStoppedError,
    build_model,
    fit,
    take_first_phase,
)
from gpattention.training.engine import SingleProcess
from gpattention.training.fit import validate
from gpattention.training.folder import list_checkpoints, read_checkpoint
from tests.training.toy import flat, toy_data, toy_recipe

KINDS = ("cgp", "direct", "kep-svgp", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_the_toy_problem(kind: str, tmp_path: Path) -> None:
    assert kind in list_attention()
    result = fit(toy_recipe(kind, phases__epochs=6, phases__kernel_epochs=6), toy_data(96), tmp_path / "run")
    assert max(row["validation_accuracy"] for row in result.rows) > 0.9
    prediction = result.model.predict(toy_data(96).validation, samples=4)
    assert float((prediction.label == toy_data(96).validation_labels).double().mean()) > 0.9


def test_a_run_folder_is_whole(tmp_path: Path) -> None:
    seen: list[TrainingStep] = []
    recipe = toy_recipe(checkpoint__keep=2)
    validated: list[Mapping[str, Any]] = []
    result = fit(recipe, toy_data(), tmp_path / "run", progress=seen.append, on_validation=validated.append)
    folder = result.folder
    assert tuple(validated) == result.rows
    assert json.loads((folder / "recipe.json").read_text()) == recipe.to_dict()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["phase"] for row in rows] == ["kernel", "kernel", "gp", "gp"]
    assert [int(row["step"]) for row in rows] == [4, 8, 12, 16]
    events = read_events(folder)
    others = [e["event"] for e in events if e["event"] != "validated"]
    assert others == ["phase", "phase", "warm start", "finished"]
    assert {e["reason"] for e in events if e["event"] == "phase"} == {"CUDA graphs need a CUDA device"}
    assert len(list_checkpoints(folder / "checkpoints")) == 2
    assert [p.step for p in seen] == list(range(1, 17))
    assert seen[0].regularizer is None
    assert isinstance(seen[-1].regularizer, float)
    assert seen[-1].alpha == pytest.approx(0.01)
    assert float(rows[-1]["floor_share"]) < 0.9


@pytest.mark.parametrize("kind", ["cgp", "kernel"])
def test_a_row_is_of_its_own_phase(kind: str, tmp_path: Path) -> None:
    """Rows every two epochs, and a first phase that ends between two of them."""
    seen: list[TrainingStep] = []
    changes = {"phases__kernel_epochs": 1, "phases__epochs": 1, "checkpoint__every": 2}
    recipe = toy_recipe(kind, **changes)
    [row] = fit(recipe, toy_data(), tmp_path / "run", progress=seen.append).rows
    late = [p for p in seen if p.phase == "gp"]
    assert row["phase"] == "gp"
    assert row["train_loss"] == pytest.approx(sum(p.loss for p in late) / len(late))
    if kind == "cgp":
        assert row["train_regularizer"] == pytest.approx(sum(p.regularizer or 0 for p in late) / len(late))


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path: Path) -> None:
    runs = (("a", 0), ("b", 0), ("c", 1))
    a, b, c = (flat(fit(toy_recipe(seed=seed), toy_data(), tmp_path / name).model) for name, seed in runs)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("select", "column", "best"), [("best", "validation_accuracy", max), ("best-nll", "validation_nll", min)]
)
def test_the_chosen_model_is_the_best_of_the_validations(
    select: str, column: str, best: Callable[[list[float]], float], tmp_path: Path
) -> None:
    """On labels that nothing predicts, so that the last model is not the best one."""
    data = toy_data()
    g = torch.Generator().manual_seed(1)
    data = replace(data, train_labels=data.train_labels[torch.randperm(len(data.train_labels), generator=g)])
    recipe = toy_recipe(checkpoint__select=select, phases__kernel_epochs=0, phases__epochs=8)
    result = fit(recipe, data, tmp_path / "run")
    found = [row[column] for row in result.rows]
    assert best(found) != found[-1]
    probs = result.model.predict(data.validation, samples=0).probs.double()
    right = (probs.argmax(-1) == data.validation_labels).double().mean()
    nll = -probs.gather(-1, data.validation_labels[:, None]).log().mean()
    assert float(right if select == "best" else nll) == pytest.approx(best(found), rel=1e-5)


def test_schedules() -> None:
    weights = {"regularizer__start": 0.1, "regularizer__end": 0.3}
    schedule = Schedule(toy_recipe(optimizer__final_learning_rate=1e-3, **weights), 4)
    assert (schedule.kernel_steps, schedule.total_steps) == (8, 16)
    assert [schedule.phase(s) for s in (0, 7, 8, 15)] == ["kernel", "kernel", "gp", "gp"]
    assert [schedule.learning_rate(s) for s in (0, 15)] == pytest.approx([5e-3, 1e-3])
    assert [schedule.alpha(s) for s in (7, 8, 15)] == pytest.approx([0, 0.1, 0.3])
    restarting = Schedule(toy_recipe(optimizer__restart=True), 4)
    assert [restarting.learning_rate(s) for s in (7, 8)] == pytest.approx([1e-5, 5e-3])


def test_broken_numbers_stop_the_run_with_a_post_mortem(tmp_path: Path) -> None:
    data = toy_data()
    data.train[5] = torch.nan
    with pytest.raises(TrainingFailedError, match=r"step \d+ \(gp phase\).*in layer 0 \(cgp\)"):
        fit(toy_recipe(phases__kernel_epochs=0), data, tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "post-mortem")
    assert read_events(tmp_path / "run")[-1]["event"] == "failed"


def test_a_strong_regulariser_warns_of_its_floor(tmp_path: Path) -> None:
    recipe = toy_recipe(
        regularizer__start=10.0, regularizer__end=10.0, regularizer__floor_warning=0.0,
        model__options={"regularizer": "marginal", "normalize": "none"}, model__attention="cgp",
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="of its noise floor"):
        fit(recipe, toy_data(), tmp_path / "run")


OPTIMIZERS = {
    "adam": ({"betas": [0.8, 0.99], "amsgrad": True}, 5e-3),
    "adamw": ({"weight_decay": 0.1}, 5e-3),
    "sgd": ({"momentum": 0.9, "nesterov": True}, 0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_learns_and_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options, rate = OPTIMIZERS[name]
    chosen = {"batch_size": 8, "learning_rate": rate, "name": name, "options": options}
    recipe = toy_recipe("cgp", optimizer=chosen, phases__epochs=4)
    whole = fit(recipe, toy_data(), tmp_path / "whole")
    assert whole.rows[-1]["train_loss"] < whole.rows[0]["train_loss"]

    def stop(step: TrainingStep) -> None:
        if step.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingStoppedError, match="at step 13"):
        fit(recipe, toy_data(), tmp_path / "run", progress=stop)
    resumed = fit(recipe, toy_data(), tmp_path / "run", resume=True)
    assert resumed.rows == whole.rows
    assert torch.equal(flat(resumed.model), flat(whole.model))


def test_the_optimiser_is_the_recipes() -> None:
    made = {
        name: OptimizerRecipe(name=name, options=options).build([torch.zeros(1)])
        for name, (options, _) in OPTIMIZERS.items()
    }
    assert [type(x) for x in made.values()] == [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
    assert made["sgd"].defaults["momentum"] == 0.9
    assert made["adamw"].defaults["weight_decay"] == 0.1
    assert made["adam"].defaults["betas"] == (0.8, 0.99)
    assert OptimizerRecipe() == OptimizerRecipe(name="adam", options={})
    captured = OptimizerRecipe(name="adamw").build([torch.zeros(1)], captured=True)
    assert (captured.defaults["fused"], captured.defaults["capturable"]) == (True, True)


# A first phase that is taken over gives the bits of one that is trained


def test_second_phases_of_one_first_phase(tmp_path: Path) -> None:
    data = toy_data()
    source = fit(toy_recipe("cgp"), data, tmp_path / "source")
    other = toy_recipe("scgp", model__options={"num_inducing": 3}, regularizer__end=0.5)
    whole = fit(other, data, tmp_path / "whole")
    take_first_phase(other, tmp_path / "taken", source.folder)
    taken = fit(other, data, tmp_path / "taken", resume=True)
    assert taken.rows == whole.rows
    for (name, a), b in zip(taken.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    event = read_events(tmp_path / "taken")[0]
    assert (event["event"], event["step"]) == ("first phase taken", 8)
    # a taken phase can be taken again, and a run is not overwritten
    take_first_phase(toy_recipe("direct"), tmp_path / "again", tmp_path / "taken")
    kept = [list_checkpoints(tmp_path / run / "first-phase")[0] for run in ("source", "again")]
    first, last = map(read_checkpoint, kept)
    assert first.state == last.state
    assert first.tensors.keys() == last.tensors.keys()
    assert all(torch.equal(x, last.tensors[name]) for name, x in first.tensors.items())
    with pytest.raises(FileExistsError, match="holds a run already"):
        take_first_phase(toy_recipe("direct"), tmp_path / "taken", tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optimizer.batch_size", 4, "optimizer.batch_size to be 4, got 8"),
        ("phases.epochs", 3, "phases.epochs to be 3, got 2"),
        ("phases.kernel_epochs", 1, "phases.kernel_epochs to be 1, got 2"),
        ("phases.kernel_epochs", 0, "no first phase"),
        ("phases.kernel_options", {"kernel": "ard_rbf"}, "options of phase 1.kernel"),
        ("model.options", {"normalize": "none"}, "options of phase 1.normalize"),
        ("model.attention", "softmax", "starts from kernel attention, got 'softmax'"),
        ("model.config.width", 32, "model.config.width to be 32, got 16"),
    ],
)
def test_other_first_phases_are_refused(tmp_path: Path, name: str, value: object, message: str) -> None:
    source, recipe = tmp_path / "source", toy_recipe("cgp")
    with pytest.raises(FileNotFoundError, match="expected a run in"):
        take_first_phase(recipe, tmp_path / "run", source)
    source.mkdir()
    (source / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    with pytest.raises(ValueError, match=message):
        take_first_phase(recipe.replace({name: value}), tmp_path / "run", source)
    with pytest.raises(CheckpointError, match="has not reached the end of its first phase"):
        take_first_phase(recipe, tmp_path / "run", source)
    assert not (tmp_path / "run").exists()


# A weight of a regulariser that the attention does not have is refused; the default and 0 are not

WITH = [(kind, {}) for kind in ("direct", "cgp", "scgp", "sgpa")]
WITHOUT = [(kind, {}) for kind in ("softmax", "softmax-gp", "kernel")] + [
    (kind, {"regularizer": "none"}) for kind, _ in WITH
]
Kind = tuple[str, dict[str, Any]]
IDLE: dict[str, set[float]] = {"start": {0.0}, "end": {0.0, 0.01}, "normalised": {True}}
number = st.sampled_from([0.0, 0.01]) | st.floats(0, 1e6)
weights_of = st.fixed_dictionaries({}, optional={"start": number, "end": number, "normalised": st.booleans()})


def weighted(kind: Kind, weights: dict[str, Any]) -> Recipe:
    attention, options = kind
    model = {"attention": attention, "options": options, "config": {"width": 8, "depth": 2, "heads": 2}}
    return recipe_from_dict({"model": model, "regularizer": weights})


@settings(deadline=None, max_examples=100)
@given(kind=st.sampled_from(WITH + WITHOUT), weights=weights_of)
def test_only_weights_without_effect_are_refused(kind: Kind, weights: dict[str, Any]) -> None:
    recipe, facts = weighted(kind, weights), toy_data().facts
    refused = [name for name, value in weights.items() if value not in IDLE[name]]
    if kind in WITH or not refused:
        build_model(recipe, facts)
        return
    with pytest.raises(ValueError, match="attention has no regulariser") as error:
        build_model(recipe, facts)
    message = str(error.value)
    assert f"as '{kind[0]}' attention has no regulariser" in message
    assert any(
        message.startswith(f"expected regularizer.{name} to be ") and message.endswith(f"got {weights[name]}")
        for name in refused
    )


def test_they_show_before_a_run_is_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected regularizer\.end to be 0\.0 or 0\.01, as .*, got 0\.1"):
        fit(weighted(WITHOUT[0], {"end": 0.1}), toy_data(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Echo(nn.Module):
    """Its logits are its inputs."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=inputs, layers=())

    def predict(self, inputs: Tensor, **options: int) -> Prediction:
        return models.predict(self, inputs, **options)


def test_validation_is_the_sums_written_by_hand() -> None:
    """exp(-60) is no zero: with probabilities cut at 1e-12 the first item would cost 27.6."""
    inputs = torch.tensor([[0.0, 60.0], [math.log(3), 0.0], [0.0, 0.0]])
    labels = torch.tensor([0, 0, 1])
    data = TrainingData(inputs, labels, inputs, labels, {})
    accuracy, nll = validate(SingleProcess(torch.device("cpu")), Echo(), data)  # type: ignore[arg-type]
    assert nll == pytest.approx((60 + math.log(4 / 3) + math.log(2)) / 3, rel=1e-6)
    assert accuracy == pytest.approx(1 / 3)
