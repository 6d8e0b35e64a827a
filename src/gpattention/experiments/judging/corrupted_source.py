"""Where corrupted test images come from: the published arrays, regenerated ones, or made as needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention.data import CorruptedImages, ImageData, data_root, load_corrupted
from gpattention.data.corrupted import TEST
from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from gpattention.data.corruptions.regenerate import RECIPE_VERSION, named_frost
from gpattention.data.places import StrPath
from gpattention.evaluation.items import row_digests
from gpattention.experiments.judging.corrupted_folders import find_arrays, folder_to_write, in_order
from gpattention.experiments.judging.corrupting import SOURCES, corrupt_test_set, frost_pictures

MADE = "made as needed"
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
    types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> CorruptedSource:
    """CIFAR's: the published arrays if they are here, else regenerated ones, made and kept if need be.

    With `types` or `severities` all others are left out, and not made either.  With `limit`, nothing is
    written: missing ones are made of so many images as they are asked for, as are those of all other data.
    """
    if name not in SOURCES:
        return narrowed(made_as_needed(data.test.images, limit), types, severities)
    folder = data_root(root)
    found, refused = find_arrays(name, data, folder, types, severities)
    if found is None and limit is not None:
        made = made_as_needed(data.test.images, limit, frost_pictures(folder))
        return narrowed(_with_notes(made, refused), types, severities)
    if found is None:
        place = folder_to_write(name, folder, severities)
        corrupt_test_set(
            name, folder, folder=place, types=types, severities=in_order(severities, SEVERITIES), seed=SEED,
            subset=len(data.test) != TEST, device=device, progress=progress,
        )  # fmt: skip
        found = load_corrupted(f"{name}-c", folder, folder=place, subset=True)
    return narrowed(_with_notes(_from_arrays(found, name, types, severities), refused), types, severities)


def corrupted_origin(
    name: str,
    data: ImageData,
    root: StrPath | None = None,
    *,
    types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """What the images of `open_corrupted` depend on beside the test images; nothing is made for it.

    Of published arrays it is a sample, as a digest of all 3 GB would take longer than most questions deserve.
    """
    made = {"source": MADE, "seed": SEED, "version": RECIPE_VERSION}
    if name not in SOURCES:
        return made
    folder = data_root(root)
    found, _ = find_arrays(name, data, folder, types, severities)
    if found is None:
        frost = named_frost(frost_pictures(folder))
        return {**made, "frost": frost} if limit is not None else _regenerated(name, SEED, frost)
    if found.regenerated is not None:
        return _regenerated(name, found.regenerated.seed, found.regenerated.frost)
    firsts = [
        found.part(each, severity).images[:1]
        for each in in_order(types, CORRUPTIONS)
        if each in found.corruptions
        for severity in in_order(severities, found.severities)
    ]
    return {"source": f"{name}-c", "sample": row_digests(torch.cat(firsts).flatten()[None])[0].hex()}


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
    return CorruptedSource(MADE, tuple(CORRUPTIONS), SEVERITIES, make, tuple(notes))


def narrowed(
    source: CorruptedSource, types: Sequence[str] | None, severities: Sequence[int] | None
) -> CorruptedSource:
    """Only some types and severities, in the source's order; its notes say that the rest was left out."""
    kept, levels = in_order(types, source.types), in_order(severities, source.severities)
    if not kept or not levels:
        raise ValueError(
            f"expected corruptions among {', '.join(source.types)} at severities among "
            f"{', '.join(map(str, source.severities))}, got {types} at {severities}"
        )
    if (types, severities) == (None, None) or (kept, levels) == (tuple(CORRUPTIONS), tuple(SEVERITIES)):
        return source
    told = f"reduced: {', '.join(kept)} at severities {', '.join(map(str, levels))} only"
    return CorruptedSource(source.name, kept, levels, source.images, (told, *source.notes))


def _from_arrays(
    found: CorruptedImages, name: str, types: Sequence[str] | None, severities: Sequence[int] | None
) -> CorruptedSource:
    notes = []
    if found.regenerated is not None:
        notes.append(
            f"corruptions are {found.regenerated.name}, not the published files (seed "
            f"{found.regenerated.seed}, frost: {found.regenerated.frost.split(',')[0]}): "
            f"gpattention data get {name}-c brings those"
        )
    missing = [each for each in in_order(types, CORRUPTIONS) if each not in found.corruptions]
    if missing:
        notes.append(f"corruptions missing: {', '.join(missing)}; means are over the others")
    if severities is None and found.severities != SEVERITIES:
        notes.append(f"severities {', '.join(map(str, found.severities))} only")
    label = f"{name}-c" if found.regenerated is None else f"{name}-c-regenerated"
    held = tuple(each for each in CORRUPTIONS if each in found.corruptions)
    return CorruptedSource(label, held, found.severities, lambda c, s: found.part(c, s).images, tuple(notes))


def _regenerated(name: str, seed: int, frost: str) -> dict[str, Any]:
    """The same before and after they are made."""
    return {"source": f"{name}-c-regenerated", "seed": seed, "frost": frost}


def _with_notes(source: CorruptedSource, notes: Sequence[str]) -> CorruptedSource:
    return CorruptedSource(
        source.name, source.types, source.severities, source.images, (*notes, *source.notes)
    )
