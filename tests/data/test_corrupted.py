"""CIFAR-C arrays as published, and folders of regenerated corruptions: content, carrying on, refusing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import corrupted, corruptions, load, load_corrupted, regenerate
from gpattention.data.corrupted import CORRUPTIONS
from gpattention.data.corruptions import corrupt
from tests.data import official
from tests.data.corruptions.pictures import pictures
from tests.refusals import refusals

IMAGES, LABELS = pictures(6, 16, 16), torch.arange(6) % 4
NAMES = ("fog", "contrast")


def test_corrupted_images_by_severity(tmp_path: Path) -> None:
    arrays = official.write_corrupted(tmp_path)
    data = load("cifar10-c", tmp_path, subset=True)
    assert (data.name, data.regenerated, data.severities) == ("cifar10-c", None, (1, 2, 3, 4, 5))
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


def test_a_missing_or_incomplete_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"see get\('cifar100-c', root\)"):
        load("cifar100-c", tmp_path)
    official.write_corrupted(tmp_path, folder="CIFAR-100-C")
    with pytest.raises(FileNotFoundError, match="19 corruptions, got no brightness, contrast"):
        load("cifar100-c", tmp_path)
    official.write_corrupted(tmp_path, 1, CORRUPTIONS)
    data = load("cifar10-c", tmp_path, subset=True)
    assert data.corruptions == CORRUPTIONS
    assert (len(CORRUPTIONS), set(corruptions.CORRUPTIONS)) == (19, set(CORRUPTIONS))
    (data.folder / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels.npy"):
        data.part("snow", 1)


def part_of(root: Path, corruption: str = "fog", severity: int = 1, fog: object = None, **options) -> None:
    """Part of a published set of one image, whose fog may be another array or other bytes."""
    official.write_corrupted(root, 1, CORRUPTIONS)
    if isinstance(fog, bytes):
        (root / "CIFAR-10-C" / "fog.npy").write_bytes(fog)
    elif fog is not None:
        np.save(root / "CIFAR-10-C" / "fog.npy", fog)
    load("cifar10-c", root, **{"subset": True} | options).part(corruption, severity)


def recorded(root: Path, content: str) -> None:
    (root / "mine").mkdir()
    np.save(root / "mine" / "fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    (root / "mine" / "regenerated.json").write_text(content)
    load_corrupted("cifar10-c", root, folder="mine", subset=True)


RECORD = r"regenerated\.json: expected the record of"
test_refusals = refusals([
    (lambda root: part_of(root, subset=False), "10000 images of each severity", "1: pass subset"),
    (lambda root: part_of(root, "rain"), "corruption to be one of brightness", "rain"),
    (lambda root: part_of(root, severity=0), "severity to be one of 1, 2, 3, 4, 5", "0"),
    (lambda root: part_of(root, fog=np.zeros((5, 32, 32, 3))), r"fog to be uint8 \[n, 32,", "float64"),
    (lambda root: part_of(root, fog=b"no array"), r"fog.npy: expected a NumPy array", ""),
    (lambda root: load_corrupted("cifar10", root), "name to be one of cifar10-c, cifar100-c", "cifar10"),
    (lambda root: recorded(root, "no JSON"), RECORD, ""),
    (lambda root: recorded(root, '{"recipe": {"severities": 3}}'), RECORD, ""),
])  # fmt: skip


def test_a_regenerated_set_says_so_wherever_it_stands(tmp_path: Path) -> None:
    images, labels = torch.from_numpy(official.pixels(2)).view(2, 3, 32, 32), torch.tensor([3, 1])
    regenerate(images, labels, tmp_path / "CIFAR-10-C", names=["contrast"], severities=(2, 5), seed=4)
    for folder in (None, "CIFAR-10-C", tmp_path / "CIFAR-10-C"):
        data = load("cifar10-c", tmp_path, subset=True, **({} if folder is None else {"folder": folder}))
        assert (data.name, data.corruptions) == (
            "cifar10-c-regenerated" if folder is None else "CIFAR-10-C", ("contrast",)
        )  # fmt: skip
        assert data.regenerated.name == "CIFAR-10-C (regenerated)"
        assert (data.regenerated.frost, data.regenerated.seed) == ("generated pictures", 4)
        assert data.severities == (2, 5)
        for severity in (2, 5):
            part = data.part("contrast", severity)
            assert part.images.equal(corrupt(images, "contrast", severity, seed=4))
            assert part.labels.tolist() == [3, 1]
        with pytest.raises(ValueError, match="severity to be one of 2, 5, got 3"):
            data.part("contrast", 3)


def record(folder: Path) -> dict:
    return json.loads((folder / "regenerated.json").read_text())


def test_all_of_it(tmp_path: Path) -> None:
    done = regenerate(IMAGES, LABELS, tmp_path / "new" / "folder", seed=4)
    folder = done.folder
    assert done.corruptions == tuple(corruptions.CORRUPTIONS)
    expected = {f"{name}.npy" for name in CORRUPTIONS} | {"labels.npy", "regenerated.json"}
    assert {file.name for file in folder.iterdir()} == expected
    labels = np.load(folder / "labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == LABELS.tolist() * 5
    for name in CORRUPTIONS:
        array = np.load(folder / f"{name}.npy")
        assert array.dtype == np.uint8
        assert array.shape == (30, 16, 16, 3)
        changed = corrupt(IMAGES, name, 3, seed=4).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(array[12:18], changed)


def test_the_record_says_what_it_is(tmp_path: Path) -> None:
    done = regenerate(IMAGES, LABELS, tmp_path, source="CIFAR-100", seed=4, names=NAMES)
    said = record(tmp_path)
    assert said["name"] == done.name == "CIFAR-100-C (regenerated)"
    assert "regenerated" in said["note"].lower()
    assert said["recipe"]["seed"] == 4
    assert said["recipe"]["severities"] == [1, 2, 3, 4, 5]
    assert said["recipe"]["frost"] == done.frost == "generated pictures"
    assert set(said["made_by"]) == {"gpattention", "torch", "numpy"}
    for file, digest in said["files"].items():
        assert hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() == digest
    assert set(said["files"]) == {"fog.npy", "contrast.npy", "labels.npy"}


def test_given_frost_is_recorded(tmp_path: Path) -> None:
    frost = pictures(2, 100, 120, seed=1)
    done = regenerate(IMAGES, LABELS, tmp_path, names=["frost"], severities=(2, 5), frost=frost)
    assert done.frost.startswith("given pictures, sha256 ")
    assert record(tmp_path)["recipe"]["frost"] == done.frost
    expected = torch.cat([corrupt(IMAGES, "frost", severity, frost=frost) for severity in (2, 5)])
    assert np.array_equal(np.load(tmp_path / "frost.npy"), expected.permute(0, 2, 3, 1).numpy())
    assert np.load(tmp_path / "labels.npy").tolist() == LABELS.tolist() * 2


def test_a_second_call_does_nothing_again(tmp_path: Path) -> None:
    regenerate(IMAGES, LABELS, tmp_path, names=NAMES)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    calls = []
    regenerate(IMAGES, LABELS, tmp_path, names=NAMES, progress=lambda *call: calls.append(call))
    assert calls == [("fog", 30, 30), ("contrast", 30, 30)]
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before
    regenerate(IMAGES, LABELS, tmp_path, names=["pixelate"])
    assert set(record(tmp_path)["files"]) == {"fog.npy", "contrast.npy", "labels.npy", "pixelate.npy"}


def test_progress_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    asked = {"names": ["snow"], "severities": [1, 4], "progress": lambda *call: calls.append(call)}
    regenerate(IMAGES, LABELS, tmp_path / "whole", **asked)
    calls.clear()
    monkeypatch.setattr(corrupted, "_IMAGES_AT_ONCE", 4)
    regenerate(IMAGES, LABELS, tmp_path / "parts", **asked)
    assert calls == [("snow", 4, 12), ("snow", 6, 12), ("snow", 10, 12), ("snow", 12, 12)]
    whole, parts = (np.load(tmp_path / folder / "snow.npy") for folder in ("whole", "parts"))
    assert np.array_equal(whole, parts)


def test_carries_on_after_a_failure(tmp_path: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if name == "contrast" and done > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(IMAGES, LABELS, tmp_path, names=NAMES, progress=stop)
    # no part of the file that was being written is left
    assert {file.name for file in tmp_path.iterdir()} == {"fog.npy", "labels.npy", "regenerated.json"}
    fog = (tmp_path / "fog.npy").stat().st_mtime_ns
    regenerate(IMAGES, LABELS, tmp_path, names=NAMES)
    assert (tmp_path / "fog.npy").stat().st_mtime_ns == fog
    assert np.load(tmp_path / "contrast.npy").shape == (30, 16, 16, 3)


def again(folder: Path, **changed: object) -> None:
    """Regenerate into a folder that holds another recipe's."""
    arguments = {"images": IMAGES, "labels": LABELS, "folder": folder, "names": ["contrast"]}
    regenerate(**arguments)
    regenerate(**arguments | changed)


def with_record(folder: Path, content: bytes) -> None:
    (folder / "regenerated.json").write_bytes(content)
    regenerate(IMAGES, LABELS, folder)


ANOTHER = ".*got .*another folder"
test_refused_folders = refusals([
    (lambda folder: again(folder, seed=1), "regenerated.json: expected seed", ANOTHER),
    (lambda folder: again(folder, severities=(1, 2)), "regenerated.json: expected severities", ANOTHER),
    (lambda folder: again(folder, images=IMAGES.flip(0)), "regenerated.json: expected images", ANOTHER),
    (lambda folder: again(folder, frost=pictures(1, 100, 100)), "regenerated.json: expected frost", ANOTHER),
    (lambda folder: with_record(folder, b"{"), "regenerated.json", "is not JSON"),
    (lambda folder: with_record(folder, b"[]"), "expected an object", "list"),
    (lambda folder: with_record(folder, b'{"recipe": {}}'), "'recipe' and 'files'", ""),
])  # fmt: skip


def nothing_written(folder: Path, **changed: object) -> None:
    try:
        regenerate(**{"images": IMAGES, "labels": LABELS, "folder": folder / "new"} | changed)
    finally:
        assert not (folder / "new").exists()


test_bad_requests_write_nothing = refusals([
    (lambda f: nothing_written(f, images=IMAGES.float() / 255), "images: expected some", "torch.float32"),
    (lambda f: nothing_written(f, images=IMAGES[:0], labels=LABELS[:0]), "images: expected some", "0"),
    (lambda f: nothing_written(f, images=IMAGES[0]), "images: expected shape", r"\(3, 16, 16\)"),
    (lambda f: nothing_written(f, labels=LABELS[:5]), r"labels: expected integers of shape \[6\]", r"\(5,\)"),
    (lambda f: nothing_written(f, labels=LABELS.float()), "labels: expected integers", "float32"),
    (lambda f: nothing_written(f, source=""), "source: expected the name", ""),
    (lambda f: nothing_written(f, severities=()), "severities: expected some of 1 to 5", ""),
    (lambda f: nothing_written(f, severities=(2, 1)), "severities.*ascending order", r"\(2, 1\)"),
    (lambda f: nothing_written(f, severities=(1, 7)), "severity: expected 1, 2, 3, 4 or 5", "7"),
    (lambda f: nothing_written(f, names=["rain"]), "name to be one of", "rain"),
])  # fmt: skip


def test_the_published_folder_is_not_touched(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"folder: expected .*with fog\.npy"):
        regenerate(IMAGES, LABELS, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["fog.npy"]


def test_labels_of_many_classes(tmp_path: Path) -> None:
    regenerate(IMAGES, LABELS + 300, tmp_path, names=["contrast"], severities=[1])
    assert np.load(tmp_path / "labels.npy").tolist() == (LABELS + 300).tolist()
