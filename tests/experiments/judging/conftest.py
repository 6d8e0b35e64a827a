"""A small CIFAR, and fewer corruptions than nineteen."""

from pathlib import Path

import pytest

from gpattention.data.corruptions import CORRUPTIONS
from tests.data import official

TYPES = ("fog", "contrast", "snow")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    official.write_cifar10_binary(tmp_path, each=12)
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three corruptions instead of nineteen."""
    some = {name: CORRUPTIONS[name] for name in TYPES}
    for module in ("corrupted_source", "corrupted_folders", "corrupting"):
        monkeypatch.setattr(f"gpattention.experiments.judging.{module}.CORRUPTIONS", some)
    monkeypatch.setattr("gpattention.data.corrupted.CORRUPTIONS", TYPES)
