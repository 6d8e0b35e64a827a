"""CIFAR in its three layouts."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import load
from gpattention.data.cifar_files import CIFAR10, read_cifar
from gpattention.data.normalisation import PUBLISHED
from tests.data import official


def write_folders(root: Path) -> tuple[np.ndarray, list[int]]:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    x, labels = official.pixels(24), [i % 10 for i in range(24)]
    for i, label in enumerate(labels):
        part = "train" if i < 12 else "test"
        folder = root / "cifar10" / part / official.CIFAR10_CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(x[i].reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{i:04d}.png")
    # test images take turns: the last two are the second of their class
    order = sorted(range(24), key=lambda i: (i >= 12, i >= 22, labels[i], i))
    return x[order], [labels[i] for i in order]


@pytest.mark.parametrize(
    "write", [official.write_cifar10_python, official.write_cifar10_binary, write_folders]
)
def test_three_layouts_one_dataset(write, tmp_path: Path) -> None:
    x, labels = write(tmp_path)
    train, test, classes = read_cifar(CIFAR10, tmp_path)
    assert classes == tuple(official.CIFAR10_CLASSES)
    images = torch.cat([train.images, test.images])
    assert images.equal(torch.from_numpy(x).view(-1, 3, 32, 32))
    assert torch.cat([train.labels, test.labels]).tolist() == labels


def test_split_normalisation_and_name(tmp_path: Path) -> None:
    official.write_cifar10_binary(tmp_path)
    data = load("cifar10", tmp_path, seed=5, subset=True)
    assert data.name == "cifar10-subset"
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 18, "validation": 2, "test": 4}
    assert data.normalisation.source == "training part"
    x = data.train.images.double() / 255
    assert torch.tensor(data.normalisation.mean, dtype=torch.float64).allclose(x.mean((0, 2, 3)))
    whole, _, _ = read_cifar(CIFAR10, tmp_path)
    both = torch.cat([data.train.images, data.validation.images]).flatten(1).tolist()
    assert sorted(both) == sorted(whole.images.flatten(1).tolist())
    again, other = (load("cifar10", tmp_path, seed=s, subset=True, validation=8) for s in (5, 6))
    assert len(again.validation) == 8
    assert not again.validation.images.equal(other.validation.images)
    published = load("cifar10", tmp_path, subset=True, normalisation="published", augment=True)
    assert published.normalisation == PUBLISHED["cifar10"]
    assert type(published.augmentation).__name__ == "CropAndFlip"
    assert data.augmentation is None
    assert data.patch == 4


def test_the_paper_split_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.write_cifar10_binary(tmp_path)
    monkeypatch.setattr("gpattention.data.cifar.TRAIN", 20)
    monkeypatch.setattr("gpattention.data.cifar.TEST", 4)
    monkeypatch.setattr("gpattention.data.cifar.VALIDATION", 7)
    data = load("cifar10", tmp_path)
    assert (data.name, len(data.train), len(data.validation)) == ("cifar10", 13, 7)


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    x, labels = official.write_cifar100_python(tmp_path)
    data = load("cifar100", tmp_path, subset=True)
    assert data.test.labels.tolist() == labels[6:]
    assert data.test.images.equal(torch.from_numpy(x[6:]).view(-1, 3, 32, 32))
    assert (len(data.classes), data.classes[17]) == (100, "class_17")
    binary = tmp_path / "b" / "cifar-100-binary"
    binary.mkdir(parents=True)
    for name, rows in (("train", slice(6)), ("test", slice(6, 12))):
        fine = np.array(labels[rows], np.uint8)[:, None]
        np.concatenate([fine // 5, fine, x[rows]], 1).tofile(binary / f"{name}.bin")
    (binary / "fine_label_names.txt").write_text("\n".join(data.classes) + "\n")
    same = load("cifar100", tmp_path / "b", subset=True)
    assert same.classes == data.classes
    assert same.train.images.equal(data.train.images)
    assert same.train.labels.equal(data.train.labels)


def test_a_whole_layout_goes_before_one_that_was_begun(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-py.data_batch_1, got nothing"):
        load("cifar10", tmp_path)
    official.write_cifar10_binary(tmp_path)
    assert len(load("cifar10", tmp_path, subset=True).test) == 4


def test_published_numbers_unless_a_subset_is_meant(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"cifar-10-batches-py, cifar-10-batches-bin or cifar10/train in"
    ):
        load("cifar10", tmp_path)
    official.write_cifar10_binary(tmp_path)
    with pytest.raises(
        ValueError, match="50000 training and 10000 test images of cifar10, got 20 and 4: pass subset"
    ):
        load("cifar10", tmp_path)
    for bad in (20, 2.5, "5"):
        with pytest.raises(ValueError, match=f"validation to be a whole number from 1 to 19, got {bad!r}"):
            load("cifar10", tmp_path, subset=True, validation=bad)
    with pytest.raises(ValueError, match="ood to be several names, got one string 'textures'"):
        load("cifar10", tmp_path, subset=True, ood="textures")
    with pytest.raises(ValueError, match="normalisation to be 'train' or 'published', got 'mine'"):
        load("cifar10", tmp_path, normalisation="mine")


def test_damaged_files_are_told(tmp_path: Path) -> None:
    official.write_cifar10_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    batch = folder / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=r"data_batch_3.bin: expected rows of 3073 bytes, got 12291 bytes: trunc"
    ):
        load("cifar10", tmp_path)
    batch.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_3.bin: expected labels from 0 to 9, got 10"):
        load("cifar10", tmp_path)
    batch.write_bytes(whole)
    (folder / "batches.meta.txt").write_text("cat dog")
    with pytest.raises(ValueError, match=r"batches.meta.txt: expected 10 class names, got 2"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            official.mapped({"data": official.string("x")}),
            "expected 'data' to be an array and 'labels' a list",
        ),
        (official.cifar_pickle(official.pixels(2)[:, :10], [1, 2]), r"shape \[n, 3072\], got \(2, 10\)"),
        (official.cifar_pickle(official.pixels(2), [1]), "one label per image, got 1 for 2 images"),
        (
            official.mapped(
                {
                    "data": official.array(official.pixels(1)),
                    "labels": official.listed([official.string("a")]),
                }
            ),
            "'labels' to be whole numbers",
        ),
    ],
)
def test_odd_pickles_are_told(content: bytes, message: str, tmp_path: Path) -> None:
    official.write_cifar10_python(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path)


def test_pickles_that_python_3_wrote_are_read(tmp_path: Path) -> None:
    official.write_cifar10_python(tmp_path)
    x = official.pixels(4, seed=9)
    content = pickle.dumps({"data": x, "labels": [1, 2, 3, 4]}, protocol=4)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    _, test, _ = read_cifar(CIFAR10, tmp_path)
    assert test.images.equal(torch.from_numpy(x).view(-1, 3, 32, 32))


def test_folders_of_other_classes_are_told(tmp_path: Path) -> None:
    write_folders(tmp_path)
    (tmp_path / "cifar10" / "test" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"expected the folders airplane.*got a difference in \['zebra'\]"):
        read_cifar(CIFAR10, tmp_path)
    (tmp_path / "cifar10" / "train" / "cat").rename(tmp_path / "cifar10" / "cat")
    with pytest.raises(ValueError, match="expected 10 class names, got 9"):
        read_cifar(CIFAR10, tmp_path)


def test_test_images_in_folders_take_turns(tmp_path: Path) -> None:
    """The first so many of a test set are of all classes in every layout."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for part in ("train", "test"):
        for label, name in enumerate(official.CIFAR10_CLASSES):
            folder = tmp_path / "cifar10" / part / name
            folder.mkdir(parents=True)
            for number in range(1 + label % 3):
                image.fromarray(np.full((32, 32, 3), 10 * label + number, np.uint8)).save(
                    folder / f"{number}.png"
                )
    _, test, _ = read_cifar(CIFAR10, tmp_path)
    assert test.labels[:10].tolist() == list(range(10))
    assert test.labels.tolist() == [*range(10), 1, 2, 4, 5, 7, 8, 2, 5, 8]
    numbers = test.images[:, 0, 0, 0].long() - 10 * test.labels
    assert numbers.tolist() == [0] * 10 + [1] * 6 + [2] * 3
