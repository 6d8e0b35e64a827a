"""A folder of regenerated corruptions says so when it is loaded, wherever it stands."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load_corrupted
from gpattention.data.corruptions import corrupt, regenerate
from tests.data import official


@pytest.fixture
def images() -> torch.Tensor:
    return torch.from_numpy(official.pixels(3)).view(3, 3, 32, 32)


def test_in_place_of_the_published_one(tmp_path: Path, images: torch.Tensor) -> None:
    regenerate(images, torch.tensor([3, 1, 2]), tmp_path / "CIFAR-10-C", names=["contrast"], seed=4)
    data = load_corrupted("cifar10-c", tmp_path, subset=True)
    assert data.name == "cifar10-c-regenerated"
    assert data.regenerated.name == "CIFAR-10-C (regenerated)"
    assert (data.regenerated.frost, data.regenerated.seed) == ("generated pictures", 4)


def test_published_ones_are_not_called_so(tmp_path: Path) -> None:
    official.write_corrupted(tmp_path)
    data = load_corrupted("cifar10-c", tmp_path, subset=True)
    assert (data.name, data.regenerated, data.severities) == ("cifar10-c", None, (1, 2, 3, 4, 5))


def test_other_severities_keep_their_numbers(tmp_path: Path, images: torch.Tensor) -> None:
    regenerate(images, torch.tensor([3, 1, 2]), tmp_path / "some", names=["contrast"], severities=(2, 5))
    data = load_corrupted("cifar10-c", tmp_path, folder="some", subset=True)
    assert data.severities == (2, 5)
    for severity in (2, 5):
        part = data.part("contrast", severity)
        assert part.images.equal(corrupt(images, "contrast", severity))
        assert part.labels.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="severity among 2, 5, got 3"):
        data.part("contrast", 3)


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"name": "x"}', '{"recipe": {"severities": 3}}'])
def test_a_broken_record_is_refused(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    np.save(folder / "fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    (folder / "regenerated.json").write_text(content)
    with pytest.raises(ValueError, match=r"regenerated\.json: expected the record of"):
        load_corrupted("cifar10-c", tmp_path, folder="mine", subset=True)
