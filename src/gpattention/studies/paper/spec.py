"""The paper's tables and figures as data: what it prints, how it is laid out, and what it is said to show.

The numbers are in `data/`, a CSV file for each table; a TOML file beside each has layout, recipes and claims.
"""

import csv
import io
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from gpattention.metrics import METRICS, Metric

TABLES = ("table1", "table2", "table3", "table4", "table5")
FIGURES = ("fig2", "fig3", "fig4")


@dataclass(frozen=True)
class PublishedValue:
    """One printed number, in the unit and with the digits of the paper."""

    table: str
    group: str  # the block of lines that it stands in
    row: str  # its line, as the paper names it
    column: str
    metric: str  # of the library's records
    value: float
    sd: float | None
    digits: int  # printed after the point
    printed: str  # with the standard deviation
    bold: bool
    place: str

    @property
    def rounding(self) -> float:
        """The largest error of printing."""
        return 0.5 * 10.0**-self.digits


def read_data(name: str) -> str:
    """A data file of this package, as text."""
    return (files("gpattention.studies.paper") / "data" / name).read_text(encoding="utf-8")


def published_values(name: str) -> tuple[PublishedValue, ...]:
    """All numbers of a table in the order of the paper; of a figure none are printed."""
    if name in FIGURES:
        return ()
    if name not in TABLES:
        raise ValueError(f"expected name to be one of {', '.join((*TABLES, *FIGURES))}, got {name!r}")
    return tuple(_value(line) for line in csv.DictReader(io.StringIO(read_data(f"{name}.csv"))))


def _value(line: Mapping[str, str]) -> PublishedValue:
    return PublishedValue(
        table=line["table"],
        group=line["group"],
        row=line["row"],
        column=line["column"],
        metric=line["metric"],
        value=float(line["value"]),
        sd=float(line["sd"]) if line["sd"] else None,
        digits=len(line["value"].partition(".")[2]),
        printed=f"{line['value']} ± {line['sd']}" if line["sd"] else line["value"],
        bold=line["bold"] == "yes",
        place=line["place"],
    )


Kind = Literal["missing", "reduced", "stand-in", "paper", "reading"]

# in the order in which they are printed
HEADINGS: dict[Kind, str] = {
    "missing": "Missing",
    "reduced": "Reduced, or otherwise than in the paper",
    "stand-in": "Stand-ins, subsets and what the evaluations say of themselves",
    "paper": "The paper's own figures",
    "reading": "How to read",
}


@dataclass(frozen=True)
class Note:
    """One remark, and the recipe that it is about, if it is about one."""

    kind: Kind
    text: str
    recipe: str = ""


def gathered(notes: Iterable[Note]) -> dict[Kind, list[str]]:
    """By kind in the order of printing; the same remark about several recipes once, with their names."""
    about: dict[tuple[Kind, str], list[str]] = {}
    for note in notes:
        recipes = about.setdefault((note.kind, note.text), [])
        if note.recipe and note.recipe not in recipes:
            recipes.append(note.recipe)
    found: dict[Kind, list[str]] = {}
    for kind in HEADINGS:
        for (of, text), recipes in about.items():
            if of == kind:
                found.setdefault(kind, []).append(f"{', '.join(recipes)}: {text}" if recipes else text)
    return found


@dataclass(frozen=True)
class Measure:
    """One metric as the paper prints it."""

    label: str
    records: tuple[
        str, ...
    ]  # metrics of an evaluation's records, the one that is most like the paper's first
    detail: Mapping[str, str] = field(default_factory=dict)  # of the record

    @property
    def metric(self) -> Metric:
        """Direction, scale and unit are those of the library's metric."""
        return METRICS[self.records[0]]

    @property
    def heading(self) -> str:
        """With its unit and which way is better; the paper leaves per cent out."""
        unit = "" if self.metric.unit in ("", "%") else f", {self.metric.unit}"
        return f"{self.label}{unit} {self.metric.arrow}"

    def better(self, one: float, other: float) -> bool:
        """Whether one figure beats another."""
        return self.metric.better(one, other)

    def best(self, values: list[float]) -> float:
        """Of some figures."""
        return max(values) if self.metric.larger else min(values)

    def worst(self, values: list[float]) -> float:
        """Of some figures."""
        return min(values) if self.metric.larger else max(values)


_ALL = (
    Measure("Acc", ("accuracy",)),
    Measure("MCC", ("mcc",)),
    Measure("NLL", ("nll",)),
    # means over batches, as the paper's: pooled errors are smaller and would win unfairly
    Measure("MCE", ("batch_mce",)),
    Measure("ECE", ("batch_ece",)),
    Measure("AUROC", ("auroc",)),
    Measure("AUPR-IN", ("aupr_in",)),
    Measure("AUPR-OUT", ("aupr_out",)),
    Measure("FPR@95", ("fpr95_out", "fpr95")),
    Measure("Memory", ("train_peak_mib",)),
    Measure("Epoch", ("train_epoch_seconds",)),
    Measure("Similarity after attention", ("token_similarity",), {"after": "attention"}),
    Measure("Similarity after block", ("token_similarity",), {"after": "block"}),
)
MEASURES = {measure.label: measure for measure in _ALL}


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
