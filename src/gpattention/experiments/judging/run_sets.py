"""The items that a run is judged on: its held-out parts, and items of other kinds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gpattention.data import ImageData, TextData, Texts, load
from gpattention.data.places import StrPath
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.suites.corrupted import set_name
from gpattention.experiments.inputs.preparation import prepare
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER, ImagePreprocessing, TextPreprocessing
from gpattention.experiments.judging.corrupted_source import (
    CorruptedSource,
    corrupted_origin,
    open_corrupted,
)
from gpattention.experiments.judging.file_content import content_digest
from gpattention.experiments.judging.outside_sets import find_outside
from gpattention.experiments.judging.shifted_items import shifted_items
from gpattention.experiments.runs import Run
from gpattention.models.rows import Inputs

OpenCorrupted = Callable[[torch.device, Callable[[int, int], object] | None], CorruptedSource]
Encoder = Callable[[Sequence[Sequence[str]]], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class RunSets:
    """Everything that a run's data offers; what is large is brought when it is asked for."""

    kind: Literal["images", "texts"]
    data: str
    classes: tuple[str, ...]
    train: ItemSet
    validation: ItemSet
    chose_weights: ItemSet  # the whole validation split, whatever the limit of this evaluation
    test: ItemSet
    outside: Mapping[str, Callable[[], ItemSet]]  # by name, ood/NAME
    outside_notes: tuple[str, ...] = ()
    outside_files: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # or folders they are read from
    corrupted: OpenCorrupted | None = None
    corrupted_origin: Callable[[], dict[str, Any]] | None = None  # what they depend on; makes none
    shifted: Callable[[], ItemSet] | None = None  # validation items under shifts
    encoder: Encoder | None = None  # of words
    limit: int | None = None

    def adopt(self, items: ItemSet) -> ItemSet:
        """Items of another run for this one's model, whose normalisation or vocabulary may be another."""
        if self.encoder is None:
            return ItemSet(items.name, items.stored, items.labels, self.test.prepare)
        words = items.words or ()
        return ItemSet(items.name, dict(self.encoder(words)), items.labels, words=words)

    def described(self, suite: str) -> dict[str, Any]:
        """What the data of a suite hold: its numbers are of no other."""
        told: dict[str, Any] = {"validation": self.validation.digest, "test": self.test.digest}
        if suite == "corrupted" and self.corrupted_origin is not None:
            told["corrupted"] = self.corrupted_origin()
        if suite == "ood" or (suite == "clean" and self.kind == "texts"):
            told["outside"] = self.outside_contents()
        return told

    def outside_contents(self) -> dict[str, str]:
        """SHA-256 of what each set of another kind holds, of its files where decoding would cost more."""
        return {name: self._outside_content(name) for name in sorted(self.outside)}

    def _outside_content(self, name: str) -> str:
        try:
            files = self.outside_files.get(name)
            if files is None:
                return self.outside[name]().digest
            return content_digest(files) if self.limit is None else f"{content_digest(files)} spread"
        except OSError as error:
            return f"could not be read: {error}"

    def corrupted_items(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        images = source.images(corruption, severity)[: len(self.test)]
        return ItemSet(set_name(corruption, severity), images, self.test.labels, self.test.prepare)


def run_sets(
    run: Run,
    root: StrPath | None = None,
    *,
    limit: int | None = None,
    types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
) -> RunSets:
    """The data of a run's recipe, cut to at most `limit` items a set (training items are not cut).

    Of validation and test these are the first, as both are in an order that means nothing, so that
    corruptions are of the same items.  Sets of other kinds come in the order of their files, one class after
    the other: of them the items are spread evenly over the whole (`ItemSet.spread`).  All are the same on
    every machine.
    `types` and `severities` leave out all other corruptions.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit to be at least 1, got {limit}")
    recipe = run.recipe
    if recipe.model.type == "vision":
        data = load(recipe.data.name, root, recipe.seed, **recipe.data.options)
        if not isinstance(data, ImageData):
            raise ValueError(f"expected data of images for a vision model, got {recipe.data.name!r}")
        return _of_images(run, data, root, limit, types, severities)
    prepared = prepare(recipe, root)
    if _is_saved(run) and not prepared.preprocessing.is_same(run.folder):
        raise _other_data(run)
    assert isinstance(prepared.data, TextData)
    assert isinstance(prepared.preprocessing, TextPreprocessing)
    return _of_texts(prepared.data, prepared.preprocessing.encoder, limit)


def _of_images(
    run: Run,
    data: ImageData,
    root: StrPath | None,
    limit: int | None,
    types: Sequence[str] | None,
    severities: Sequence[int] | None,
) -> RunSets:
    name, normalisation = run.recipe.data.name, data.normalisation
    if _is_saved(run):
        saved = run.preprocessing
        assert isinstance(saved, ImagePreprocessing)
        if (saved.normalisation, saved.classes) != (normalisation, data.classes):
            raise _other_data(run)

    def normalised(stored: Inputs) -> Inputs:
        assert isinstance(stored, Tensor)
        return normalisation(stored)

    def items(name: str, images: Tensor, labels: Tensor | None = None) -> ItemSet:
        return ItemSet(name, images, labels, normalised)

    def opened(device: torch.device, progress: Callable[[int, int], object] | None) -> CorruptedSource:
        return open_corrupted(
            name,
            data,
            root,
            types=types,
            severities=severities,
            limit=limit,
            device=device,
            progress=progress,
        )

    def loader(name: str, bring: Callable[[], Tensor]) -> Callable[[], ItemSet]:
        return lambda: items(name, bring()).spread(limit)

    outside = find_outside(data, root)
    whole = items("validation", data.validation.images, data.validation.labels)
    validation = whole.first(limit)
    return RunSets(
        kind="images",
        data=data.name,
        classes=data.classes,
        train=items("train", data.train.images, data.train.labels),
        validation=validation,
        chose_weights=whole,
        test=items("test", data.test.images, data.test.labels).first(limit),
        outside={f"ood/{name}": loader(f"ood/{name}", bring) for name, bring in outside.images.items()},
        outside_notes=outside.notes,
        outside_files={f"ood/{name}": files for name, files in outside.files.items()},
        corrupted=opened,
        corrupted_origin=partial(
            corrupted_origin, name, data, root, types=types, severities=severities, limit=limit
        ),
        shifted=lambda: shifted_items(validation),
        limit=limit,
    )


def _of_texts(data: TextData, encoder: Encoder, limit: int | None) -> RunSets:
    def items(name: str, part: Texts) -> ItemSet:
        words = tuple(tuple(sentence) for sentence in part.words)
        return ItemSet(name, dict(part.inputs), part.labels, words=words)

    def loader(name: str, part: Texts) -> Callable[[], ItemSet]:
        return lambda: items(name, part).spread(limit)

    whole = items("validation", data.validation)
    return RunSets(
        kind="texts",
        data=data.name,
        classes=data.classes,
        train=items("train", data.train),
        validation=whole.first(limit),
        chose_weights=whole,
        test=items("test", data.test).first(limit),
        outside={f"ood/{name}": loader(f"ood/{name}", part) for name, part in data.ood.items()},
        encoder=encoder,
        limit=limit,
    )


def _is_saved(run: Run) -> bool:
    return (run.folder / FOLDER / FILE).is_file()


def _other_data(run: Run) -> ValueError:
    return ValueError(
        f"expected the data that {run.folder} was trained on, got other data of the name "
        f"{run.recipe.data.name!r}: its classes, normalisation or words are not those of the run"
    )
