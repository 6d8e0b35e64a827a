"""How a table or figure of the paper is laid out, which recipes are its rows, and what it is said to show."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gpattention.experiments.paper.measures import MEASURES, Measure
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.published import (
    FIGURES,
    TABLES,
    PublishedValue,
    published_values,
    read_data,
)

Axis = Literal["model", "metric", "part"]
Source = Literal["sets", "detectors", "inducing", "layers"]


class Key(NamedTuple):
    """Which number: of which model, in which metric, on which part of the data (or detector, or layer)."""

    model: str
    metric: str
    part: str


@dataclass(frozen=True)
class ModelSpec:
    """A model of the paper and the recipes that train it here, the one to be preferred first."""

    label: str
    recipes: tuple[str, ...]
    published: str  # as the paper names it
    alpha: tuple[float, float] | None = None  # the paper's, from and to
    unstated: bool = False  # whether the paper is silent on how long it was trained
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the paper, by keys of a recipe


@dataclass(frozen=True)
class PartSpec:
    """A set of images or sentences, a detector, a number of inducing inputs or a layer."""

    label: str
    sets: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    mean_of: tuple[str, ...] = ()
    inducing: int | None = None
    layer: int | None = None
    extra: bool = False  # ours; the paper has no such line


@dataclass(frozen=True)
class SlotSpec:
    """One of the paper's out-of-distribution sets, and how names of ours that stand for it begin."""

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class AverageSpec:
    """What the paper's averages are averages of, and other weights with which they were tried."""

    part: str
    of: Mapping[str, float]
    words: str
    others: tuple[Mapping[str, float], ...] = ()
    others_words: str = ""


@dataclass(frozen=True)
class ClaimSpec:
    """A statement of the paper: some models beat others, in all cells or in a number of them."""

    text: str
    models: tuple[str, ...]
    against: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()  # all where none are named
    parts: tuple[str, ...] = ()
    at_least: int | None = None  # all where neither is given
    at_most: int | None = None
    within: float | None = None  # comparable: not worse than by this factor
    all: bool = False  # each of the models, not the best of them
    rises: bool = False  # from the first part to the last


@dataclass(frozen=True)
class TrainingSpec:
    """How the paper trained."""

    epochs: tuple[int, ...] = ()  # of its phases
    settings: Mapping[str, Any] = field(default_factory=dict)
    contextual: str | None = None  # the frozen embeddings of a text model


@dataclass(frozen=True)
class TableSpec:
    """A table or figure."""

    name: str
    title: str
    place: str
    axes: tuple[Axis, Axis, Axis]  # what blocks, lines and columns are
    source: Source
    suites: tuple[str, ...]
    data: str
    metrics: tuple[Measure, ...]
    models: tuple[ModelSpec, ...]
    parts: tuple[PartSpec, ...]
    training: TrainingSpec
    slots: tuple[SlotSpec, ...] = ()
    average: AverageSpec | None = None
    claims: tuple[ClaimSpec, ...] = ()
    remarks: tuple[Note, ...] = ()
    extras: str = ""  # how names of further models begin
    seeds: int | None = None  # of the paper, where it says
    digits: int = 3
    across: str = ""  # what the columns of a figure count

    def part(self, label: str) -> PartSpec:
        """By its label."""
        return next(part for part in self.parts if part.label == label)

    def labels(self, axis: Axis) -> tuple[str, ...]:
        """Of the paper's models, metrics or parts."""
        if axis == "model":
            return tuple(model.label for model in self.models)
        if axis == "metric":
            return tuple(measure.label for measure in self.metrics)
        return tuple(part.label for part in self.parts)

    def key(self, group: str, row: str, column: str) -> Key:
        """The number at a place of the layout."""
        return Key(**dict(zip(self.axes, (group, row, column), strict=True)))

    def published(self) -> dict[Key, PublishedValue]:
        """The paper's numbers by model, metric and part."""
        names = {model.published: model.label for model in self.models}
        found = {}
        for value in published_values(self.name):
            key = self.key(value.group, value.row, value.column)
            found[key._replace(model=names[key.model])] = value
        return found


def table_spec(name: str) -> TableSpec:
    """Of `table1` to `table5` or `fig2` to `fig4`."""
    if name not in (*TABLES, *FIGURES):
        raise ValueError(f"expected name to be one of {', '.join((*TABLES, *FIGURES))}, got {name!r}")
    plain = tomllib.loads(read_data(f"{name}.toml"))
    average = plain.pop("average", None)
    return TableSpec(
        name=name,
        metrics=tuple(MEASURES[label] for label in plain.pop("metrics")),
        models=tuple(ModelSpec(**_tuples({"published": m["label"]} | m)) for m in plain.pop("models")),
        parts=tuple(PartSpec(**_tuples(part)) for part in plain.pop("parts")),
        training=TrainingSpec(**_tuples(plain.pop("training"))),
        slots=tuple(SlotSpec(**_tuples(slot)) for slot in plain.pop("slots", ())),
        average=None if average is None else AverageSpec(**_tuples(average)),
        claims=tuple(ClaimSpec(**_tuples(claim)) for claim in plain.pop("claims")),
        remarks=tuple(Note(**remark) for remark in plain.pop("remarks", ())),
        **_tuples(plain),
    )


def _tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples, for what is frozen."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
