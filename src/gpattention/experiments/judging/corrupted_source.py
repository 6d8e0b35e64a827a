"""Where corrupted test images come from: the published arrays, regenerated ones, or made as needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.data import CorruptedImages, ImageData, data_root, load_corrupted
from gpattention.data.corrupted import FOLDERS
from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from gpattention.data.places import StrPath
from gpattention.experiments.judging.corrupting import SOURCES, corrupt_test_set, read_pictures

SEED = 0  # of the corruptions' random numbers


@dataclass(frozen=True, eq=False)
class CorruptedSource:
    """Test images under every corruption, in the order of the test set."""

    name: str  # what it is: cifar10-c, cifar10-c-regenerated, made as needed
    types: tuple[str, ...]
    severities: tuple[int, ...]
    images: Callable[[str, int], Tensor]  # of one type at one severity, [n, C, H, W] uint8
    notes: tuple[str, ...] = ()


def open_corrupted(
    name: str,
    data: ImageData,
    root: StrPath | None = None,
    *,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> CorruptedSource:
    """CIFAR's: the published arrays if they are here, else regenerated ones, made and kept if need be.

    With `limit`, nothing is written: missing ones are made of so many images as they are asked for, as are
    those of all other data.
    """
    if name not in SOURCES:
        return made_as_needed(data.test.images, limit)
    folder, refused = data_root(root), []
    regenerated = f"{SOURCES[name]}-C-regenerated"
    for place in (FOLDERS[f"{name}-c"], regenerated):
        if not (folder / place).is_dir():
            continue
        found = load_corrupted(f"{name}-c", folder, folder=place, subset=True)
        if found.regenerated is not None and limit is None and len(found.corruptions) < len(CORRUPTIONS):
            continue  # a regeneration that was stopped; it is continued below
        if _fits(found, data):
            return _from_arrays(found, name)
        refused.append(f"the corrupted images in {place} are not of this test set and were not used")
    pictures = folder / "frost" if (folder / "frost").is_dir() else None
    if limit is not None:
        given = None if pictures is None else read_pictures(pictures)
        return _with_notes(made_as_needed(data.test.images, limit, given), refused)
    subset = len(data.test) != 10_000
    corrupt_test_set(name, folder, seed=SEED, frost=pictures, subset=subset, device=device, progress=progress)
    found = load_corrupted(f"{name}-c", folder, folder=regenerated, subset=True)
    return _with_notes(_from_arrays(found, name), refused)


def made_as_needed(
    images: Tensor, limit: int | None = None, frost: Sequence[Tensor] | None = None
) -> CorruptedSource:
    """Corrupt 8-bit images when they are asked for; grey ones as colours, averaged again."""
    clean = images if limit is None else images[:limit]

    def make(corruption: str, severity: int) -> Tensor:
        if clean.shape[1] == 3:
            return corrupt(clean, corruption, severity, seed=SEED, frost=frost)
        coloured = corrupt(clean.expand(-1, 3, -1, -1), corruption, severity, seed=SEED, frost=frost)
        return coloured.float().mean(1, keepdim=True).round().to(clean.dtype)

    told = "generated pictures" if frost is None else "given pictures"
    notes = [
        f"corruptions are regenerated with the published severities, not the published files (seed {SEED}, "
        f"frost: {told})"
    ]
    if images.shape[-1] != 32:
        size = " x ".join(map(str, images.shape[-2:]))
        notes.append(f"the severities were published for images of 32 x 32 pixels, these have {size}")
    return CorruptedSource("made as needed", tuple(CORRUPTIONS), SEVERITIES, make, tuple(notes))


def narrowed(
    source: CorruptedSource, types: Sequence[str] | None, severities: Sequence[int] | None
) -> CorruptedSource:
    """Only some types and severities, in the source's order; its notes say that the rest was left out."""
    kept = tuple(t for t in source.types if types is None or t in types)
    levels = tuple(s for s in source.severities if severities is None or s in severities)
    if not kept or not levels:
        raise ValueError(
            f"expected corruptions among {', '.join(source.types)} at severities among "
            f"{', '.join(map(str, source.severities))}, got {types} at {severities}"
        )
    if (kept, levels) == (source.types, source.severities):
        return source
    told = f"reduced: {', '.join(kept)} at severities {', '.join(map(str, levels))} only"
    return CorruptedSource(source.name, kept, levels, source.images, (told, *source.notes))


def _fits(found: CorruptedImages, data: ImageData) -> bool:
    labels = found.part(found.corruptions[0], found.severities[0]).labels
    return labels.shape == data.test.labels.shape and bool((labels == data.test.labels.cpu()).all())


def _from_arrays(found: CorruptedImages, name: str) -> CorruptedSource:
    notes = []
    if found.regenerated is not None:
        notes.append(
            f"corruptions are {found.regenerated.name}, not the published files (seed "
            f"{found.regenerated.seed}, frost: {found.regenerated.frost.split(',')[0]}): "
            f"gpattention data get {name}-c brings those"
        )
    missing = [each for each in CORRUPTIONS if each not in found.corruptions]
    if missing:
        notes.append(f"corruptions missing: {', '.join(missing)}; means are over the others")
    if found.severities != SEVERITIES:
        notes.append(f"severities {', '.join(map(str, found.severities))} only")
    label = f"{name}-c" if found.regenerated is None else f"{name}-c-regenerated"
    types = tuple(each for each in CORRUPTIONS if each in found.corruptions)
    return CorruptedSource(label, types, found.severities, lambda c, s: found.part(c, s).images, tuple(notes))


def _with_notes(source: CorruptedSource, notes: Sequence[str]) -> CorruptedSource:
    return CorruptedSource(
        source.name, source.types, source.severities, source.images, (*notes, *source.notes)
    )
