"""Training on a toy problem: both phases, every kind, schedules, failures."""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpattention.attention import list_attention
from gpattention.data import Batch
from gpattention.training import Progress, Schedule, TrainingFailedError, fit
from gpattention.training.build import build_model
from gpattention.training.checkpoint import list_checkpoints
from gpattention.training.engine import EagerEngine
from gpattention.training.objective import Objective
from gpattention.training.schedule import Controls
from gpattention.training.single import SingleProcess
from tests.training.toy import toy_data, toy_recipe

KINDS = ("cgp", "direct", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_the_toy_problem(kind: str, tmp_path: Path) -> None:
    assert kind in list_attention()
    result = fit(toy_recipe(kind, phases__epochs=6, phases__kernel_epochs=6), toy_data(96), tmp_path / "run")
    assert max(row["validation_accuracy"] for row in result.rows) > 0.9
    prediction = result.model.predict(toy_data(96).validation, samples=4)
    assert float((prediction.label == toy_data(96).validation_labels).double().mean()) > 0.9


def test_a_run_folder_is_whole(tmp_path: Path) -> None:
    seen: list[Progress] = []
    recipe = toy_recipe(checkpoint__keep=2)
    told: list[Mapping[str, Any]] = []
    result = fit(recipe, toy_data(), tmp_path / "run", progress=seen.append, on_validation=told.append)
    folder = result.folder
    assert tuple(told) == result.rows
    assert json.loads((folder / "recipe.json").read_text()) == recipe.to_dict()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["phase"] for row in rows] == ["kernel", "kernel", "gp", "gp"]
    assert [int(row["step"]) for row in rows] == [4, 8, 12, 16]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] != "validated"] == [
        "phase",
        "phase",
        "warm start",
        "finished",
    ]
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
    seen: list[Progress] = []
    changes = {"phases__kernel_epochs": 1, "phases__epochs": 1, "checkpoint__every": 2}
    recipe = toy_recipe(kind, **changes)
    [row] = fit(recipe, toy_data(), tmp_path / "run", progress=seen.append).rows
    late = [p for p in seen if p.phase == "gp"]
    assert row["phase"] == "gp"
    assert row["train_loss"] == pytest.approx(sum(p.loss for p in late) / len(late))
    if kind == "cgp":
        assert row["train_regularizer"] == pytest.approx(sum(p.regularizer or 0 for p in late) / len(late))


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        result = fit(toy_recipe(seed=seed), toy_data(), tmp_path / name)
        weights.append(torch.cat([p.detach().flatten() for p in result.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    """Without dropout; noise is keyed to items, so cutting a batch changes only rounding."""
    common = {
        "model__config": {"width": 16, "heads": 2, "depth": 2, "dropout": 0.0},
        "phases__kernel_epochs": 0,
    }
    weights = []
    for size, accumulate in ((16, 1), (8, 2)):
        recipe = toy_recipe(optimizer__batch_size=size, optimizer__accumulate=accumulate, **common)
        result = fit(recipe, toy_data(), tmp_path / str(size))
        weights.append(torch.cat([p.detach().flatten() for p in result.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)


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
    schedule = Schedule(
        toy_recipe(optimizer__final_learning_rate=1e-3, regularizer__start=0.1, regularizer__end=0.3), 4
    )
    assert (schedule.kernel_steps, schedule.total_steps) == (8, 16)
    assert [schedule.phase(s) for s in (0, 7, 8, 15)] == ["kernel", "kernel", "gp", "gp"]
    assert schedule.learning_rate(0) == pytest.approx(5e-3)
    assert schedule.learning_rate(15) == pytest.approx(1e-3)
    assert schedule.alpha(7) == 0
    assert schedule.alpha(8) == pytest.approx(0.1)
    assert schedule.alpha(15) == pytest.approx(0.3)
    restarting = Schedule(toy_recipe(optimizer__restart=True), 4)
    assert restarting.learning_rate(8) == pytest.approx(5e-3)
    assert restarting.learning_rate(7) == pytest.approx(1e-5)


def test_broken_numbers_stop_the_run_with_a_post_mortem(tmp_path: Path) -> None:
    data = toy_data()
    data.train[5] = torch.nan
    with pytest.raises(TrainingFailedError, match=r"step \d+ \(gp phase\).*in layer 0 \(cgp\)"):
        fit(toy_recipe(phases__kernel_epochs=0), data, tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "post-mortem")
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"failed"' in events


def test_a_strong_regulariser_warns_of_its_floor(tmp_path: Path) -> None:
    recipe = toy_recipe(
        regularizer__start=10.0, regularizer__end=10.0, regularizer__floor_warning=0.0,
        model__options={"regularizer": "marginal", "normalize": "none"}, model__attention="cgp",
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="of its noise floor"):
        fit(recipe, toy_data(), tmp_path / "run")


def test_too_few_items_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 64 training items"):
        fit(toy_recipe(optimizer__batch_size=64), toy_data(), tmp_path / "run")


def test_a_step_trains_a_model_that_was_put_into_evaluation() -> None:
    recipe, data = toy_recipe("kernel"), toy_data()
    model = build_model(recipe, data.facts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = EagerEngine(
        SingleProcess(torch.device("cpu")), Objective(model, recipe, "gp"), optimizer, recipe
    )
    model.eval()
    items = torch.arange(8)
    engine.step([Batch(items, data.train[items], data.train_labels[items])], Controls(0, 0, 0.1, 0.0))
    assert all(module.training for module in model.modules())
