"""`gpattention data`: lists, checks with exit codes, downloads with a bar, corruptions."""

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpattention.cli import main
from gpattention.data import known, load
from gpattention.data.catalogue import CATALOGUE, Archive
from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, corrupt
from gpattention.data.downloading import md5_of
from gpattention.experiments.judging.corrupting import corrupt_test_set, corruption_names, read_pictures
from tests.data import official

Output = pytest.CaptureFixture[str]
NAMES = [entry.name for entry in known()]


@pytest.fixture(autouse=True)
def no_folder_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)


def test_the_list_names_every_dataset_with_or_without_a_folder(tmp_path: Path, capsys: Output) -> None:
    assert main(["data", "list"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n{name} " in told for name in NAMES)
    assert all(entry.page in told and entry.licence in told for entry in known())
    assert "Name the folder of the datasets with --data or GPATTENTION_DATA" in told
    official.write_cola(tmp_path)
    assert main(["data", "list", "--data", str(tmp_path), "--json"]) == 0
    states = {entry["name"]: entry["state"] for entry in json.loads(capsys.readouterr().out)}
    assert states == dict.fromkeys(NAMES, "missing") | {"digits": "bundled", "cola": "present"}
    assert main(["data", "list", "--json"]) == 0
    states = {entry["name"]: entry["state"] for entry in json.loads(capsys.readouterr().out)}
    assert states == dict.fromkeys(NAMES, "?") | {"digits": "bundled"}


def test_check_fails_only_for_what_was_asked_for(tmp_path: Path, capsys: Output) -> None:
    official.write_cola(tmp_path)
    official.write_cifar10_binary(tmp_path)
    official.write_corrupted(tmp_path)
    here = ["--data", str(tmp_path)]
    assert main(["data", "check", *here]) == 0
    told = capsys.readouterr().out
    assert all(told.count(f"{name} ") for name in NAMES)
    assert "17 missing: CIFAR-10-C/brightness.npy" in told
    assert "put LSUN.tar.gz (md5" in told
    assert main(["data", "check", "digits", "cola", *here]) == 0
    assert "not here" not in capsys.readouterr().out
    assert main(["data", "check", "cola", "cifar10", "textures", *here]) == 1
    told = capsys.readouterr().out
    assert told.endswith("not here as published: cifar10, textures\n")
    assert "--set data.options.subset=true" in told
    assert "gpattention data get textures   (downloads https://" in told
    assert "cifar100" not in told


@pytest.fixture
def cola_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """CoLA as an archive that a pretended download brings."""
    source = tmp_path / "source"
    official.write_cola(source)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(source / "cola_public", "cola_public")
    (tmp_path / "packed").write_bytes(packed.getvalue())
    archive = Archive("cola.tar.gz", md5_of(tmp_path / "packed"), "https://example.org/cola.tar.gz", 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(CATALOGUE["cola"], archive=archive))

    def download(
        url: str, file: Path, *_: object, progress: Callable[[int, int], None], **__: object
    ) -> None:
        total = len(packed.getvalue())
        for done in (total // 2, total):
            progress(done, total)
        file.write_bytes(packed.getvalue())

    monkeypatch.setattr("gpattention.data.getting.download", download)
    return download


@pytest.mark.usefixtures("cola_archive")
def test_get_makes_the_folder_and_tells_where_the_data_is(tmp_path: Path, capsys: Output) -> None:
    root = tmp_path / "new" / "data"
    assert main(["data", "get", "cola", "--data", str(root), "--keep"]) == 0
    told = capsys.readouterr()
    assert told.out == f"cola: {root / 'cola_public'}\n"
    assert told.err.startswith("cola 0.0 MiB in ")
    assert (root / "cola.tar.gz").is_file()
    assert main(["data", "check", "cola", "--data", str(root)]) == 0


def test_a_download_that_fails_takes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def download(*_: object, **__: object) -> None:
        raise ConnectionError("could not download it: no route")

    monkeypatch.setattr("gpattention.data.getting.download", download)
    assert main(["data", "get", "cola", "--data", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "no route; try again, or put cola_public_1.1.zip" in told
    assert told.count("\n") == 1


def test_corrupt_writes_what_the_library_computes(tmp_path: Path, capsys: Output) -> None:
    official.write_cifar10_binary(tmp_path)
    options = ["--types", "fog,contrast", "--severities", "2,5", "--seed", "3", "--subset", "--device", "cpu"]
    assert main(["data", "corrupt", "cifar10", "--data", str(tmp_path), *options]) == 0
    told = capsys.readouterr()
    folder = tmp_path / "CIFAR-10-C-regenerated"
    assert "CIFAR-10-C (regenerated): 2 corruptions, severities 2, 5" in told.out
    assert f"folder: {folder}" in told.out
    assert told.err.startswith("cifar10, corrupted 16 images in ")
    clean = load("cifar10", tmp_path, subset=True).test
    for name in ("fog", "contrast"):
        found = torch.from_numpy(np.load(folder / f"{name}.npy")).permute(0, 3, 1, 2)
        expected = [corrupt(clean.images, name, severity, seed=3) for severity in (2, 5)]
        assert torch.equal(found, torch.cat(expected))
    assert np.array_equal(np.load(folder / "labels.npy"), np.tile(clean.labels.numpy(), 2))
    assert main(["data", "corrupt", "cifar10", "--data", str(tmp_path), *options]) == 0  # nothing left to do
    assert main(["data", "corrupt", "cifar10", "--data", str(tmp_path), *options, "--seed", "4"]) == 2
    assert "regenerate with another recipe into another folder" in capsys.readouterr().err


def test_frost_takes_pictures(tmp_path: Path) -> None:
    official.write_cifar10_binary(tmp_path)
    pictures = tmp_path / "frost"
    pictures.mkdir()
    generator = np.random.default_rng(0)
    for name in ("b", "a"):
        Image.fromarray(generator.integers(0, 256, (200, 180, 3), np.uint8)).save(pictures / f"{name}.png")
    read = read_pictures(pictures)
    assert [tuple(picture.shape) for picture in read] == [(3, 200, 180)] * 2
    made = corrupt_test_set(
        "cifar10",
        tmp_path,
        folder=tmp_path / "mine",
        types=["frost"],
        severities=[1],
        frost=pictures,
        subset=True,
    )
    assert made.frost.startswith("given pictures, sha256")
    options = {"types": ["frost"], "severities": [1], "subset": True}
    found_there = corrupt_test_set("cifar10", tmp_path, **options)  # type: ignore[arg-type]
    assert found_there.frost == made.frost
    drawn = corrupt_test_set("cifar10", tmp_path, folder=tmp_path / "x", frost="generated", **options)  # type: ignore[arg-type]
    assert drawn.frost == "generated pictures"
    clean = load("cifar10", tmp_path, subset=True).test.images
    found = torch.from_numpy(np.load(tmp_path / "mine" / "frost.npy")).permute(0, 3, 1, 2)
    assert torch.equal(found, corrupt(clean, "frost", 1, frost=read))
    (pictures / "c.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"c.png: expected an image"):
        read_pictures(pictures)
    with pytest.raises(FileNotFoundError, match=r"expected pictures in the folder .*none"):
        read_pictures(tmp_path / "none")


def test_types_are_names_and_categories() -> None:
    assert corruption_names(None) == tuple(CORRUPTIONS)
    assert corruption_names(["fog", "noise", "shot_noise"]) == ("fog", *CATEGORIES["noise"])
    assert set(corruption_names(list(CATEGORIES))) == set(CORRUPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["check"],
            "expected --data FOLDER, or GPATTENTION_DATA, to say where the datasets lie, got neither",
        ),
        (["check", "mnist"], "expected NAME to be one of digits, cifar10"),
        (["check", "--data", "nowhere"], "got nowhere"),
        (["get", "lsun-crop", "--data", "."], "put LSUN.tar.gz"),
        (["get", "digits", "--data", "."], "which comes with the library"),
        (["corrupt", "cifar10", "--data", ".", "--types", "rain"], "expected types among noise, blur"),
        (
            ["corrupt", "cifar10", "--data", ".", "--severities", "x"],
            "expected --severities to be whole numbers",
        ),
        (["corrupt", "cifar10", "--data", ".", "--frost", "none"], "expected pictures in the folder none"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_data_alone_shows_its_help(capsys: Output) -> None:
    assert main(["data"]) == 2
    assert "gpattention data get cola cifar10" in capsys.readouterr().out


def test_only_cifar_is_corrupted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected name to be one of cifar10, cifar100, got 'cola'"):
        corrupt_test_set("cola", tmp_path)
