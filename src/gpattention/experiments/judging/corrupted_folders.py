"""Which folder with corrupted CIFAR images serves a request, and where missing ones are written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from gpattention.data import CorruptedImages, ImageData, load_corrupted
from gpattention.data.corrupted import FOLDERS
from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES
from gpattention.data.corruptions.regenerated_record import RECORD
from gpattention.experiments.judging.corrupting import SOURCES
from gpattention.reading import read_json

T = TypeVar("T")


def find_arrays(
    name: str,
    data: ImageData,
    folder: Path,
    types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
) -> tuple[CorruptedImages | None, list[str]]:
    """The published arrays, else regenerated ones with all that is wanted; and what was not used, and why.

    Where no severities are named, those of a regenerated folder are taken as they are.
    """
    refused: list[str] = []
    for place in (FOLDERS[f"{name}-c"], *_regenerated_folders(name, severities)):
        if not (folder / place).is_dir() or _is_empty(folder / place):
            continue
        found = load_corrupted(f"{name}-c", folder, folder=place, subset=True)
        if found.regenerated is not None and not _holds(found, types, severities):
            continue  # such as a regeneration that was stopped: it is continued
        if _fits(found, data):
            return found, refused
        refused.append(f"the corrupted images in {place} are not of this test set and were not used")
    return None, refused


def folder_to_write(name: str, folder: Path, severities: Sequence[int] | None = None) -> Path:
    """Where regenerated arrays go.

    All arrays of a folder have the same severities.  Fewer than all therefore have a folder of their own, so
    that the usual one stays free for all, unless that one has just these.
    """
    usual, own = (folder / place for place in _regenerated_folders(name, severities))
    wanted = in_order(severities, SEVERITIES)
    there = _recorded_severities(usual)
    return usual if wanted == (tuple(SEVERITIES) if there is None else there) else own


def in_order(wanted: Iterable[T] | None, offered: Iterable[T]) -> tuple[T, ...]:
    """What is wanted of what is offered, in that order; all of it where nothing is named."""
    chosen = None if wanted is None else set(wanted)
    return tuple(each for each in offered if chosen is None or each in chosen)


def _regenerated_folders(name: str, severities: Sequence[int] | None) -> tuple[str, str]:
    """The usual one, and that of these severities alone."""
    usual = f"{SOURCES[name]}-C-regenerated"
    return usual, f"{usual}-severities-{'-'.join(map(str, in_order(severities, SEVERITIES)))}"


def _is_empty(place: Path) -> bool:
    """Whether a regeneration was stopped there before its first array was whole."""
    return (place / RECORD).is_file() and not any((place / f"{each}.npy").is_file() for each in CORRUPTIONS)


def _holds(found: CorruptedImages, types: Sequence[str] | None, severities: Sequence[int] | None) -> bool:
    all_types = set(in_order(types, CORRUPTIONS)) <= set(found.corruptions)
    return all_types and (severities is None or set(severities) <= set(found.severities))


def _fits(found: CorruptedImages, data: ImageData) -> bool:
    labels = found.part(found.corruptions[0], found.severities[0]).labels
    return labels.shape == data.test.labels.shape and bool((labels == data.test.labels.cpu()).all())


def _recorded_severities(place: Path) -> tuple[int, ...] | None:
    """Of a regenerated folder; None where there is none, or where writing to it will tell its damage."""
    try:
        found = read_json(place / RECORD)["recipe"]["severities"]
        return tuple(int(severity) for severity in found)
    except (OSError, ValueError, KeyError, TypeError):
        return None
