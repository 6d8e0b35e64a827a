"""A folder like CIFAR-10-C, made from a test set that is on this machine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpattention.data import data_root, load
from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, SEVERITIES, Regenerated, regenerate
from gpattention.data.folders import image_files, open_image

GENERATED = "generated"  # in place of a folder with pictures
SOURCES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def corrupt_test_set(
    name: str,
    root: str | Path | None = None,
    *,
    folder: str | Path | None = None,
    severities: Sequence[int] = SEVERITIES,
    types: Sequence[str] | None = None,
    seed: int = 0,
    frost: str | Path | None = None,
    subset: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> Regenerated:
    """Corrupt the test images of a dataset; what the folder holds of the same recipe is kept.

    Args:
        name: cifar10 or cifar100.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        folder: where to write; CIFAR-10-C-regenerated (CIFAR-100-C-...) under the root if not given.
        severities: which of 1 to 5, in ascending order.
        types: corruptions or whole categories (noise, blur, weather, digital); all 19 if not given.
        seed: of all random numbers.
        frost: folder with pictures of frost; if not given, the folder `frost` under the root where there
            is one; "generated" draws on generated ones, as does the lack of a folder.  The record says which.
        subset: whether files with fewer test images than published are taken.
        device: where to compute.
        progress: told the images done, and in all.
    """
    if name not in SOURCES:
        raise ValueError(f"expected name to be one of {', '.join(SOURCES)}, got {name!r}")
    wanted = corruption_names(types)
    pictures = frost_pictures(data_root(root), frost)
    data = load(name, root, subset=subset)
    place = data_root(root) / f"{SOURCES[name]}-C-regenerated" if folder is None else Path(folder)
    each = len(data.test) * len(severities)

    def told(corruption: str, done: int, _: int) -> None:
        if progress is not None:
            progress(wanted.index(corruption) * each + done, len(wanted) * each)

    return regenerate(
        data.test.images.to(device),
        data.test.labels,
        place,
        source=SOURCES[name],
        seed=seed,
        severities=severities,
        names=wanted,
        frost=pictures,
        progress=told,
    )


def corruption_names(types: Sequence[str] | None) -> tuple[str, ...]:
    """Corruptions by their own names or by their categories', each once; all if none is named."""
    if types is None:
        return tuple(CORRUPTIONS)
    names: list[str] = []
    for each in types:
        if each not in CORRUPTIONS and each not in CATEGORIES:
            raise ValueError(f"expected types among {', '.join((*CATEGORIES, *CORRUPTIONS))}, got {each!r}")
        names += CATEGORIES.get(each, (each,))
    return tuple(dict.fromkeys(names))


def frost_pictures(root: Path, frost: str | Path | None = None) -> list[Tensor] | None:
    """Those of the folder `frost`, else of the one under the root; None where generated ones are taken."""
    if frost == GENERATED or (frost is None and not (root / "frost").is_dir()):
        return None
    return read_pictures(root / "frost" if frost is None else Path(frost))


def read_pictures(folder: Path) -> list[Tensor]:
    """All image files of a folder in their own sizes.  [3, h, w] uint8 each"""
    files = image_files(folder) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"expected pictures in the folder {folder}, got none")
    pictures = []
    for file in files:
        with open_image(file) as opened:
            pixels = np.array(opened.convert("RGB"))  # [h, w, 3]
        pictures.append(torch.from_numpy(pixels).permute(2, 0, 1))
    return pictures
