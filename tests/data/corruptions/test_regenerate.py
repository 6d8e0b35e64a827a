"""The folder of regenerated corruptions: its content, carrying on, refusing."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data.corruptions import CORRUPTIONS, corrupt, regenerate
from gpattention.data.corruptions.regenerate import regenerate as regenerate_function

from .pictures import pictures

IMAGES, LABELS = pictures(6, 16, 16), torch.arange(6) % 4
NAMES = ("fog", "contrast")


def record(folder: Path) -> dict:
    return json.loads((folder / "regenerated.json").read_text())


def test_all_of_it(tmp_path: Path) -> None:
    done = regenerate(IMAGES, LABELS, tmp_path / "new" / "folder", seed=4)
    folder = done.folder
    assert done.name == "CIFAR-10-C (regenerated)"
    assert done.corruptions == tuple(CORRUPTIONS)
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
    regenerate(IMAGES, LABELS, tmp_path / "whole", names=["snow"], severities=[1, 4])
    monkeypatch.setitem(regenerate_function.__globals__, "_IMAGES_AT_ONCE", 4)
    calls = []
    regenerate(
        IMAGES, LABELS, tmp_path / "parts", names=["snow"], severities=[1, 4],
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
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


def test_a_missing_file_is_made_again(tmp_path: Path) -> None:
    regenerate(IMAGES, LABELS, tmp_path, names=NAMES)
    content = (tmp_path / "fog.npy").read_bytes()
    for file in ("fog.npy", "labels.npy"):
        (tmp_path / file).unlink()
    regenerate(IMAGES, LABELS, tmp_path, names=NAMES)
    assert (tmp_path / "fog.npy").read_bytes() == content
    assert (tmp_path / "labels.npy").is_file()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"severities": (1, 2)}, "severities"),
        ({"images": IMAGES.flip(0)}, "images"),
        ({"labels": LABELS.flip(0)}, "labels"),
        ({"frost": pictures(1, 100, 100)}, "frost"),
    ],
)
def test_another_recipe_is_refused(tmp_path: Path, change: dict, field: str) -> None:
    arguments = {"images": IMAGES, "labels": LABELS, "folder": tmp_path, "names": ["contrast"]}
    regenerate(**arguments)
    with pytest.raises(ValueError, match=f"regenerated.json: expected {field} .*got .*another folder"):
        regenerate(**(arguments | change))


def test_the_published_folder_is_not_touched(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"folder: expected .*with fog.npy; these may be the published"):
        regenerate(IMAGES, LABELS, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["fog.npy"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "expected an object, got list"),
        (b'{"files": {}}', "'recipe' and 'files'"),
        (b'{"recipe": {}}', "'recipe' and 'files'"),
    ],
)
def test_a_defective_record_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "regenerated.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        regenerate(IMAGES, LABELS, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": IMAGES.float() / 255}, "images: expected some, of type uint8, got 6 of torch.float32"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "images: expected some"),
        ({"images": IMAGES[0]}, r"images: expected shape"),
        ({"labels": LABELS[:5]}, r"labels: expected integers of shape \[6\], got torch.int64 of \(5,\)"),
        ({"labels": LABELS.float()}, "labels: expected integers"),
        ({"source": ""}, "source: expected the name"),
        ({"severities": ()}, "severities: expected some of 1 to 5 in ascending order"),
        ({"severities": (2, 1)}, r"ascending order, got \(2, 1\)"),
        ({"severities": (1, 7)}, "severity: expected 1, 2, 3, 4 or 5, got 7"),
        ({"names": ["rain"]}, "name: expected one of .* got 'rain'"),
    ],
)
def test_bad_requests_write_nothing(tmp_path: Path, change: dict, message: str) -> None:
    arguments = {"images": IMAGES, "labels": LABELS, "folder": tmp_path / "new"}
    with pytest.raises(ValueError, match=message):
        regenerate(**(arguments | change))
    assert not (tmp_path / "new").exists()


def test_many_classes_and_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(regenerate_function.__globals__, "version", missing)
    regenerate(IMAGES, LABELS + 300, tmp_path, names=["contrast"], severities=[1])
    assert np.load(tmp_path / "labels.npy").tolist() == (LABELS + 300).tolist()
    assert record(tmp_path)["made_by"]["gpattention"] == "not installed"
