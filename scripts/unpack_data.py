"""Turn compactly packed copies of the datasets into the official layouts that `gpattention.data` reads.

    python scripts/unpack_data.py SOURCE TARGET

SOURCE holds any of the following; TARGET becomes a folder for GPATTENTION_DATA.

    cifar10/{data_batch_1..5,test_batch}.webp, labels.npz   lossless mosaics of 100 x 100 images
    cifar100_subset/cifar100_prefix_subset.npz, meta        some images of CIFAR-100, the official class names
    cola/cola_public/                                       the official folder
    ood/textures_dtd10.npz                                  10 of the 47 Describable Textures at 32 x 32
    ood/tinyimagenet32_test.webp                            a mosaic, a stand-in for TinyImageNet (resize)
    frost/                                                  the frost pictures of the corruption benchmark
    glove/cola_vocab_glove100.npz                           words and vectors

What is a subset stays one: load it with `subset=True`.  The stand-in does not get the official name.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from gpattention.data.cifar import read_pickle

SIDE = 32
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def tiles(file: Path) -> np.ndarray:
    """The images of a mosaic, row by row.  [n, 32, 32, 3] uint8"""
    with Image.open(file) as opened:
        mosaic = np.asarray(opened.convert("RGB"))
    rows, columns = mosaic.shape[0] // SIDE, mosaic.shape[1] // SIDE
    if mosaic.shape != (rows * SIDE, columns * SIDE, 3):
        raise ValueError(f"{file}: expected sides in multiples of {SIDE}, got {mosaic.shape}")
    return mosaic.reshape(rows, SIDE, columns, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)


def write_binary(file: Path, images: np.ndarray, *labels: np.ndarray) -> None:
    """CIFAR's binary version: of each image its labels, then all red, all green and all blue pixels."""
    if any(len(images) != len(column) for column in labels):
        raise ValueError(f"{file}: expected a label for each of {len(images)} images")
    pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    np.concatenate([np.stack(labels, 1).astype(np.uint8), pixels], 1).tofile(file)


def cifar10(source: Path, target: Path) -> str:
    """Mosaics to `cifar-10-batches-bin`."""
    folder = target / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(source / "labels.npz", allow_pickle=False) as arrays:
        train, test = arrays["train"], arrays["test"]
    done = 0
    for number in range(1, 6):
        images = tiles(source / f"data_batch_{number}.webp")
        write_binary(folder / f"data_batch_{number}.bin", images, train[done : done + len(images)])
        done += len(images)
    images = tiles(source / "test_batch.webp")
    write_binary(folder / "test_batch.bin", images, test)
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n")
    return f"{done} training and {len(images)} test images"


def cifar100(source: Path, target: Path) -> str:
    """A subset to `cifar-100-binary`."""
    folder = target / "cifar-100-binary"
    folder.mkdir(parents=True, exist_ok=True)
    meta = read_pickle(source / "meta")
    for kind in ("fine", "coarse"):
        (folder / f"{kind}_label_names.txt").write_text("\n".join(meta[f"{kind}_label_names"]) + "\n")
    counts = []
    with np.load(source / "cifar100_prefix_subset.npz", allow_pickle=False) as arrays:
        for part in ("train", "test"):
            images = arrays[f"{part}_images"]
            write_binary(
                folder / f"{part}.bin", images, arrays[f"{part}_coarse"], arrays[f"{part}_fine"]
            )  # fmt: skip
            counts.append(len(images))
    return f"{counts[0]} training and {counts[1]} test images: a subset"


def cola(source: Path, target: Path) -> str:
    """The official folder, copied."""
    shutil.copytree(source / "cola_public", target / "cola_public", dirs_exist_ok=True)
    counts = [
        len(file.read_bytes().splitlines()) for file in sorted((target / "cola_public/raw").glob("*.tsv"))
    ]
    return f"{sum(counts)} sentences"


def textures(source: Path, target: Path) -> str:
    """Arrays to `dtd/images/CLASS/CLASS_0001.png`."""
    with np.load(source / "textures_dtd10.npz", allow_pickle=False) as arrays:
        images, classes = arrays["images"], arrays["classes"]
    seen: dict[str, int] = {}
    for image, name in zip(images, classes.tolist(), strict=True):
        seen[name] = seen.get(name, 0) + 1
        folder = target / "dtd" / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{name}_{seen[name]:04d}.png")
    return f"{len(images)} images of {len(seen)} textures: a subset"


def tinyimagenet(source: Path, target: Path) -> str:
    """A mosaic to `ood/tinyimagenet32-standin.npz`."""
    images = tiles(source / "tinyimagenet32_test.webp")
    (target / "ood").mkdir(parents=True, exist_ok=True)
    np.savez(target / "ood" / "tinyimagenet32-standin.npz", images=images)
    return f"{len(images)} images: a stand-in for TinyImageNet (resize)"


def frost(source: Path, target: Path) -> str:
    """Pictures, copied."""
    shutil.copytree(source, target / "frost", dirs_exist_ok=True)
    return f"{len(list((target / 'frost').glob('frost*')))} pictures"


def glove(source: Path, target: Path) -> str:
    """Arrays to GloVe's text format."""
    with np.load(source / "cola_vocab_glove100.npz", allow_pickle=False) as arrays:
        words, vectors = arrays["words"].tolist(), arrays["vectors"]
    (target / "glove").mkdir(parents=True, exist_ok=True)
    with (target / "glove" / "cola-vocabulary.100d.txt").open("w", encoding="utf-8") as stream:
        for word, vector in zip(words, vectors, strict=True):
            stream.write(f"{word} {' '.join(map(str, vector.tolist()))}\n")
    return f"{len(words)} words"


# a name, the file or folder that must be there, what to do with its folder
STEPS: dict[str, tuple[str, Callable[[Path, Path], str]]] = {
    "cifar10": ("cifar10/labels.npz", cifar10),
    "cifar100": ("cifar100_subset/meta", cifar100),
    "cola": ("cola/cola_public", cola),
    "textures": ("ood/textures_dtd10.npz", textures),
    "tinyimagenet": ("ood/tinyimagenet32_test.webp", tinyimagenet),
    "frost": ("frost/frost1.png", frost),
    "glove": ("glove/cola_vocab_glove100.npz", glove),
}


def main() -> None:
    """Unpack what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of packed data")
    parser.add_argument("target", type=Path, help="folder to write the official layouts into")
    parser.add_argument("--only", nargs="+", choices=sorted(STEPS), help="some of them; all if not given")
    arguments = parser.parse_args()
    if not arguments.source.is_dir():
        parser.error(f"expected source to be a folder, got {arguments.source}")
    for name in arguments.only or STEPS:
        marker, step = STEPS[name]
        place = arguments.source / marker
        if not place.exists():
            print(f"{name}: not there")
            continue
        print(f"{name}: {step(place.parent, arguments.target)}", flush=True)


if __name__ == "__main__":
    main()
