"""The scripts for data: packed copies in the official layouts, and the sheet of corruptions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load
from tests.data import official

SCRIPTS = Path(__file__).parents[2] / "scripts"
image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
if not SCRIPTS.exists():
    pytest.skip("scripts are not part of a source distribution", allow_module_level=True)


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_packed_copies_become_official(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("cifar10", "ood", "cola", "cifar100_subset"):
        (source / name).mkdir(parents=True)
    x = official.pixels(24).reshape(24, 3, 32, 32).transpose(0, 2, 3, 1)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        mosaic = x[4 * i : 4 * i + 4].reshape(2, 2, 32, 32, 3).swapaxes(1, 2).reshape(64, 64, 3)
        image_module.fromarray(mosaic).save(source / "cifar10" / f"{name}.webp", lossless=True)
    labels = np.arange(24, dtype=np.uint8) % 10
    np.savez(source / "cifar10" / "labels.npz", train=labels[:20], test=labels[20:])
    official.write_cola(source / "cola")
    classes = np.array(["dotted", "banded", "dotted"])
    np.savez(source / "ood" / "textures_dtd10.npz", images=x[:3], classes=classes)
    official.write_cifar100_python(tmp_path)
    fine = np.arange(6, dtype=np.uint8)
    arrays = {"images": x[:6], "fine": fine, "coarse": fine // 5}
    np.savez(
        source / "cifar100_subset" / "cifar100_prefix_subset.npz",
        **{f"{part}_{name}": array for part in ("train", "test") for name, array in arrays.items()},
    )
    (source / "cifar100_subset" / "meta").write_bytes((tmp_path / "cifar-100-python" / "meta").read_bytes())
    printed = run("unpack_data.py", source, target)
    assert "cifar10: 20 training and 4 test images" in printed
    assert "textures: 3 images of 2 textures: a subset" in printed
    assert "tinyimagenet: not there" in printed
    cifar = load("cifar10", target, subset=True, ood=["textures"])
    assert cifar.test.images.equal(torch.from_numpy(x[20:]).permute(0, 3, 1, 2))
    assert cifar.test.labels.tolist() == labels[20:].tolist()
    expected = torch.from_numpy(x[[1, 0, 2]]).permute(0, 3, 1, 2)  # by class, then by number
    assert cifar.ood["textures-subset"].images.equal(expected)
    assert load("cifar100", target, subset=True).test.labels.tolist() == fine.tolist()
    assert len(load("cola", target, subset=True).ood["out-of-domain"]) == 4


def test_the_sheet_is_drawn(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    for side, arguments in ((32, []), (16, ["--image", sheet, "--side", "16", "--seed", "1"])):
        printed = run("corruption_sheet.py", sheet, *arguments, "--zoom", "1")
        assert "19 corruptions at 5 severities" in printed
        with image_module.open(sheet) as opened:
            assert opened.format == "PNG"
            assert opened.size == (130 + 6 * (side + 4), 14 + 19 * (side + 4))
