"""CIFAR-C arrays, published out-of-distribution folders, and one's own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import ImageData, corruptions, load, load_corrupted, load_ood
from gpattention.data.corrupted import CORRUPTIONS
from gpattention.data.folders import image_files, read_images
from gpattention.data.ood import OOD_SETS, OodSet
from tests.data import official


def write_images(folder: Path, sizes: list[tuple[int, int]], names: list[str] | None = None) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for i, (width, height) in enumerate(sizes):
        file = folder / (names[i] if names else f"{i:05d}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        grid = (
            np.add.outer(np.arange(height), 3 * np.arange(width))[..., None] + np.array([0, 50, 100]) + 7 * i
        )
        image.fromarray((grid % 256).astype(np.uint8)).save(file)


def test_corrupted_images_by_severity(tmp_path: Path) -> None:
    arrays = official.write_corrupted(tmp_path)
    data = load("cifar10-c", tmp_path, subset=True)
    assert data.corruptions == ("fog", "snow")
    for severity in range(1, 6):
        part = data.part("snow", severity)
        rows = slice(3 * severity - 3, 3 * severity)
        assert part.images.equal(torch.from_numpy(arrays["snow"][rows]).permute(0, 3, 1, 2))
        assert part.labels.tolist() == [0, 1, 2]


def test_corrupted_images_are_mapped_and_stay_as_they_are(tmp_path: Path) -> None:
    official.write_corrupted(tmp_path)
    file = tmp_path / "CIFAR-10-C" / "fog.npy"
    before = file.read_bytes()
    data = load_corrupted("cifar10-c", tmp_path, subset=True)
    assert isinstance(data._array("fog"), np.memmap)
    part = data.part("fog", 2)
    part.images.zero_()
    assert not part.images.any()
    assert file.read_bytes() == before


def test_regenerated_images_are_read_like_published_ones(tmp_path: Path) -> None:
    assert set(corruptions.CORRUPTIONS) == set(CORRUPTIONS)
    images = torch.from_numpy(official.pixels(2)).view(2, 3, 32, 32)
    corruptions.regenerate(images, torch.tensor([3, 1]), tmp_path / "mine", names=["brightness"])
    for folder in ("mine", tmp_path / "mine"):
        data = load("cifar10-c", tmp_path, folder=folder, subset=True)
        assert (data.name, data.corruptions) == ("mine", ("brightness",))
        part = data.part("brightness", 4)
        assert part.images.equal(corruptions.corrupt(images, "brightness", 4))
        assert part.labels.tolist() == [3, 1]


def test_published_numbers_of_corrupted_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"see get\('cifar100-c', root\)"):
        load("cifar100-c", tmp_path)
    official.write_corrupted(tmp_path, folder="CIFAR-100-C")
    with pytest.raises(FileNotFoundError, match="19 corruptions, got no brightness, contrast"):
        load("cifar100-c", tmp_path)
    official.write_corrupted(tmp_path, 1, CORRUPTIONS)
    with pytest.raises(ValueError, match="10000 images of each severity, got 1: pass subset"):
        load("cifar10-c", tmp_path).part("fog", 1)
    data = load("cifar10-c", tmp_path, subset=True)
    assert data.corruptions == CORRUPTIONS
    assert len(CORRUPTIONS) == 19
    with pytest.raises(ValueError, match=r"corruption to be one of brightness.*got 'rain'"):
        data.part("rain", 1)
    with pytest.raises(ValueError, match="severity from 1 to 5, got 0"):
        data.part("fog", 0)
    np.save(data.folder / "fog.npy", np.zeros((5, 32, 32, 3)))
    with pytest.raises(ValueError, match=r"fog to be uint8 \[n, 32, 32, 3\].*got float64"):
        data.part("fog", 1)
    (data.folder / "fog.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"fog.npy: expected a NumPy array"):
        data.part("fog", 1)
    (data.folder / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels.npy"):
        data.part("snow", 1)
    with pytest.raises(ValueError, match="name to be one of cifar10-c, cifar100-c, got 'cifar10'"):
        load_corrupted("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("textures", ["dtd/images/banded/banded_0002.jpg", "dtd/images/zigzagged/zigzagged_0001.jpg"]),
        ("lsun-crop", ["LSUN/test/0.jpg", "LSUN/test/1.jpg"]),
        ("lsun-resize", ["LSUN_resize/LSUN_resize/0.jpg", "LSUN_resize/LSUN_resize/1.jpg"]),
        ("tinyimagenet-crop", ["Imagenet/test/test_1.JPEG", "Imagenet/test/test_2.JPEG"]),
        (
            "tinyimagenet-resize",
            ["Imagenet_resize/Imagenet_resize/0.png", "Imagenet_resize/Imagenet_resize/1.png"],
        ),
    ],
)
def test_published_sets(name: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(64, 48), (40, 100)] if name == "textures" else [(32, 32), (36, 36)]
    with pytest.raises(FileNotFoundError, match=f"expected the images of {name} in"):
        load(name, tmp_path)
    write_images(tmp_path, sizes, files)
    with pytest.raises(ValueError, match=f"images of {name}, got 2: pass subset=True"):
        load(name, tmp_path)
    images = load(name, tmp_path, subset=True)
    assert images.images.shape == (2, 3, 32, 32)
    assert images.labels.tolist() == [-1, -1]
    known = OOD_SETS[name]
    monkeypatch.setitem(OOD_SETS, name, OodSet(name, known.folder, 2, known.fit))
    assert load(name, tmp_path).images.equal(images.images)


def test_fits(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    write_images(tmp_path, [(32, 32), (36, 40)])
    same, larger = image_files(tmp_path)
    original = torch.from_numpy(np.array(image.open(larger))).permute(2, 0, 1)
    cropped = read_images([larger], 32, "crop")[0]
    assert cropped.equal(original[:, 4:36, 2:34])
    assert read_images([same], 32, "exact")[0].shape == (3, 32, 32)
    assert read_images([same], 32, "resize").equal(read_images([same], 32, "exact"))
    by_hand = np.array(image.open(larger).resize((32, 36), image.Resampling.BILINEAR))[2:34]
    assert read_images([larger], 32, "resize")[0].equal(torch.from_numpy(by_hand).permute(2, 0, 1))
    assert read_images([same], 32, channels=1).shape == (1, 1, 32, 32)
    with pytest.raises(ValueError, match=r"00001.png: .*36 x 40 pixels for 32 x 32 \(fit 'exact'\)"):
        read_images([same, larger], 32)
    with pytest.raises(ValueError, match=r"32 x 32 pixels for 64 x 64 \(fit 'crop'\)"):
        read_images([same], 64, "crop")
    with pytest.raises(ValueError, match="fit to be one of exact, crop, resize, got 'squeeze'"):
        read_images([same], 32, "squeeze")
    with pytest.raises(ValueError, match="channels to be 1 or 3, got 4"):
        read_images([same], channels=4)
    same.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"00000.png: expected an image file that fits"):
        read_images([same])


def test_files_are_found_in_order(tmp_path: Path) -> None:
    write_images(tmp_path, [(4, 4)] * 4, ["b/1.png", "a/2.PNG", "a/10.jpg", "a/.hidden.png"])
    (tmp_path / "a" / "notes.txt").write_text("no image")
    assert [f.relative_to(tmp_path).as_posix() for f in image_files(tmp_path)] == [
        "a/10.jpg",
        "a/2.PNG",
        "b/1.png",
    ]


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


def test_odd_sources_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source to be one of textures.*got 'svhn'; there is no"):
        load_ood("svhn", tmp_path)
    with pytest.raises(FileNotFoundError, match="got 'some/where'"):
        load_ood("some/where", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected images, got none"):
        load_ood(str(tmp_path / "empty"))
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"folder or an .npz file, got .*x.txt"):
        load_ood(str(tmp_path / "x.txt"))
    np.savez(tmp_path / "a.npz", pictures=np.zeros(3))
    with pytest.raises(ValueError, match=r"expected an array 'images', got \['pictures'\]"):
        load_ood(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", images=np.zeros((2, 16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match=r"\[n, 32, 32, 3\], got uint8 of shape \(2, 16, 16, 3\)"):
        load_ood(str(tmp_path / "b.npz"))
    np.savez(tmp_path / "c.npz", images=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="Python objects, which are not read"):
        load_ood(str(tmp_path / "c.npz"))


def test_pillow_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'gpattention\[train\]'"):
        load_ood(str(tmp_path))
