"""Published out-of-distribution folders, and one's own."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import ImageData, load, load_ood
from gpattention.data.ood import OOD_SETS
from tests.data import official
from tests.data.official import write_images
from tests.refusals import refusals


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("textures", "dtd/images/banded"), ("lsun-crop", "LSUN/test"),
        ("lsun-resize", "LSUN_resize/LSUN_resize"), ("tinyimagenet-crop", "Imagenet/test"),
        ("tinyimagenet-resize", "Imagenet_resize/Imagenet_resize"),
    ],
)  # fmt: skip
def test_published_sets(name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(64, 48), (40, 100)] if name == "textures" else [(32, 32), (36, 36)]
    with pytest.raises(FileNotFoundError, match=f"expected the images of {name} in"):
        load(name, tmp_path)
    write_images(tmp_path / folder, sizes, ["1.jpg", "2.JPEG"])
    with pytest.raises(ValueError, match=f"images of {name}, got 2: pass subset=True"):
        load(name, tmp_path)
    images = load(name, tmp_path, subset=True)
    assert images.images.shape == (2, 3, 32, 32)
    assert images.labels.tolist() == [-1, -1]
    monkeypatch.setitem(OOD_SETS, name, replace(OOD_SETS[name], images=2))
    assert load(name, tmp_path).images.equal(images.images)


def test_ones_own_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.write_cifar10_binary(tmp_path)
    write_images(tmp_path / "ood" / "photos", [(40, 40), (50, 60)])
    x = official.pixels(3).reshape(3, 32, 32, 3)
    np.savez(tmp_path / "ood" / "other.npz", images=x)
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path))
    elsewhere = str(tmp_path / "ood" / "other.npz")
    data = load("cifar10", ood=["photos", "other"], subset=True)
    assert isinstance(data, ImageData)
    assert {name: len(part) for name, part in data.ood.items()} == {"photos": 2, "other": 3}
    expected = torch.from_numpy(x).permute(0, 3, 1, 2)
    assert data.ood["other"].images.equal(expected)
    assert load("cifar10", ood=[elsewhere], subset=True).ood["other"].images.equal(expected)
    with pytest.raises(ValueError, match="sets of different names, got 'other' twice"):
        load("cifar10", ood=[elsewhere, "other"], subset=True)
    write_images(tmp_path, [(32, 32)], ["dtd/images/dotted/0.png"])
    assert list(load("cifar10", ood=["textures"], subset=True).ood) == ["textures-subset"]


def load_array(folder: Path, x: np.ndarray, name: str = "images") -> None:
    np.savez(folder / "a.npz", **{name: x})
    load_ood(str(folder / "a.npz"))


test_refusals = refusals([
    (lambda folder: load_ood(str(folder)), ": expected images", "none"),
    (lambda folder: load_array(folder, np.zeros(3), "pictures"), "an array 'images'", "pictures"),
    (lambda folder: load_array(folder, np.zeros((2, 16, 16, 3), "u1")), r"32, 32, 3\]", r"\(2, 16, 16, 3\)"),
])  # fmt: skip
test_missing = refusals(
    [
        (lambda root: load_ood("svhn", root), "source to be one of textures", "'svhn'; there is no"),
        (lambda root: load_ood("some/where", root), "source", "'some/where'"),
    ],
    FileNotFoundError,
)


def test_pillow_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'gpattention\[train\]'"):
        load_ood(str(tmp_path))
