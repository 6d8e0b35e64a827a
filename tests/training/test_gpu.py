"""Captured steps on a GPU: what eager steps give, failures that are named, runs that resume."""

import json
from pathlib import Path

import pytest
import torch

from gpattention.training import TrainingFailedError, TrainingStoppedError, fit
from gpattention.training.graphs import WARM_UP
from tests.training.toy import toy_data, toy_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KINDS = ("cgp", "direct", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")
PLAIN = {"model__config": {"width": 16, "heads": 2, "depth": 2, "dropout": 0.0}}


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Relative, over all weights: Adam turns rounding into whole steps where a gradient is nearly 0."""
    first, second = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (one, other))
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_eager_ones(kind: str, tmp_path: Path) -> None:
    recipe = toy_recipe(kind, **PLAIN)
    captured = fit(recipe, toy_data(), tmp_path / "graph", device="cuda")
    eager = fit(recipe, toy_data(), tmp_path / "eager", device="cuda", graphs=False)
    assert {e["engine"] for e in events(tmp_path / "graph", "phase")} == {"graph"}
    assert {e["engine"] for e in events(tmp_path / "eager", "phase")} == {"eager"}
    assert distance(captured.model, eager.model) < 5e-3
    for mine, other in zip(captured.rows, eager.rows, strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
        assert mine["train_regularizer"] == pytest.approx(other["train_regularizer"], rel=1e-3, abs=1e-6)


def test_the_gpu_trains_what_the_cpu_trains(tmp_path: Path) -> None:
    recipe = toy_recipe("cgp", **PLAIN)
    gpu = fit(recipe, toy_data(), tmp_path / "gpu", device="cuda")
    cpu = fit(recipe, toy_data(), tmp_path / "cpu")
    assert distance(gpu.model, cpu.model) < 1e-2


def test_accumulation_clipping_streaming_and_keyed_dropout_are_captured_too(tmp_path: Path) -> None:
    recipe = toy_recipe(
        "scgp", optimizer__accumulate=2, optimizer__batch_size=4, optimizer__clip=0.5,
        optimizer__keyed_dropout=True, data__stream=True, data__workers=0,
    )  # fmt: skip
    captured = fit(recipe, toy_data(), tmp_path / "graph", device="cuda")
    eager = fit(recipe, toy_data(), tmp_path / "eager", device="cuda", graphs=False)
    assert distance(captured.model, eager.model) < 5e-3


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
    import os
    import signal

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
        pytest.importorskip("lightning.fabric" if _has("lightning") else "lightning_fabric")
    result = fit(
        toy_recipe("cgp", phases__epochs=4), toy_data(96), tmp_path, device="cuda", precision=precision
    )
    assert result.rows[-1]["validation_accuracy"] > 0.9
    engine = events(tmp_path, "phase")[0]
    assert engine["engine"] == ("eager" if precision == "bf16-mixed" else "graph")
    assert (engine["reason"] or "").startswith("steps under autocast" if precision == "bf16-mixed" else "")


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
