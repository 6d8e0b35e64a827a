"""The script that brings packed copies into the official layouts."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load
from tests.data import official

SCRIPT = Path(__file__).parents[2] / "scripts" / "unpack_data.py"


def test_packed_copies_become_official(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    if not SCRIPT.exists():
        pytest.skip("scripts are not part of a source distribution")
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("cifar10", "ood", "cola", "cifar100_subset"):
        (source / name).mkdir(parents=True)
    x = official.pixels(24).reshape(24, 3, 32, 32).transpose(0, 2, 3, 1)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        mosaic = x[4 * i : 4 * i + 4].reshape(2, 2, 32, 32, 3).swapaxes(1, 2).reshape(64, 64, 3)
        image.fromarray(mosaic).save(source / "cifar10" / f"{name}.webp", lossless=True)
    labels = np.arange(24, dtype=np.uint8) % 10
    np.savez(source / "cifar10" / "labels.npz", train=labels[:20], test=labels[20:])
    official.write_cola(source / "cola")
    np.savez(
        source / "ood" / "textures_dtd10.npz", images=x[:3], classes=np.array(["dotted", "banded", "dotted"])
    )
    official.write_cifar100_python(tmp_path)
    fine = np.arange(6, dtype=np.uint8)
    arrays = {"images": x[:6], "fine": fine, "coarse": fine // 5}
    np.savez(
        source / "cifar100_subset" / "cifar100_prefix_subset.npz",
        **{f"{part}_{name}": array for part in ("train", "test") for name, array in arrays.items()},
    )
    (source / "cifar100_subset" / "meta").write_bytes((tmp_path / "cifar-100-python" / "meta").read_bytes())

    done = subprocess.run(
        [sys.executable, SCRIPT, source, target], check=True, capture_output=True, text=True
    )
    assert "cifar10: 20 training and 4 test images" in done.stdout
    assert "textures: 3 images of 2 textures: a subset" in done.stdout
    assert "tinyimagenet: not there" in done.stdout
    cifar = load("cifar10", target, subset=True, ood=["textures"])
    assert cifar.test.images.equal(torch.from_numpy(x[20:]).permute(0, 3, 1, 2))
    assert cifar.test.labels.tolist() == labels[20:].tolist()
    expected = torch.from_numpy(x[[1, 0, 2]]).permute(0, 3, 1, 2)  # by class, then by number
    assert cifar.ood["textures-subset"].images.equal(expected)
    assert load("cifar100", target, subset=True).test.labels.tolist() == fine.tolist()
    assert len(load("cola", target, subset=True).ood["out-of-domain"]) == 4
