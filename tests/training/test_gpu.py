"""Captured steps on a GPU: what eager steps give, failures that are named, runs that resume."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from gpattention.runs import read_events
from gpattention.training import TrainingFailedError, TrainingStoppedError, fit
from gpattention.training.engine import WARM_UP
from tests.training.toy import flat, text_recipe, toy_data, toy_recipe, toy_texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KINDS = ("cgp", "direct", "kep-svgp", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")
PLAIN = {"model__config": {"width": 16, "heads": 2, "depth": 2, "dropout": 0.0}}


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_events(folder) if event["event"] == kind]


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Relative, over all weights: Adam turns rounding into whole steps where a gradient is nearly 0."""
    first, second = flat(one).cpu(), flat(other).cpu()
    return float((first - second).norm() / second.norm())


def optimizer(**chosen: object) -> dict[str, object]:
    return {"optimizer": {"batch_size": 8, "learning_rate": 5e-3, **chosen}, **PLAIN}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, PLAIN) for kind in KINDS),
        ("cgp", optimizer(name="adamw")), ("cgp", optimizer(name="sgd")),
        ("cgp", optimizer(name="sgd", options={"momentum": 0.9})),
        ("scgp", {
            "optimizer__accumulate": 2, "optimizer__batch_size": 4, "optimizer__clip": 0.5,
            "optimizer__keyed_dropout": True, "data__stream": True, "data__workers": 0,
        }),
    ],
    ids=str,
)  # fmt: skip
def test_captured_steps_equal_eager_ones(kind: str, changes: dict[str, object], tmp_path: Path) -> None:
    recipe = toy_recipe(kind, **changes)
    captured = fit(recipe, toy_data(), tmp_path / "graph", device="cuda")
    eager = fit(recipe, toy_data(), tmp_path / "eager", device="cuda", graphs=False)
    for engine in ("graph", "eager"):
        assert {e["engine"] for e in events(tmp_path / engine, "phase")} == {engine}
    assert distance(captured.model, eager.model) < 5e-3
    if changes is PLAIN:
        for mine, other in zip(captured.rows, eager.rows, strict=True):
            assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
            assert mine["train_regularizer"] == pytest.approx(other["train_regularizer"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "kernel", "scgp", "sgpa", "kep-svgp", "cgp", "direct"])
def test_so_do_those_of_texts_of_several_lengths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gpattention.models.predict"], "LENGTHS", 3)
    monkeypatch.setattr("gpattention.training.engine.POOL", 4)
    recipe = text_recipe(kind, data__group_by_length=True, phases__epochs=4)
    found = [fit(recipe, toy_texts(), tmp_path / f"{graphs}", device="cuda", graphs=graphs)
             for graphs in (True, False)]  # fmt: skip
    assert {e["engine"] for e in events(tmp_path / "True", "phase")} == {"graph"}
    assert distance(found[0].model, found[1].model) < 5e-3
    for mine, other in zip(found[0].rows, found[1].rows, strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=2e-3)


def test_the_gpu_trains_what_the_cpu_trains(tmp_path: Path) -> None:
    recipe = toy_recipe("cgp", **PLAIN)
    gpu = fit(recipe, toy_data(), tmp_path / "gpu", device="cuda")
    assert distance(gpu.model, fit(recipe, toy_data(), tmp_path / "cpu").model) < 1e-2


def test_a_broken_item_is_named_after_a_captured_step(tmp_path: Path) -> None:
    data = toy_data()
    recipe = toy_recipe("cgp", phases__kernel_epochs=0)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    step = WARM_UP + 0  # the last step of the first epoch is the first captured one
    data.train[order[step * 8]] = torch.nan
    with pytest.raises(TrainingFailedError, match=rf"step {step} \(gp phase\).*in layer 0 \(cgp\)"):
        fit(recipe, data, tmp_path / "run", device="cuda")
    assert events(tmp_path / "run", "failed")[0]["step"] == step


def test_a_stopped_captured_run_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    recipe = toy_recipe("cgp", phases__epochs=4)
    whole = fit(recipe, toy_data(), tmp_path / "whole", device="cuda")

    def stop(p: object) -> None:
        if p.step == 13:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingStoppedError):
        fit(recipe, toy_data(), tmp_path / "run", device="cuda", progress=stop)
    resumed = fit(recipe, toy_data(), tmp_path / "run", device="cuda", resume=True)
    assert distance(resumed.model, whole.model) < 5e-3
    started = fit(toy_recipe("cgp", phases__epochs=1), toy_data(), tmp_path / "short", device="cuda")
    assert distance(started.model, whole.model) > 2e-2  # the steps after the stop did move the weights


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions(precision: str, tmp_path: Path) -> None:
    if precision == "bf16-mixed":
        pytest.importorskip("lightning_fabric")
    result = fit(
        toy_recipe("cgp", phases__epochs=4), toy_data(96), tmp_path, device="cuda", precision=precision
    )
    assert result.rows[-1]["validation_accuracy"] > 0.9
    engine = events(tmp_path, "phase")[0]
    assert engine["engine"] == ("eager" if precision == "bf16-mixed" else "graph")
    assert (engine["reason"] or "").startswith("steps under autocast" if precision == "bf16-mixed" else "")
