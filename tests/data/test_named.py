"""`load` by name, the root, and the public names."""

import inspect
from pathlib import Path

import pytest

from gpattention import data
from gpattention.data import ImageData, data_root, known, load


def test_public_names_are_there_and_documented() -> None:
    assert [name for name in data.__all__ if not hasattr(data, name)] == []
    found = {n for n, x in vars(data).items() if n[0] != "_" and not inspect.ismodule(x)}
    assert found == set(data.__all__)
    for name in data.__all__:
        told = inspect.getdoc(getattr(data, name)) or ""
        assert len(told) >= 20
        assert not told.startswith(f"{name}(")


def test_unknown_names_and_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name to be one of digits, cifar10, cifar100, .*, got 'imagenet'"):
        load("imagenet")
    with pytest.raises(ValueError, match="options of digits among augment, got 'subset'"):
        load("digits", subset=True)
    with pytest.raises(ValueError, match="options of cola among form, subset, got 'augment'"):
        load("cola", tmp_path, augment=True)
    with pytest.raises(ValueError, match="options of textures among size, fit, subset, got 'ood'"):
        load("textures", tmp_path, ood=())
    with pytest.raises(ValueError, match="options of cifar10-c among folder, subset, got 'severity'"):
        load("cifar10-c", tmp_path, severity=1)


def test_text_is_no_truth_value(tmp_path: Path) -> None:
    """`--set data.options.augment=False` brings the text 'False', which is true."""
    with pytest.raises(ValueError, match="option augment of digits to be true or false, got 'False'"):
        load("digits", augment="False")
    with pytest.raises(ValueError, match="option subset of cola to be true or false, got 1"):
        load("cola", tmp_path, subset=1)


def test_every_known_dataset_can_be_asked_for(tmp_path: Path) -> None:
    for entry in known():
        if entry.name == "digits":
            assert isinstance(load("digits"), ImageData)
        else:
            with pytest.raises(FileNotFoundError):
                load(entry.name, tmp_path)


def test_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)
    with pytest.raises(ValueError, match=r"got none: name it with root \(--data .*\) or .* GPATTENTION_DATA"):
        load("cifar10")
    with pytest.raises(
        FileNotFoundError, match=r"expected root \(--data on the command line\) to be a folder, got "
    ):
        load("cifar10", tmp_path / "nowhere")
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        FileNotFoundError, match="expected the environment variable GPATTENTION_DATA to be a folder"
    ):
        load("cifar10")
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path))
    assert data_root() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(tmp_path / "other") == tmp_path / "other"
