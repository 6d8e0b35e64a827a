"""CIFAR-10-C and CIFAR-100-C: the test images under 19 corruptions of 5 severities, memory-mapped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpattention.data.arrays import map_npy
from gpattention.data.corruptions.regenerated_record import RECORD
from gpattention.data.images import Images
from gpattention.data.places import StrPath, data_root, existing_file
from gpattention.reading import read_json

FOLDERS = {"cifar10-c": "CIFAR-10-C", "cifar100-c": "CIFAR-100-C"}
CORRUPTIONS = (
    "brightness", "contrast", "defocus_blur", "elastic_transform", "fog", "frost", "gaussian_blur",
    "gaussian_noise", "glass_blur", "impulse_noise", "jpeg_compression", "motion_blur", "pixelate",
    "saturate", "shot_noise", "snow", "spatter", "speckle_noise", "zoom_blur",
)  # fmt: skip
SEVERITIES = (1, 2, 3, 4, 5)
TEST = 10_000  # images of one severity, as published


@dataclass(frozen=True)
class Origin:
    """What a folder's `regenerated.json` says: these are not the published arrays."""

    name: str  # such as "CIFAR-10-C (regenerated)"
    frost: str  # "generated pictures" or "given pictures, sha256 ..."
    severities: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class CorruptedImages:
    """A folder of arrays; `part` gives one corruption at one severity, in the order of the test images."""

    name: str
    folder: Path
    corruptions: tuple[str, ...]  # those that are there
    subset: bool = False
    regenerated: Origin | None = None  # None: as published, as far as can be told

    @property
    def severities(self) -> tuple[int, ...]:
        """Those that are there."""
        return SEVERITIES if self.regenerated is None else self.regenerated.severities

    def part(self, corruption: str, severity: int) -> Images:
        """[10000, 3, 32, 32]; only the rows that are used will be read from the disk."""
        if corruption not in self.corruptions:
            raise ValueError(
                f"expected corruption to be one of {', '.join(self.corruptions)}, got {corruption!r}"
            )
        count = len(self.severities)
        if severity not in self.severities:
            told = "from 1 to 5" if count == 5 else f"among {', '.join(map(str, self.severities))}"
            raise ValueError(f"expected severity {told}, got {severity}")
        images = self._array(corruption)
        labels = self._array("labels")
        good = images.dtype == np.uint8 and images.shape[1:] == (32, 32, 3) and len(images) % count == 0
        if not good or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{self.folder}: expected {corruption} to be uint8 [n, 32, 32, 3] and labels [n], n in "
                f"{count} severities, got {images.dtype} {images.shape} and {labels.shape}"
            )
        rows = len(images) // count
        if rows != TEST and not self.subset:
            raise ValueError(
                f"{self.folder}: expected {TEST} images of each severity, got {rows}: "
                "pass subset=True if that is meant"
            )
        place = self.severities.index(severity)
        chosen = slice(place * rows, (place + 1) * rows)
        return Images(
            torch.from_numpy(images[chosen]).permute(0, 3, 1, 2),
            torch.from_numpy(labels[chosen].astype(np.int64)),
        )

    def _array(self, name: str) -> np.ndarray:
        return map_npy(existing_file(self.folder / f"{name}.npy"))


def load_corrupted(
    name: str, root: StrPath | None = None, *, folder: StrPath | None = None, subset: bool = False
) -> CorruptedImages:
    """The corrupted test images.

    Args:
        name: cifar10-c or cifar100-c.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        folder: another one of the same layout, such as `corruptions.regenerate` writes, under the root or
            anywhere; the result is then called by its name.
        subset: whether corruptions may be missing and arrays may be shorter than published.

    A folder with a `regenerated.json` says so in `regenerated`, and in its name if it stands where the
    published one would.
    """
    if name not in FOLDERS:
        raise ValueError(f"expected name to be one of {', '.join(FOLDERS)}, got {name!r}")
    if folder is not None and Path(folder).is_absolute():
        place = Path(folder)
    else:
        place = data_root(root) / (FOLDERS[name] if folder is None else folder)
    if not place.is_dir():
        raise FileNotFoundError(f"expected {name} in {place}, got no such folder: see get({name!r}, root)")
    found = tuple(c for c in CORRUPTIONS if (place / f"{c}.npy").is_file())
    missing = [c for c in CORRUPTIONS if c not in found]
    if missing and not (subset and found):
        raise FileNotFoundError(
            f"{place}: expected {len(CORRUPTIONS)} corruptions, got no {', '.join(missing)}"
        )
    origin = _origin(place)
    called = name if origin is None else f"{name}-regenerated"
    return CorruptedImages(called if folder is None else place.name, place, found, subset, origin)


def _origin(folder: Path) -> Origin | None:
    """What the folder says about itself; the published one says nothing."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        record: Any = read_json(file)
        recipe = record["recipe"]
        severities = tuple(int(severity) for severity in recipe["severities"])
        return Origin(str(record["name"]), str(recipe["frost"]), severities, int(recipe["seed"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected the record of regenerated corruptions, got {error!r}") from None
