"""CIFAR in its three layouts, and the unpickler: it runs nothing that a pickle names, and soon."""

import os
import pickle
import pickletools
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import CIFAR10, load
from gpattention.data.cifar import read_cifar, read_pickle
from tests.data import official
from tests.data.official import array, cifar_pickle, integer, listed, mapped, pixels, string
from tests.refusals import refusals


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
    assert published.normalisation == CIFAR10.published
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


def changed_binary(root: Path, name: str, change, **options: object) -> None:
    """Load after one file of the binary layout was changed."""
    official.write_cifar10_binary(root)
    file = root / "cifar-10-batches-bin" / name
    file.write_bytes(change(file.read_bytes()))
    load("cifar10", root, **options)


def whole_binary(root: Path, **options: object) -> None:
    changed_binary(root, "batches.meta.txt", lambda content: content, **options)


def changed_python(root: Path, content: bytes) -> None:
    official.write_cifar10_python(root)
    (root / "cifar-10-batches-py" / "data_batch_2").write_bytes(content)
    load("cifar10", root)


def changed_folders(root: Path, old: str, new: str) -> None:
    write_folders(root)
    (root / "cifar10" / old).rename(root / "cifar10" / new)
    read_cifar(CIFAR10, root)


BATCH = "data_batch_3.bin"
STRANGE = {"data": array(pixels(1)), "labels": listed([string("a")])}
test_refusals = refusals([
    (lambda root: whole_binary(root), "50000 training and 10000 test images of cifar10", "20 and 4"),
    (lambda root: whole_binary(root, subset=True, validation=20), "validation .* at most 19", "20"),
    (lambda root: whole_binary(root, subset=True, validation=2.5), "validation .* >= 1", "2.5"),
    (lambda root: whole_binary(root, subset=True, ood="textures"), "ood to be several names", "textures"),
    (lambda root: whole_binary(root, normalisation="mine"), "normalisation", "'mine'"),
    (lambda root: changed_binary(root, BATCH, lambda x: x[:-1]), rf"{BATCH}: .* 3073 bytes", "12291"),
    (lambda root: changed_binary(root, BATCH, lambda x: b"\x0a" + x[1:]), rf"{BATCH}: .*labels", "10"),
    (lambda root: changed_binary(root, "batches.meta.txt", lambda _: b"cat dog"), "10 class names", "'dog'"),
    (lambda root: changed_python(root, mapped({"data": string("x")})), "'data' to be an array", "'data'"),
    (lambda root: changed_python(root, cifar_pickle(pixels(2)[:, :10], [1, 2])), "3072", r"\(2, 10\)"),
    (lambda root: changed_python(root, cifar_pickle(pixels(2), [1])), r"labels .*\[2\]", r"\(1,\)"),
    (lambda root: changed_python(root, mapped(STRANGE)), "'labels' to be a list of whole numbers", ""),
    (lambda root: changed_folders(root, "test/cat", "test/zebra"), "the folders airplane", "zebra"),
    (lambda root: changed_folders(root, "train/cat", "cat"), "10 class names", "'bird', 'deer'"),
])  # fmt: skip


def read(content: bytes, tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "file"
    file.write_bytes(content)
    return read_pickle(file)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("code", ["u1", "|u1"])
def test_arrays_lists_and_strings(module: str, code: str, tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = mapped({"data": array(x, code, module), "names": listed([string("caf\xe9")])})
    found = read(content, tmp_path)
    assert np.array_equal(found["data"], x)
    assert found["names"] == ["caf\xe9"]
    assert pickle.loads(content, encoding="bytes")[b"data"].tolist() == x.tolist()  # our writer is right
    fortran = pickle.dumps({"data": np.asfortranarray(x)}, protocol=4)  # of Python 3
    assert np.array_equal(read(fortran, tmp_path)["data"], x)


class Evil:
    def __init__(self, called: object, *arguments: object) -> None:
        self.reduced = (called, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("called", "argument", "name"),
    [
        (os.system, "touch {}", "system"),
        (eval, "open({!r}, 'w')", "eval"),
        (open, "{}", "open"),
        (np.load, "{}", "load"),
        (getattr, "{}", "getattr"),
    ],
)
def test_nothing_else_can_be_named(called, argument: str, name: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps({"data": Evil(called, argument.format(str(mark)))}, protocol=protocol)
    with pytest.raises(ValueError, match=rf"expected a CIFAR pickle, got UnpicklingError.*\.{name}"):
        read(content, tmp_path)
    assert not mark.exists()


def doubled(levels: int, begin: bytes = b"](K\1e", fold: bytes = b"l") -> bytes:
    """A list of twice the list before, so many times over: six bytes a level, 2^levels elements."""
    steps = (b"h" + bytes([level]) + fold + b"q" + bytes([level + 1]) for level in range(levels))
    return b"(" * levels + begin + b"q\0" + b"".join(steps)


DAMAGED = {
    "nothing": b"",
    "text": b"not a pickle",
    "no dictionary": b"\x80\x02].",
    "cut off": mapped({"data": array(np.arange(4, dtype=np.uint8))})[:-9],
    "objects": mapped({"data": array(np.zeros(4, np.uint8), code="O8")}),
    "floats": mapped({"data": array(np.zeros(4, np.uint8), code="f4")}),
    # than bytes: nothing is allocated for them
    "more elements": mapped({"data": array(np.zeros((4, 4), "u1")).replace(b"K\4K\4", b"K\xffK\xff")}),
    "an array without a state": mapped({"data": b"cnumpy.core.multiarray\n_reconstruct\n)R"}),
    "a shape that is none": mapped({"data": array(np.zeros(3, np.uint8)).replace(b"(K\x03t", b"(U\x01at")}),
    "attributes for a function": mapped({"data": b"cnumpy\ndtype\nN}b"}),
    "a persistent object": b"\x80\x02Pnumber\n.",
    "another": b"\x80\x02K\x01Q.",
    "an extension": b"\x80\x02}(K\x01\x82\x01u.",
}  # fmt: skip
BOMBS = {
    "nested lists": b"\x80\2}U\4data" + doubled(30) + b"s.",
    "nested tuples as keys": b"\x80\2}" + doubled(30, b"K\1", b"t") + b"K\1s.",
    "nested tuples as the name of a module": b"\x80\2" + doubled(30, b"K\1", b"t") + b"U\1a\x93.",
    "a list of itself": b"\x80\2}U\4data]q\0h\0as.",
    "deep lists": b"\x80\2}U\4data" + b"(" * 50_000 + b"l" * 50_000 + b"s.",
    "deep tuples": b"\x80\2}U\4data)" + b"\x85" * 50_000 + b"s.",
    "a string of 2^60": b"\x80\2}U\4data\x8e" + struct.pack("<Q", 1 << 60) + b"s.",
    "a string of 2^31": b"\x80\2}U\4dataT" + struct.pack("<I", (1 << 31) - 1) + b"s.",
    "one string ten thousand times": (
        b"\x80\2}U\4data(T" + struct.pack("<I", 50_000) + b"x" * 50_000 + b"q\0" + b"h\0" * 10_000 + b"ls."
    ),
    "one tuple unpacked ten thousand times": (
        b"\x80\2}U\4data(cnumpy\ndtype\nq\1(" + b"K\1" * 10_000 + b"tq\0" + b"h\1h\0R" * 10_000 + b"ls."
    ),
    "an array of numbers": b"\x80\2}U\4datacnumpy.core.multiarray\n_reconstruct\n)R(" + b"K\1" * 5 + b"tbs.",
    "a number of a million digits": b"\x80\2}U\4dataL" + b"9" * 1_000_000 + b"L\ns.",
}  # fmt: skip


@pytest.mark.parametrize("name", [*DAMAGED, *BOMBS])
def test_damaged_pickles_are_refused_soon(name: str, tmp_path: Path) -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=r"file: expected a CIFAR pickle.*, got"):
        read((DAMAGED | BOMBS)[name], tmp_path)
    assert time.perf_counter() - begun < 20  # on a busy machine; it would be hours
    assert len(BOMBS["nested lists"]) < 387


def test_what_is_remembered_takes_no_more_memory_than_it_needs(tmp_path: Path) -> None:
    begun = time.perf_counter()
    content = b"\x80\2}r\xff\xff\xff\x7fU\4data]s."  # number 2^31 - 1: Python's own makes room for as many
    assert read(content, tmp_path) == {"data": []}
    assert time.perf_counter() - begun < 60


CALLED = []


def call(*arguments: object) -> None:
    CALLED.append(arguments)


VALUES = (
    b"N", b"K\1", b"]", b")", b"}", b"(", b"U\4data", b"X\1\0\0\0a", b"C\2ab", b"\x88", b"G" + bytes(8),
)  # fmt: skip
NAMES = (
    f"c{__name__}\ncall\n".encode(), b"cnumpy\ndtype\n", b"cnumpy\nndarray\n",
    b"cnumpy.core.multiarray\n_reconstruct\n", b"cos\nsystem\n",
)  # fmt: skip
STEPS = [bytes([code]) for code in b"aesultdRb\x85\x86\x87\x93021\x81\x92oQ\x8f\x90\x91\x94"]


def random_program(chance: random.Random) -> bytes:
    """Instructions in any order, half of them such as make sense after each other."""
    content = b"\x80\2}U\4data" if chance.random() < 0.5 else b"\x80\4"
    for _ in range(chance.randrange(chance.choice([4, 8, 200]))):
        kind = chance.random()
        if kind < 0.65:
            content += chance.choice(VALUES if kind < 0.35 else STEPS if kind < 0.6 else NAMES)
        elif kind < 0.95:
            content += chance.choice([b"q", b"h"]) + bytes([chance.randrange(6)])
        else:
            content += chance.choice(pickletools.opcodes).code.encode("latin-1") + chance.randbytes(2)
    return content + chance.choice([b"s.", b".", b""])


WHOLE = mapped({
    "data": array(np.arange(24, dtype=np.uint8).reshape(2, 12)), "labels": listed([integer(1), integer(2)]),
    "names": listed([string("a"), string("b")]),
})  # fmt: skip


def changed_bytes(chance: random.Random) -> bytes:
    changed = bytearray(WHOLE)
    for _ in range(chance.randrange(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize(
    ("seed", "make"), [*((seed, random_program) for seed in range(4)), (0, changed_bytes), (1, changed_bytes)]
)
def test_random_pickles_end_and_call_nothing(seed: int, make, tmp_path: Path) -> None:
    """Never anything but a dictionary of plain values or a `ValueError`."""
    chance, begun, plain = random.Random(seed), time.perf_counter(), 0
    for _ in range(400):
        try:
            found = read(make(chance), tmp_path)
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path / 'file'}: expected a CIFAR pickle")  # noqa: PT017
        else:
            assert all(isinstance(key, str) for key in found)
            if make is changed_bytes:
                assert all(
                    isinstance(x, np.ndarray | str | int | float | list | None) for x in found.values()
                )
            plain += 1
    assert plain > 0  # some are pickles
    assert time.perf_counter() - begun < 60
    assert CALLED == []
