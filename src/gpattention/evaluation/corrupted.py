"""Corrupted test images: published arrays, regenerated arrays, or images made when they are needed.

All arrays of a regenerated folder have the same severities.  A choice of severities therefore gets its own
folder, unless the usual folder has exactly these, which otherwise stays free for all severities.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpattention.checks import check_choice, did_you_mean
from gpattention.data import (
    CorruptedImages,
    ImageData,
    Regenerated,
    data_root,
    image_files,
    load,
    load_corrupted,
    open_image,
    regenerate,
)
from gpattention.data.corrupted import FOLDERS, RECIPE_VERSION, RECORD, TEST, named_frost
from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, SEVERITIES, corrupt
from gpattention.evaluation.predictions import row_digests
from gpattention.files import StrPath, read_json

T = TypeVar("T")
Count = Callable[[int, int], object]  # images done, all images
PREFIX = "corrupted"  # of the names of sets
GENERATED = "generated"  # the value of `frost` for generated pictures
SOURCES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
MADE = "made as needed"
SEED = 0  # of the random numbers of corruptions


def set_name(corruption: str, severity: int) -> str:
    """The name of a corrupted set in records.

    Args:
        corruption: its type.
        severity: 1 to 5.

    Returns:
        corrupted/TYPE/SEVERITY.
    """
    return f"{PREFIX}/{corruption}/{severity}"


def corrupt_test_set(
    name: str, root: StrPath | None = None, *, folder: StrPath | None = None,
    severities: Sequence[int] = SEVERITIES, types: Sequence[str] | None = None, seed: int = 0,
    frost: StrPath | None = None, subset: bool = False, device: torch.device | str = "cpu",
    progress: Count | None = None,
) -> Regenerated:  # fmt: skip
    """Corrupt the test images of a dataset; arrays that the folder has from the same recipe are kept.

    Args:
        name: cifar10 or cifar100.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        folder: the target; CIFAR-10-C-regenerated (CIFAR-100-C-...) under the root if not given.
        severities: those of 1 to 5 to make, in ascending order.
        types: corruptions or whole categories (noise, blur, weather, digital); all 19 if not given.
        seed: of all random numbers.
        frost: folder with pictures of frost; the folder `frost` under the root if not given; "generated", or
            no such folder, for generated pictures.  The record says which were used.
        subset: whether to accept files with fewer test images than published.
        device: where to compute.
        progress: called with the number of images done and of all images.

    Returns:
        The folder and its content.

    Raises:
        ValueError: an unknown dataset or type, or a folder with arrays of another recipe.
        FileNotFoundError: the dataset or the pictures are missing.
    """
    check_choice("name", name, SOURCES)
    wanted = corruption_names(types)
    pictures = frost_pictures(data_root(root), frost)
    data = load(name, root, subset=subset)
    each = len(data.test) * len(severities)

    def count(corruption: str, done: int, _: int) -> None:
        if progress is not None:
            progress(wanted.index(corruption) * each + done, len(wanted) * each)

    return regenerate(
        data.test.images.to(device), data.test.labels,
        data_root(root) / _usual_folder(name) if folder is None else Path(folder), source=SOURCES[name],
        seed=seed, severities=severities, names=wanted, frost=pictures, progress=count,
    )  # fmt: skip


def corruption_names(types: Sequence[str] | None) -> tuple[str, ...]:
    """The corruptions with these names or of these categories, each once; all for None."""
    known = {**{name: (name,) for name in CORRUPTIONS}, **CATEGORIES}
    for each in types or ():
        if each not in known:
            among = ", ".join((*CATEGORIES, *CORRUPTIONS))
            raise ValueError(f"expected types among {among}, got {each!r}{did_you_mean(each, known)}")
    return tuple(dict.fromkeys(x for each in (CORRUPTIONS if types is None else types) for x in known[each]))


def frost_pictures(root: Path, frost: StrPath | None = None) -> list[Tensor] | None:
    """The pictures in the folder `frost`, or in the one under the root; None for generated pictures."""
    if frost == GENERATED or (frost is None and not (root / "frost").is_dir()):
        return None
    return read_pictures(root / "frost" if frost is None else Path(frost))


def read_pictures(folder: Path) -> list[Tensor]:
    """All image files of a folder, each in its own size.  [3, h, w] uint8 each"""
    files = image_files(folder) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"expected pictures in the folder {folder}, got none")
    pictures = []
    for file in files:
        with open_image(file) as opened:
            pixels = np.array(opened.convert("RGB"))  # [h, w, 3]
        pictures.append(torch.from_numpy(pixels).permute(2, 0, 1))
    return pictures


@dataclass(frozen=True, eq=False)
class CorruptedSource:
    """Test images under every corruption, in the order of the test set."""

    name: str  # cifar10-c, cifar10-c-regenerated, or "made as needed"
    types: tuple[str, ...]
    severities: tuple[int, ...]
    images: Callable[[str, int], Tensor]  # of one type at one severity, [n, C, H, W] uint8
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Corruptions:
    """The corruptions of a data set that an evaluation needs."""

    name: str  # of the data set
    data: ImageData
    root: StrPath | None = None
    types: Sequence[str] | None = None  # all if not given; no others are made
    severities: Sequence[int] | None = None  # likewise
    limit: int | None = None  # if given, nothing is written and missing images are made for the first ones

    def open(self, device: torch.device | str = "cpu", progress: Count | None = None) -> CorruptedSource:
        """For CIFAR the published arrays, or regenerated ones, which are made and kept if they are missing.

        Images of other data sets are made when they are needed.
        """
        if self.name not in SOURCES:
            return self._narrowed(made_as_needed(self.data.test.images, self.limit))
        folder = data_root(self.root)
        found, refused = self._find_arrays(folder)
        if found is None and self.limit is not None:
            source = made_as_needed(self.data.test.images, self.limit, frost_pictures(folder))
        elif found is None:
            place = self._folder_to_write(folder)
            corrupt_test_set(
                self.name, folder, folder=place, types=self.types, seed=SEED, device=device,
                severities=in_order(self.severities, SEVERITIES), subset=len(self.data.test) != TEST,
                progress=progress,
            )  # fmt: skip
            source = self._read(load_corrupted(f"{self.name}-c", folder, folder=place, subset=True))
        else:
            source = self._read(found)
        return self._narrowed(replace(source, notes=(*refused, *source.notes)))

    def origin(self) -> dict[str, Any]:
        """Everything but the test images that the images of `open` depend on; makes nothing.

        Published arrays are described by a sample, as a digest of all 3 GB would take too long.
        """
        made = {"source": MADE, "seed": SEED, "version": RECIPE_VERSION}
        if self.name not in SOURCES:
            return made
        folder = data_root(self.root)
        found, _ = self._find_arrays(folder)
        if found is not None and found.regenerated is None:
            types, levels = in_order(self.types, CORRUPTIONS), in_order(self.severities, found.severities)
            firsts = [found.part(t, s).images[:1] for t in types if t in found.corruptions for s in levels]
            sample = row_digests(torch.cat(firsts).flatten()[None])[0].hex()
            return {"source": f"{self.name}-c", "sample": sample}
        if found is not None and found.regenerated is not None:
            seed, frost = found.regenerated.seed, found.regenerated.frost
        else:
            seed, frost = SEED, named_frost(frost_pictures(folder))
            if self.limit is not None:
                return {**made, "frost": frost}
        # equal before and after the arrays are made
        return {"source": f"{self.name}-c-regenerated", "seed": seed, "frost": frost}

    def _find_arrays(self, folder: Path) -> tuple[CorruptedImages | None, list[str]]:
        """Published arrays, or regenerated ones with all types and severities; and reasons against others.

        Without a choice of severities, those of a regenerated folder are accepted.
        """
        refused: list[str] = []
        for name in (FOLDERS[f"{self.name}-c"], *self._regenerated_folders()):
            place = folder / name
            arrays = any((place / f"{each}.npy").is_file() for each in CORRUPTIONS)
            if not place.is_dir() or ((place / RECORD).is_file() and not arrays):
                continue  # for example a regeneration that was stopped before its first array
            found = load_corrupted(f"{self.name}-c", folder, folder=name, subset=True)
            if found.regenerated is not None and not (
                {*in_order(self.types, CORRUPTIONS)} <= {*found.corruptions}
                and {*(self.severities or ())} <= {*found.severities}
            ):
                continue  # for example a regeneration that was stopped, which will be continued
            labels = found.part(found.corruptions[0], found.severities[0]).labels
            if torch.equal(labels, self.data.test.labels.cpu()):
                return found, refused
            refused.append(f"the corrupted images in {name} are not of this test set and were not used")
        return None, refused

    def _regenerated_folders(self) -> tuple[str, str]:
        """The usual folder, and the one for these severities only."""
        usual, levels = _usual_folder(self.name), in_order(self.severities, SEVERITIES)
        return usual, f"{usual}-severities-{'-'.join(map(str, levels))}"

    def _folder_to_write(self, folder: Path) -> Path:
        """The folder for regenerated arrays, as explained at the top."""
        usual, own = (folder / place for place in self._regenerated_folders())
        try:
            there = tuple(int(severity) for severity in read_json(usual / RECORD)["recipe"]["severities"])
        except (OSError, ValueError, KeyError, TypeError):  # no record, or damage, which writing will report
            there = tuple(SEVERITIES)
        return usual if in_order(self.severities, SEVERITIES) == there else own

    def _read(self, found: CorruptedImages) -> CorruptedSource:
        notes, origin = [], found.regenerated
        if origin is not None:
            notes.append(
                f"corruptions are {origin.name}, not the published files (seed {origin.seed}, frost: "
                f"{origin.frost.split(',')[0]}): gpattention data get {self.name}-c brings those"
            )
        missing = [each for each in in_order(self.types, CORRUPTIONS) if each not in found.corruptions]
        if missing:
            notes.append(f"corruptions missing: {', '.join(missing)}; means are over the others")
        if self.severities is None and found.severities != SEVERITIES:
            notes.append(f"severities {', '.join(map(str, found.severities))} only")
        label = f"{self.name}-c" if origin is None else f"{self.name}-c-regenerated"
        types = in_order(found.corruptions, CORRUPTIONS)
        return CorruptedSource(
            label, types, found.severities, lambda type, severity: found.part(type, severity).images,
            tuple(notes),
        )  # fmt: skip

    def _narrowed(self, source: CorruptedSource) -> CorruptedSource:
        """The source with only the wanted types and severities, in its own order, and a note about it."""
        types, levels = in_order(self.types, source.types), in_order(self.severities, source.severities)
        if not types or not levels:
            among = f"{', '.join(source.types)} at severities among {', '.join(map(str, source.severities))}"
            raise ValueError(f"expected corruptions among {among}, got {self.types} at {self.severities}")
        everything = (types, levels) == (tuple(CORRUPTIONS), tuple(SEVERITIES))
        if everything or (self.types is None and self.severities is None):
            return source
        note = f"reduced: {', '.join(types)} at severities {', '.join(map(str, levels))} only"
        return replace(source, types=types, severities=levels, notes=(note, *source.notes))


def made_as_needed(
    images: Tensor, limit: int | None = None, frost: Sequence[Tensor] | None = None
) -> CorruptedSource:
    """Corrupt 8-bit images when they are needed; grey ones as colours, which are averaged again."""
    clean = images if limit is None else images[:limit]

    def make(corruption: str, severity: int) -> Tensor:
        if clean.shape[1] == 3:
            return corrupt(clean, corruption, severity, seed=SEED, frost=frost)
        coloured = corrupt(clean.expand(-1, 3, -1, -1), corruption, severity, seed=SEED, frost=frost)
        return coloured.float().mean(1, keepdim=True).round().to(clean.dtype)

    pictures = "generated pictures" if frost is None else "given pictures"
    notes = [
        f"corruptions are regenerated with the published severities, not the published files (seed {SEED}, "
        f"frost: {pictures})"
    ]
    if images.shape[-1] != 32:
        size = " x ".join(map(str, images.shape[-2:]))
        notes.append(f"the severities were published for images of 32 x 32 pixels, these have {size}")
    return CorruptedSource(MADE, tuple(CORRUPTIONS), SEVERITIES, make, tuple(notes))


def in_order(wanted: Iterable[T] | None, offered: Iterable[T]) -> tuple[T, ...]:
    """The wanted ones among those offered, in the order of the latter; all for None."""
    chosen = None if wanted is None else set(wanted)
    return tuple(each for each in offered if chosen is None or each in chosen)


def _usual_folder(name: str) -> str:
    return f"{SOURCES[name]}-C-regenerated"
