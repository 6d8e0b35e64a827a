"""CIFAR-10-C and CIFAR-100-C: the test images under 19 corruptions of 5 severities, memory-mapped.

`regenerate` writes such a folder from a clean test set; after an interruption, a later call continues.  A
file `regenerated.json` says that the folder was regenerated, from which images and how.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

import gpattention
from gpattention.checks import check_choice
from gpattention.data import corruptions as made
from gpattention.data.catalogue import GIGABYTE, SUBSET, Archive, Layout, data_root, register
from gpattention.data.datasets import Images
from gpattention.data.files import map_npy
from gpattention.files import StrPath, existing_file, file_digest, read_object, replaced, write_atomically

FOLDERS = {"cifar10-c": "CIFAR-10-C", "cifar100-c": "CIFAR-100-C"}
CORRUPTIONS = tuple(sorted(made.CORRUPTIONS))
SEVERITIES = made.SEVERITIES
TEST = 10_000  # images of one severity, as published
RECORD = "regenerated.json"
RECIPE_VERSION = 1  # to be raised with every change of the images
_IMAGES_AT_ONCE = 1000

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Regenerated:
    """A folder of regenerated corruptions, as described by its `regenerated.json`.

    It has an array `<corruption>.npy`, uint8 [severities x N, H, W, 3], severity after severity, for each
    corruption, and `labels.npy`.

    Attributes:
        name: of the set, which contains "regenerated".
        folder: of the arrays.
        severities: of the corruptions.
        corruptions: their names.
        frost: "generated pictures" or "given pictures, sha256 ...".
        seed: of all random numbers.
    """

    name: str
    folder: Path
    severities: tuple[int, ...]
    corruptions: tuple[str, ...]
    frost: str
    seed: int


@dataclass(frozen=True)
class CorruptedImages:
    """A folder of arrays; `part` returns one corruption at one severity, in the order of the test images.

    Attributes:
        name: of the set.
        folder: of the arrays.
        corruptions: those in the folder.
        subset: whether arrays may be shorter than published.
        regenerated: how the arrays were made; None for the published ones.
    """

    name: str
    folder: Path
    corruptions: tuple[str, ...]
    subset: bool = False
    regenerated: Regenerated | None = None

    @property
    def severities(self) -> tuple[int, ...]:
        """Those in the folder."""
        return SEVERITIES if self.regenerated is None else self.regenerated.severities

    def part(self, corruption: str, severity: int) -> Images:
        """The images, [10000, 3, 32, 32], and labels; only rows that are used are read from the disk."""
        check_choice("corruption", corruption, self.corruptions)
        count = len(self.severities)
        if severity not in self.severities:
            choices = ", ".join(map(str, self.severities))
            raise ValueError(f"expected severity to be one of {choices}, got {severity}")
        images = self._array(corruption)
        labels = self._array("labels")
        good = images.dtype == np.uint8 and images.shape[1:] == (32, 32, 3) and len(images) % count == 0
        if not good or labels.shape != images.shape[:1]:
            wanted = f"{corruption} to be uint8 [n, 32, 32, 3] and labels [n], n in {count} severities"
            got = f"{images.dtype} {images.shape} and {labels.shape}"
            raise ValueError(f"{self.folder}: expected {wanted}, got {got}")
        rows = len(images) // count
        if rows != TEST and not self.subset:
            raise ValueError(f"{self.folder}: expected {TEST} images of each severity, got {rows}: {SUBSET}")
        place = self.severities.index(severity)
        chosen = slice(place * rows, (place + 1) * rows)
        return Images(
            torch.from_numpy(images[chosen]).permute(0, 3, 1, 2),
            torch.from_numpy(labels[chosen].astype(np.int64)),
        )

    def _array(self, name: str) -> np.ndarray:
        return map_npy(existing_file(name, self.folder / f"{name}.npy"))


def load_corrupted(
    name: str, root: StrPath | None = None, *, folder: StrPath | None = None, subset: bool = False
) -> CorruptedImages:
    """The corrupted test images.

    Args:
        name: cifar10-c or cifar100-c.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        folder: another folder with the same layout, for example from `regenerate`, in the root or anywhere
            else; its name is then the name of the result.
        subset: whether to accept missing corruptions, and arrays shorter than published.

    Returns:
        The folder of arrays.  If it has a `regenerated.json`, this is in `regenerated`, and the name of the
        result says so if the folder has the name of the published one.

    Raises:
        ValueError: the name is unknown, or the record is damaged.
        FileNotFoundError: the folder or a corruption is missing.
    """
    check_choice("name", name, FOLDERS)
    absolute = folder is not None and Path(folder).is_absolute()
    place = Path(folder or FOLDERS[name]) if absolute else data_root(root) / (folder or FOLDERS[name])
    if not place.is_dir():
        raise FileNotFoundError(f"expected {name} in {place}, got no such folder: see get({name!r}, root)")
    found = tuple(c for c in CORRUPTIONS if (place / f"{c}.npy").is_file())
    missing = ", ".join(c for c in CORRUPTIONS if c not in found)
    if missing and not (subset and found):
        raise FileNotFoundError(f"{place}: expected {len(CORRUPTIONS)} corruptions, got no {missing}")
    origin = _origin(place, found)
    called = name if origin is None else f"{name}-regenerated"
    return CorruptedImages(called if folder is None else place.name, place, found, subset, origin)


def _origin(folder: Path, found: tuple[str, ...]) -> Regenerated | None:
    """The content of the record in the folder; None for published arrays, which have none."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        record = read_object(file)
        recipe = record["recipe"]
        levels = tuple(int(severity) for severity in recipe["severities"])
        name, frost, seed = str(record["name"]), str(recipe["frost"]), int(recipe["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected the record of regenerated corruptions, got {error!r}") from None
    return Regenerated(name, folder, levels, found, frost, seed)


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
    """Corrupt a whole test set and write the results to a folder.

    Arrays of the same recipe in the folder are kept; a folder with another recipe is refused.  Every file
    appears completely or not at all.

    Args:
        images: the clean test set, uint8 [N, 3, H, W].
        labels: its classes, integers [N].
        folder: the target, created if it is missing.
        source: name of the clean test set.
        seed: of all random numbers.
        severities: those to make, in ascending order.
        names: of the corruptions to make; all 19 if not given.
        frost: pictures of frost as for `corrupt`; generated ones if not given.  The record says which.
        progress: called with (corruption, number of images done, number of all images) after each part.

    Returns:
        The content of the folder.

    Raises:
        ValueError: images or labels are wrong, a corruption or severity is unknown, or the folder has another
            recipe; nothing is written then.
    """
    folder = Path(folder)
    wanted = tuple(made.CORRUPTIONS) if names is None else tuple(dict.fromkeys(names))
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
    record = _open_record(folder, name, recipe)
    shape = (len(severities) * len(images), *images.shape[2:], 3)

    def write_labels(file: IO[bytes]) -> None:
        classes = labels.cpu().numpy().astype(np.int64)
        kind = np.uint8 if classes.min() >= 0 and classes.max() <= 255 else np.int64  # bytes, as published
        np.save(file, np.tile(classes.astype(kind), len(severities)))

    def write(each: str, file: IO[bytes]) -> None:
        npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for row, severity in enumerate(severities):
            for start in range(0, len(images), _IMAGES_AT_ONCE):
                clean = images[start : start + _IMAGES_AT_ONCE]
                changed = made.corrupt(clean, each, severity, seed=seed, first_item=start, frost=pictures)
                file.write(changed.permute(0, 2, 3, 1).cpu().numpy().tobytes())
                if progress is not None:
                    progress(each, row * len(images) + start + len(clean), shape[0])

    if not ("labels.npy" in record["files"] and (folder / "labels.npy").is_file()):
        _write_and_enter(folder / "labels.npy", write_labels, record)
    for each in wanted:
        path = folder / f"{each}.npy"
        # files are written completely, so that one with the right shape has the right content
        if path.name in record["files"] and path.is_file() and map_npy(path).shape == shape:
            if progress is not None:
                progress(each, shape[0], shape[0])
        else:
            _write_and_enter(path, partial(write, each), record)
    return Regenerated(name, folder, severities, wanted, about_frost, seed)


def named_frost(pictures: Sequence[Tensor] | None) -> str:
    """The description of pictures of frost in records."""
    return "generated pictures" if pictures is None else f"given pictures, sha256 {_digest(pictures)}"


def _check(
    images: Tensor, labels: Tensor, source: str, severities: tuple[int, ...], names: tuple[str, ...]
) -> None:
    made.check_images(images)
    if images.dtype != torch.uint8 or len(images) == 0:
        raise ValueError(f"images: expected some, of type uint8, got {len(images)} of {images.dtype}")
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        shape = tuple(labels.shape)
        raise ValueError(f"labels: expected integers of shape [{len(images)}], got {labels.dtype} of {shape}")
    if not source:
        raise ValueError("source: expected the name of the clean test set, got ''")
    if not severities or list(severities) != sorted(set(severities)):
        raise ValueError(f"severities: expected some of 1 to 5 in ascending order, got {severities}")
    for severity in severities:
        for name in names:
            made.check_request(name, severity)


def _open_record(folder: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """The record of the folder, which must have this recipe; a new one is written if there is none."""
    path = folder / RECORD
    if path.is_file():
        record = read_object(path)
        found = record.get("recipe")
        if not isinstance(found, dict) or not isinstance(record.get("files"), dict):
            raise ValueError(f"{path}: expected an object with the objects 'recipe' and 'files'")
        for field in sorted({*recipe, *found}):
            if found.get(field) != recipe.get(field):
                wanted, got = recipe.get(field), found.get(field)
                raise ValueError(f"{path}: expected {field} {wanted!r}, got {got!r}: take another folder")
        return record
    folder.mkdir(parents=True, exist_ok=True)
    if strangers := ", ".join(sorted(each.name for each in folder.glob("*.npy"))):  # perhaps published ones
        raise ValueError(f"folder: expected one with a {RECORD} or no arrays, got {folder} with {strangers}")
    record = {
        "name": name,
        "note": "Regenerated from the clean test set with the published severities; not the published files.",
        "made_by": {
            "gpattention": gpattention.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "recipe": recipe,
        "files": {},
    }
    _write_record(folder, record)
    return record


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def _write_and_enter(path: Path, write: Callable[[IO[bytes]], object], record: dict[str, Any]) -> None:
    """Write a file, completely or not at all, and its checksum in the record."""
    with replaced(path) as file:
        write(file)
    record["files"][path.name] = file_digest(path)
    _write_record(path.parent, record)


def _digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


for _name, _of, _record, _md5 in (
    ("cifar10-c", "CIFAR-10", 2535967, "56bf5dcef84df0e2308c6dcbcbbd8499"),
    ("cifar100-c", "CIFAR-100", 3555552, "11f0ed0f1191edbf9fa23466ae6021d3"),
):
    _file = f"{FOLDERS[_name]}.tar"
    _arrays = tuple(f"{each}.npy" for each in CORRUPTIONS)
    _least = len(_arrays) * len(SEVERITIES) * TEST * 3 * 32 * 32
    _url = f"https://zenodo.org/records/{_record}"
    register(
        name=_name,
        kind="corrupted",
        about=f"the {_of} test images under {len(CORRUPTIONS)} corruptions of 5 severities",
        licence="CC BY 4.0; cite D. Hendrycks and T. Dietterich, ICLR 2019",
        page=_url,
        load=partial(load_corrupted, _name),
        layouts=(Layout(FOLDERS[_name], (*_arrays, "labels.npy"), _arrays, _least),),
        archive=Archive(_file, _md5, f"{_url}/files/{_file}?download=1", 4 * GIGABYTE),
    )
