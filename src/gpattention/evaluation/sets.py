"""The items on which a run is evaluated: its held-out parts, and items of other kinds on this machine."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gpattention.checks import check_count, check_name
from gpattention.data import (
    CIFAR10,
    CIFAR100,
    OOD_SETS,
    TEXT_SHIFTS,
    Cifar,
    ImageData,
    data_root,
    entry_of,
    image_files,
    load_cifar,
    load_ood,
    shift_texts,
    status_of,
)
from gpattention.data.cifar import TEST as TEST_IMAGES
from gpattention.data.shifts import SEVERITIES as SHIFT_SEVERITIES
from gpattention.data.shifts import shift, shifts_of
from gpattention.evaluation.corrupted import CorruptedSource, Corruptions, set_name
from gpattention.evaluation.predictions import ItemSet, row_digests
from gpattention.files import StrPath, file_digest
from gpattention.runs import Run, prepare
from gpattention.runs.inputs import FILE, FOLDER, TextEncoder, TextPreprocessing

SIBLINGS = {"cifar10": CIFAR100, "cifar100": CIFAR10}  # no class in common
SHIFTED_ITEMS = 250  # of the validation set, each under every shift at every severity


@dataclass(frozen=True, eq=False)
class RunSets:
    """All sets of a run's data; large ones are loaded when they are needed.

    Attributes:
        kind: images or texts.
        data: name of the data set.
        classes: their names.
        train: never cut.
        validation: cut to the limit, as test is.
        chose_weights: the whole validation split, whatever the limit of this evaluation.
        test: cut to the limit.
        outside: functions that load the sets of other kinds, by name, ood/NAME.
        outside_notes: notes about these sets.
        outside_files: the files or folders that they are read from.
        corruptions: of images.
        encoder: of words.
        limit: most items of a set.
        corrupted_limit: most items of a corrupted set.
    """

    kind: Literal["images", "texts"]
    data: str
    classes: tuple[str, ...]
    train: ItemSet
    validation: ItemSet
    chose_weights: ItemSet
    test: ItemSet
    outside: Mapping[str, Callable[[], ItemSet]]
    outside_notes: tuple[str, ...] = ()
    outside_files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    corruptions: Corruptions | None = None
    encoder: TextEncoder | None = None
    limit: int | None = None
    corrupted_limit: int | None = None

    def adopt(self, items: ItemSet) -> ItemSet:
        """Items of another run, prepared for this run's model with its own normalisation or vocabulary."""
        if self.encoder is None:
            return ItemSet(items.name, items.stored, items.labels, self.test.prepare)
        words = items.words or ()
        return ItemSet(items.name, dict(self.encoder(words)), items.labels, words=words)

    def load_outside(self) -> tuple[list[ItemSet], tuple[str, ...]]:
        """Every set of another kind that can be read, and notes, which include why others cannot."""
        loaded, notes = [], list(self.outside_notes)
        for name, load in self.outside.items():
            try:
                loaded.append(load())
            except (ValueError, OSError, ImportError) as error:
                notes.append(f"{name} could not be read: {error}")
        return loaded, tuple(notes)

    def corrupted_items(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        few = self.test.first(self.corrupted_limit)
        images = source.images(corruption, severity)[: len(few)]
        return ItemSet(set_name(corruption, severity), images, few.labels, few.prepare)

    def described(self, suite: str) -> dict[str, Any]:
        """Digests of the data of a suite, by which numbers from other data are recognised."""
        found: dict[str, Any] = {"validation": self.validation.digest, "test": self.test.digest}
        if suite == "corrupted" and self.corruptions is not None:
            found["corrupted"] = self.corruptions.origin()
        if suite == "ood" or (suite == "clean" and self.kind == "texts"):
            found["outside"] = {name: self._outside_content(name) for name in sorted(self.outside)}
        return found

    def _outside_content(self, name: str) -> str:
        """SHA-256 of the items of a set of another kind, or of its files, if it is read from some."""
        try:
            files = self.outside_files.get(name)
            if files is None:
                return self.outside[name]().digest
            return content_digest(files) if self.limit is None else f"{content_digest(files)} spread"
        except OSError as error:
            return f"could not be read: {error}"


def run_sets(
    run: Run, root: StrPath | None = None, *, limit: int | None = None, types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None, corrupted_limit: int | None = None,
) -> RunSets:  # fmt: skip
    """The data of a run's recipe, with at most `limit` items in each set but the training set.

    Validation and test sets, whose order has no meaning, keep their first items, so that corruptions are of
    the same items.  Sets of other kinds have the order of their files, one class after the other, and keep
    items spread evenly over the whole set (`ItemSet.spread`).  The choice is the same on every machine.

    Args:
        run: its recipe names the data.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        limit: most items of each set.
        types: the only corruptions to use.
        severities: the only severities to use.
        corrupted_limit: most items of each corrupted set.

    Returns:
        The sets.

    Raises:
        ValueError: a limit below 1, or other data than the run was trained on.
    """
    limit = None if limit is None else check_count("limit", limit)
    prepared = prepare(run.recipe, root)
    data, preprocessing = prepared.data, prepared.preprocessing
    if isinstance(data, ImageData):
        normalisation, found = data.normalisation, find_outside(data, root)
        names: Iterable[str] = found.images
        few = min((x for x in (limit, corrupted_limit) if x is not None), default=None)
        more: dict[str, Any] = {
            "kind": "images", "outside_notes": tuple(found.notes), "outside_files": found.files,
            "corruptions": Corruptions(run.recipe.data.name, data, root, types, severities, few),
        }  # fmt: skip

        def items(name: str, part: Any) -> ItemSet:
            return ItemSet(name, part.images, part.labels, normalisation)

        def other(name: str) -> ItemSet:
            return ItemSet(name, found.images[name](), None, normalisation).spread(limit)

    else:
        assert isinstance(preprocessing, TextPreprocessing)
        more = {"kind": "texts", "encoder": preprocessing.encoder}
        names = texts = {f"ood/{name}": part for name, part in data.ood.items()}

        def items(name: str, part: Any) -> ItemSet:
            words = tuple(tuple(sentence) for sentence in part.words)
            return ItemSet(name, dict(part.inputs), part.labels, words=words)

        def other(name: str) -> ItemSet:
            return items(name, texts[name]).spread(limit)

    # runs of older versions, and of `fit` itself, have kept nothing to compare with
    if (run.folder / FOLDER / FILE).is_file() and not preprocessing.is_same(run.folder):
        got = f"other data of the name {run.recipe.data.name!r}"
        raise ValueError(f"expected the data that {run.folder} was trained on, got {got}")
    whole = items("validation", data.validation)
    return RunSets(
        data=data.name, classes=data.classes, train=items("train", data.train), validation=whole.first(limit),
        chose_weights=whole, test=items("test", data.test).first(limit), limit=limit,
        corrupted_limit=corrupted_limit, **more,
        outside={name: partial(other, name) for name in names},
    )  # fmt: skip


def shifted_items(validation: ItemSet, encoder: TextEncoder | None = None) -> ItemSet:
    """The first validation items under synthetic shifts, to which temperatures are fitted.

    Images are shifted by `gpattention.data.shifts`, none of which is a corruption, and sentences by
    `shift_texts`.  Sentences that become longer than the model takes are cut.

    Args:
        validation: 8-bit images, or sentences with their words; with labels.
        encoder: of the words of sentences.

    Returns:
        One set with the first 250 items under every shift at every severity.

    Raises:
        ValueError: there are no images, no words, no encoder for them, or no labels.
    """
    kept = validation.first(SHIFTED_ITEMS)
    kinds = list(product(_shift_names(kept), SHIFT_SEVERITIES))
    labels = None if kept.labels is None else kept.labels.repeat(len(kinds))
    if labels is not None and isinstance(kept.stored, Tensor):
        images = torch.cat([shift(kept.stored, name, severity) for name, severity in kinds])
        return ItemSet("shifted", images, labels, kept.prepare)
    if labels is not None and kept.words is not None and encoder is not None:
        texts = [" ".join(words) for words in kept.words]
        changed = (text.split() for name, severity in kinds for text in shift_texts(texts, name, severity))
        words = tuple(tuple(found[: encoder.length]) for found in changed)
        return ItemSet("shifted", encoder(words), labels, words=words)
    wanted = "images, or sentences with words and an encoder, with labels to shift"
    raise ValueError(f"expected {wanted}, got {validation.name}")


def shift_places(shifted: ItemSet) -> dict[str, slice]:
    """The places of the items of each shift, at all severities, in the set of `shifted_items`."""
    names = _shift_names(shifted)
    each = len(shifted) // len(names)
    return {name: slice(i * each, (i + 1) * each) for i, name in enumerate(names)}


def idle_shifts(shifted: ItemSet, validation: ItemSet) -> tuple[str, ...]:
    """Shifts that the model cannot see, such as a change of case if the vocabulary is in lower case.

    Args:
        shifted: made by `shifted_items`.
        validation: the set it was made from.

    Returns:
        Names of the shifts that change no input.
    """
    # inputs are compared, as two spellings of an unknown word are the same input
    before = row_digests(validation.first(SHIFTED_ITEMS).stored) * len(SHIFT_SEVERITIES)
    after = row_digests(shifted.stored)
    return tuple(name for name, where in shift_places(shifted).items() if after[where] == before)


def _shift_names(items: ItemSet) -> tuple[str, ...]:
    return shifts_of(items.stored.shape[1]) if isinstance(items.stored, Tensor) else tuple(TEXT_SHIFTS)


# Images of other kinds than a run was trained on


@dataclass(eq=False)
class OutsideSets:
    """Functions that load the images of sets ood/NAME, notes, and the files or folders that are read."""

    images: dict[str, Callable[[], Tensor]]  # [n, C, H, W] uint8
    notes: list[str] = field(default_factory=list)
    files: dict[str, list[Path]] = field(default_factory=dict)

    def add(self, name: str, load: Callable[[], Tensor], files: list[Path], part: str = "") -> None:
        """Add a set that is read from files; `part` says how much of it there is, if it is incomplete."""
        if part:
            name = f"{name}-subset"
            self.notes.append(f"{name}: {part}")
        self.images[name], self.files[name] = load, files


def find_outside(data: ImageData, root: StrPath | None = None) -> OutsideSets:
    """The sets on this machine: those of the data; for square colour images also known sets and ROOT/ood.

    CIFAR-10 is compared with the test images of CIFAR-100 too, and the other way round.
    """
    found = OutsideSets({f"ood/{name}": partial(getattr, part, "images") for name, part in data.ood.items()})
    height, width = data.image_size
    if data.channels != 3 or height != width or data.name == "digits":
        return found
    folder = data_root(root)
    sibling = SIBLINGS.get(data.name.removesuffix("-subset"))
    for name in (*OOD_SETS, *([] if sibling is None else [sibling.name])):
        status, place = status_of(entry_of(name), folder), f"ood/{name}"
        if status.where is None or status.state == "incomplete":
            found.notes.append(f"{place} is missing: {status.how}")
        elif name in OOD_SETS:
            count, all = len(image_files(status.where)), OOD_SETS[name].images
            part = "" if count == all else f"{count} of {all} images"
            found.add(place, partial(_read, name, folder, height), [status.where], part)
        elif sibling is not None:
            load = partial(_test_images, sibling, folder)
            # a subset has to be read now to count its images
            part = f"{len(load())} of {TEST_IMAGES} test images" if status.state == "subset" else ""
            files = sorted(status.where.glob("test*"))  # a file, or a folder of classes
            found.add(place, load, files, part)
    _add_own_sets(found, folder, height)
    return found


def _add_own_sets(found: OutsideSets, root: Path, size: int) -> None:
    """Add the folders and .npz files of images in ROOT/ood."""
    for place in sorted((root / "ood").iterdir()) if (root / "ood").is_dir() else ():
        if place.name.startswith(".") or not (place.is_dir() or place.suffix == ".npz"):
            continue
        name = place.name.removesuffix(".npz")
        try:
            check_name(f"{str(place)!r}", f"{name}.safetensors")  # the file of its predictions
        except ValueError as error:
            found.notes.append(f"ood/{name!a} is left out: {error}")
            continue
        if f"ood/{name}" in found.files:
            found.notes.append(f"ood/{name}: {place} is left out, as another set has this name")
            continue
        about = "a stand-in, not a published set" if "standin" in name else "a set of your own"
        found.notes.append(f"ood/{name} is {about}")
        found.add(f"ood/{name}", partial(_read, str(place.resolve()), root, size), [place])


def _test_images(kind: Cifar, root: Path) -> Tensor:
    return load_cifar(kind, root, subset=True).test.images


def _read(source: str, root: Path, size: int) -> Tensor:
    return load_ood(source, root, size=size, subset=True).images


def content_digest(places: Iterable[Path]) -> str:
    """One digest of the contents of files, by which their replacement is noticed.

    A process that evaluates many runs reads each file once, unless its size or time of change differs.

    Args:
        places: files, and folders of images.

    Returns:
        SHA-256 over names and contents of files, and of all images in and below folders.
    """
    total = hashlib.sha256()
    for place in places:
        for file in image_files(place) if place.is_dir() else [place]:
            found = file.stat()
            content = _of_file(file, found.st_size, found.st_mtime_ns)
            total.update(f"{file.relative_to(place.parent)} {content}\n".encode())
    return total.hexdigest()


@cache
def _of_file(file: Path, size: int, changed: int) -> str:
    return file_digest(file)
