"""`gpattention data`: lists, checks with exit codes, downloads with a bar, corruptions."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import known, load
from gpattention.data.catalogue import CATALOGUE, Archive
from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, corrupt
from gpattention.evaluation.corrupted import corruption_names
from tests.cli.conftest import Run
from tests.data import official

NAMES = [entry.name for entry in known()]


@pytest.fixture(autouse=True)
def no_folder_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)


def test_the_list_names_every_dataset_with_or_without_a_folder(tmp_path: Path, run: Run) -> None:
    out = run("data", "list").out
    assert all(f"\n{name} " in out for name in NAMES)
    assert all(entry.page in out and entry.licence in out for entry in known())
    assert "Name the folder of the datasets with --data or GPATTENTION_DATA" in out
    official.write_cola(tmp_path)
    for folder, others in ((["--data", tmp_path], {"cola": "present"}), ([], {})):
        listed = json.loads(run("data", "list", *folder, "--json").out)
        unknown = dict.fromkeys(NAMES, "missing" if folder else "?")
        assert {entry["name"]: entry["state"] for entry in listed} == unknown | {"digits": "bundled"} | others


def test_check_fails_only_for_what_was_asked_for(tmp_path: Path, run: Run) -> None:
    for write in (official.write_cola, official.write_cifar10_binary, official.write_corrupted):
        write(tmp_path)
    here = ["--data", tmp_path]
    out = run("data", "check", *here).out
    assert all(out.count(f"{name} ") for name in NAMES)
    assert "17 missing: CIFAR-10-C/brightness.npy" in out
    assert "put LSUN.tar.gz (md5" in out
    assert "not here" not in run("data", "check", "digits", "cola", *here).out
    out = run("data", "check", "cola", "cifar10", "textures", *here, code=1).out
    assert out.endswith("not here as published: cifar10, textures\n")
    assert "--set data.options.subset=true" in out
    assert "gpattention data get textures   (downloads https://" in out
    assert "cifar100" not in out


def test_get_makes_the_folder_and_says_where_the_data_is(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    official.write_cola(tmp_path / "source")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(tmp_path / "source" / "cola_public", "cola_public")
    content, root = packed.getvalue(), tmp_path / "new" / "data"
    archive = Archive("cola.tar.gz", hashlib.md5(content).hexdigest(), "https://example.org/cola", 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(CATALOGUE["cola"], archive=archive))

    def download(
        url: str, file: Path, *_: object, progress: Callable[[int, int], None], **__: object
    ) -> None:
        for done in (len(content) // 2, len(content)):
            progress(done, len(content))
        file.write_bytes(content)

    monkeypatch.setattr("gpattention.data.catalogue.download", download)
    out, err = run("data", "get", "cola", "--data", root, "--keep")
    assert out == f"cola: {root / 'cola_public'}\n"
    assert err.startswith("cola 0.0 MiB in ")
    assert (root / "cola.tar.gz").is_file()
    run("data", "check", "cola", "--data", root)


def test_a_download_that_fails_takes_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> None:
        raise ConnectionError("could not download it: no route")

    monkeypatch.setattr("gpattention.data.catalogue.download", download)
    err = run("data", "get", "cola", "--data", tmp_path, code=1).err
    assert "no route; try again, or put cola_public_1.1.zip" in err
    assert err.count("\n") == 1


def test_corrupt_writes_what_the_library_computes(tmp_path: Path, run: Run) -> None:
    official.write_cifar10_binary(tmp_path)
    options = ["--types", "fog,contrast", "--severities", "2,5", "--seed", "3", "--subset", "--device", "cpu"]
    words, folder = (
        ["data", "corrupt", "cifar10", "--data", tmp_path, *options],
        tmp_path / "CIFAR-10-C-regenerated",
    )
    out, err = run(*words)
    assert "CIFAR-10-C (regenerated): 2 corruptions, severities 2, 5" in out
    assert f"folder: {folder}" in out
    assert err.startswith("cifar10, corrupted 16 images in ")
    clean = load("cifar10", tmp_path, subset=True).test
    for name in ("fog", "contrast"):
        found = torch.from_numpy(np.load(folder / f"{name}.npy")).permute(0, 3, 1, 2)
        expected = [corrupt(clean.images, name, severity, seed=3) for severity in (2, 5)]
        assert torch.equal(found, torch.cat(expected))
    assert np.array_equal(np.load(folder / "labels.npy"), np.tile(clean.labels.numpy(), 2))
    run(*words)  # nothing left to do
    assert "expected seed 4, got 3: take another folder" in run(*words, "--seed", "4", code=2).err


def test_types_are_names_and_categories() -> None:
    assert corruption_names(None) == tuple(CORRUPTIONS)
    assert corruption_names(["fog", "noise", "shot_noise"]) == ("fog", *CATEGORIES["noise"])
    assert set(corruption_names(list(CATEGORIES))) == set(CORRUPTIONS)


def test_data_alone_shows_its_help(run: Run) -> None:
    assert "gpattention data get cola cifar10" in run("data", code=2).out
