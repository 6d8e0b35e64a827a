"""CIFAR-10 and CIFAR-100 as their authors publish them, and as folders of images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpattention.data.folders import class_folders, read_class_folders
from gpattention.data.images import Images
from gpattention.data.pickles import read_pickle
from gpattention.reading import read_text

SIDE = 32
_PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True, slots=True)
class Cifar:
    """Names of the files, and where the labels are in them."""

    name: str
    classes: int
    python: str  # folder of the pickled version
    python_train: tuple[str, ...]
    python_test: str
    python_meta: tuple[str, str]  # file and key of the class names
    python_labels: str
    binary: str  # folder of the binary version
    binary_train: tuple[str, ...]
    binary_test: str
    binary_meta: str
    label_bytes: int  # before the pixels of an image; the last one is the class

    @property
    def python_files(self) -> tuple[str, ...]:
        """All files of the pickled version."""
        return *self.python_train, self.python_test, self.python_meta[0]

    @property
    def binary_files(self) -> tuple[str, ...]:
        """All files of the binary version."""
        return *self.binary_train, self.binary_test, self.binary_meta


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    python="cifar-10-batches-py",
    python_train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    python_test="test_batch",
    python_meta=("batches.meta", "label_names"),
    python_labels="labels",
    binary="cifar-10-batches-bin",
    binary_train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    binary_test="test_batch.bin",
    binary_meta="batches.meta.txt",
    label_bytes=1,
)
CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    python="cifar-100-python",
    python_train=("train",),
    python_test="test",
    python_meta=("meta", "fine_label_names"),
    python_labels="fine_labels",
    binary="cifar-100-binary",
    binary_train=("train.bin",),
    binary_test="test.bin",
    binary_meta="fine_label_names.txt",
    label_bytes=2,
)


def read_cifar(kind: Cifar, root: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Training images, test images and class names, from the first of the three layouts that is whole."""
    layouts = [
        (root / kind.python, kind.python_files, _read_python),
        (root / kind.binary, kind.binary_files, _read_binary),
        (root / kind.name, ("train", "test"), _read_folders),
    ]
    begun = [(folder, files, read) for folder, files, read in layouts if folder.is_dir()]
    whole = [(f, n, read) for f, n, read in begun if all((f / name).exists() for name in n)]
    for folder, files, read in whole or begun:
        for name in files:
            if not (folder / name).exists():
                raise FileNotFoundError(f"expected {folder / name}, got nothing: is the dataset complete?")
        return read(kind, folder)
    raise FileNotFoundError(
        f"expected {kind.python}, {kind.binary} or {kind.name}/train in {root}, got none of them: "
        f"see get({kind.name!r}, root)"
    )


def _read_python(kind: Cifar, folder: Path) -> tuple[Images, Images, tuple[str, ...]]:
    file, key = kind.python_meta
    names = read_pickle(folder / file).get(key)
    train = [_pickled(folder / name, kind) for name in kind.python_train]
    return _joined(train), _pickled(folder / kind.python_test, kind), _names(folder / file, names, kind)


def _read_binary(kind: Cifar, folder: Path) -> tuple[Images, Images, tuple[str, ...]]:
    meta = folder / kind.binary_meta
    train = [_binary(folder / name, kind) for name in kind.binary_train]
    names = read_text(meta).split()
    return _joined(train), _binary(folder / kind.binary_test, kind), _names(meta, names, kind)


def _read_folders(kind: Cifar, folder: Path) -> tuple[Images, Images, tuple[str, ...]]:
    classes = _names(folder / "train", list(class_folders(folder / "train")), kind)
    train, test = (Images(*read_class_folders(folder / part, classes, SIDE)) for part in ("train", "test"))
    return train, test.select(_taking_turns(test.labels)), classes


def _taking_turns(labels: Tensor) -> Tensor:
    """Items in an order in which classes take turns: the first so many of a test set are of all classes."""
    seen: dict[int, int] = {}
    turns = []
    for item, label in enumerate(labels.tolist()):
        turns.append((seen.get(label, 0), label, item))
        seen[label] = seen.get(label, 0) + 1
    return torch.tensor([item for _, _, item in sorted(turns)], dtype=torch.int64)


def _pickled(file: Path, kind: Cifar) -> Images:
    content = read_pickle(file)
    pixels, labels = content.get("data"), content.get(kind.python_labels)
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise ValueError(
            f"{file}: expected 'data' to be an array and {kind.python_labels!r} a list, got {sorted(content)}"
        )
    if pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise ValueError(f"{file}: expected 'data' of shape [n, {_PIXELS}], got {pixels.shape}")
    if not all(isinstance(label, int) for label in labels):
        raise ValueError(f"{file}: expected {kind.python_labels!r} to be whole numbers")
    return _images(file, torch.tensor(pixels), torch.tensor(labels, dtype=torch.int64), kind)


def _binary(file: Path, kind: Cifar) -> Images:
    raw = np.fromfile(file, np.uint8)
    row = kind.label_bytes + _PIXELS
    if len(raw) == 0 or len(raw) % row:
        raise ValueError(f"{file}: expected rows of {row} bytes, got {len(raw)} bytes: truncated?")
    rows = torch.from_numpy(raw).view(-1, row)
    return _images(file, rows[:, kind.label_bytes :], rows[:, kind.label_bytes - 1].long(), kind)


def _images(file: Path, pixels: Tensor, labels: Tensor, kind: Cifar) -> Images:
    if len(labels) != len(pixels):
        raise ValueError(f"{file}: expected one label per image, got {len(labels)} for {len(pixels)} images")
    wrong = (labels < 0) | (labels >= kind.classes)
    if bool(wrong.any()):
        raise ValueError(f"{file}: expected labels from 0 to {kind.classes - 1}, got {int(labels[wrong][0])}")
    return Images(pixels.reshape(-1, 3, SIDE, SIDE), labels)


def _joined(parts: list[Images]) -> Images:
    return Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _names(file: Path, names: object, kind: Cifar) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) != kind.classes:
        got = len(names) if isinstance(names, list) else names
        raise ValueError(f"{file}: expected {kind.classes} class names, got {got}")
    return tuple(str(name) for name in names)
