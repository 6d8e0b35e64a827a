"""Short calls, runs to evaluate, and what is predicted meanwhile."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpattention.evaluation import EvaluationSettings, evaluate_run, evaluate_runs, run
from gpattention.runs import recipe_from_dict
from gpattention.runs.records import SuiteResult
from gpattention.training import train_recipe
from tests.runs.tiny_runs import MODEL


def evaluate(
    folder: Path, suites: Any = ("all",), progress: Any = None, **settings: Any
) -> dict[str, SuiteResult]:
    return evaluate_run(folder, EvaluationSettings(suites, **settings), progress=progress)


def evaluate_several(
    folders: list[Path], suites: Any, progress: Any = None, **settings: Any
) -> dict[Path, dict[str, SuiteResult]]:
    return evaluate_runs(folders, EvaluationSettings(suites, **settings), progress=progress)


def copies(runs: Iterable[Path], folder: Path) -> list[Path]:
    """Runs that a test may spoil."""
    return [shutil.copytree(run, folder / run.name) for run in runs]


def train_on(data: str, root: Path, seed: int = 0) -> Path:
    """A run on the small copy of cifar10 or cola below the root."""
    of_texts = {"type": "text", "config": {**MODEL, "embedding_width": 8}}
    model = of_texts if data == "cola" else {"config": {**MODEL, "patch": 16}}
    recipe = {
        "name": f"tiny-{data}-seed{seed}", "seed": seed, "data": {"name": data, "options": {"subset": True}},
        "model": {"attention": "cgp", **model}, "phases": {"epochs": 1},
        "optimizer": {"batch_size": 10 if data == "cola" else 90},
    }  # fmt: skip
    train_recipe(recipe_from_dict(recipe), root / f"run{seed}", root=root)
    return root / f"run{seed}"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sets that are predicted from now on."""
    seen, real = [], run.predict_items

    def predict(predictor: object, items: object, **more: object) -> object:
        seen.append(items.name)  # type: ignore[attr-defined]
        return real(predictor, items, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "predict_items", predict)
    return seen
