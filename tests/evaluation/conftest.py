"""Trained runs to copy, a small CIFAR, and fewer corruptions than nineteen."""

from pathlib import Path

import pytest

from gpattention.data.corruptions import CORRUPTIONS
from gpattention.training import train_recipe
from tests.data import official
from tests.runs.tiny_runs import digits_recipe

TYPES = ("fog", "contrast", "snow")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same recipe with three seeds, and another one; tests evaluate copies."""
    folder = tmp_path_factory.mktemp("pristine")
    recipes = {f"cgp{seed}": digits_recipe(name=f"tiny-seed{seed}", seed=seed) for seed in (0, 1, 2)}
    for name, recipe in {**recipes, "softmax": digits_recipe("softmax", name="plain")}.items():
        train_recipe(recipe, folder / name)
    return sorted(folder.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    official.write_cifar10_binary(tmp_path, each=12)
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three corruptions instead of nineteen."""
    some = {name: CORRUPTIONS[name] for name in TYPES}
    monkeypatch.setattr("gpattention.evaluation.corrupted.CORRUPTIONS", some)
    monkeypatch.setattr("gpattention.data.corrupted.CORRUPTIONS", TYPES)
