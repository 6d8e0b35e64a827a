"""Commands as tests call them, and the runs and files that they are given, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gpattention.cli import main
from gpattention.data import load_digits
from gpattention.runs.recipe import write_recipe
from tests.runs.tiny_runs import digits_recipe, train_cola, train_digits

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command, which ends with `code`; gives what it printed, as `out` and `err`."""

    def run(*words: object, code: int = 0) -> Any:
        assert main([str(word) for word in words]) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(tmp_path_factory.mktemp("digits") / "tiny")


@pytest.fixture(scope="session")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cola")
    return train_cola(folder / "run", folder / "data")


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    file = tmp_path / f"{'a' * 70}.png"
    Image.fromarray(load_digits().test.images[0, 0].numpy()).save(file)
    return file


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_recipe(tmp_path / "tiny.toml", digits_recipe())
    return tmp_path / "tiny.toml"
