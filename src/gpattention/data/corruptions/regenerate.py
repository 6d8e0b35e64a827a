"""Write a folder like CIFAR-10-C from a clean test set, once; a later call carries on where one stopped."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpattention.data.arrays import map_npy
from gpattention.data.corruptions.catalogue import CORRUPTIONS, SEVERITIES
from gpattention.data.corruptions.corrupt import check_images, check_request, corrupt
from gpattention.data.corruptions.regenerated_record import open_record, write_record, write_whole

RECIPE_VERSION = 1  # raise it with any change that changes an image
_IMAGES_AT_ONCE = 1000

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Regenerated:
    """A folder of regenerated corruptions: `<corruption>.npy`, uint8 [severities x N, H, W, 3], severity
    after severity, and `labels.npy`.
    """

    name: str  # says that it is regenerated
    folder: Path
    severities: tuple[int, ...]
    corruptions: tuple[str, ...]
    frost: str  # "generated pictures" or "given pictures, sha256 ..."


def regenerate(
    images: Tensor,
    labels: Tensor,
    folder: str | Path,
    *,
    source: str = "CIFAR-10",
    seed: int = 0,
    severities: Sequence[int] = SEVERITIES,
    names: Iterable[str] | None = None,
    frost: Sequence[Tensor] | Tensor | None = None,
    progress: Progress | None = None,
) -> Regenerated:
    """Corrupt the whole test set and keep the result in `folder`.

    What the folder already holds of the same recipe is kept; a folder of another recipe is refused. Every
    file appears as a whole or not at all.

    Args:
        images: the clean test set, uint8 [N, 3, H, W].
        labels: its classes, integers [N].
        folder: where to write; made if missing.
        source: the name of the clean test set.
        seed: of all random numbers.
        severities: which, in ascending order.
        names: which corruptions; None means all 19.
        frost: pictures of frost as for `corrupt`; None draws on generated ones, and the record says so.
        progress: called with (corruption, images done, images in all) after each part.
    """
    folder = Path(folder)
    wanted = tuple(CORRUPTIONS) if names is None else tuple(dict.fromkeys(names))
    severities = tuple(severities)
    _check(images, labels, source, severities, wanted)
    pictures = None if frost is None else [picture.cpu() for picture in frost]
    about_frost = named_frost(pictures)
    name = f"{source}-C (regenerated)"
    recipe = {
        "version": RECIPE_VERSION,
        "seed": seed,
        "severities": list(severities),
        "images": {"shape": list(images.shape), "sha256": _digest([images])},
        "labels": {"sha256": _digest([labels.long()])},
        "frost": about_frost,
    }
    record = open_record(folder, _description(name), recipe)
    _write_labels(folder, labels, len(severities), record)
    for each in wanted:
        shape = (len(severities) * len(images), *images.shape[2:], 3)
        if f"{each}.npy" in record["files"] and _holds(folder / f"{each}.npy", shape):
            if progress is not None:
                progress(each, shape[0], shape[0])
            continue

        def write(part: Path, each: str = each, shape: tuple[int, ...] = shape) -> None:
            array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
            for row, severity in enumerate(severities):
                for start in range(0, len(images), _IMAGES_AT_ONCE):
                    clean = images[start : start + _IMAGES_AT_ONCE]
                    changed = corrupt(clean, each, severity, seed=seed, first_item=start, frost=pictures)
                    first = row * len(images) + start
                    array[first : first + len(clean)] = changed.permute(0, 2, 3, 1).cpu().numpy()
                    if progress is not None:
                        progress(each, first + len(clean), shape[0])
            array.flush()

        write_whole(folder / f"{each}.npy", write)
        _enter(folder, f"{each}.npy", record)
    return Regenerated(name, folder, severities, wanted, about_frost)


def named_frost(pictures: Sequence[Tensor] | None) -> str:
    """How a record names its pictures of frost."""
    return "generated pictures" if pictures is None else f"given pictures, sha256 {_digest(pictures)}"


def _check(
    images: Tensor, labels: Tensor, source: str, severities: tuple[int, ...], names: tuple[str, ...]
) -> None:
    check_images(images)
    if images.dtype != torch.uint8 or len(images) == 0:
        raise ValueError(f"images: expected some, of type uint8, got {len(images)} of {images.dtype}")
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"labels: expected integers of shape [{len(images)}], got {labels.dtype} of {tuple(labels.shape)}"
        )
    if not source:
        raise ValueError("source: expected the name of the clean test set, got ''")
    if not severities or list(severities) != sorted(set(severities)):
        raise ValueError(f"severities: expected some of 1 to 5 in ascending order, got {severities}")
    for severity in severities:
        for name in names:
            check_request(name, severity)


def _description(name: str) -> dict[str, Any]:
    try:
        library = version("gpattention")
    except PackageNotFoundError:
        library = "not installed"
    return {
        "name": name,
        "note": "Regenerated from the clean test set with the published severities; not the published files.",
        "made_by": {"gpattention": library, "torch": torch.__version__, "numpy": np.__version__},
    }


def _write_labels(folder: Path, labels: Tensor, times: int, record: dict[str, Any]) -> None:
    if "labels.npy" in record["files"] and (folder / "labels.npy").is_file():
        return
    classes = labels.cpu().numpy().astype(np.int64)
    kind = np.uint8 if classes.min() >= 0 and classes.max() <= 255 else np.int64  # bytes, as published

    def write(part: Path) -> None:
        with part.open("xb") as file:
            np.save(file, np.tile(classes.astype(kind), times))

    write_whole(folder / "labels.npy", write)
    _enter(folder, "labels.npy", record)


def _enter(folder: Path, file: str, record: dict[str, Any]) -> None:
    with (folder / file).open("rb") as opened:
        record["files"][file] = hashlib.file_digest(opened, "sha256").hexdigest()
    write_record(folder, record)


def _holds(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether the file is there with that shape; it was written as a whole, so it then has its content."""
    return path.is_file() and map_npy(path).shape == shape


def _digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
