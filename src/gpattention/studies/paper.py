"""The paper's tables and figures with our figures beside its own.

What the paper prints is data: `published/` has a CSV file of the numbers of each table, and a TOML file with
the layout, the recipes, the claims and the remarks of each table and figure.  Ours come from the table of
results (`gpattention.runs`).
"""

import csv
import io
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpattention.checks import check_choice
from gpattention.data.corrupted import CORRUPTIONS, SEVERITIES
from gpattention.metrics import METRICS, Metric
from gpattention.runs import find_runs, name_without_seed, read_runs
from gpattention.runs.recipe import flat
from gpattention.runs.results import HOW_CLEAR, Group, OverSeeds, Results, average, difference_from, group
from gpattention.studies import published

TABLES = ("table1", "table2", "table3", "table4", "table5")
FIGURES = ("fig2", "fig3", "fig4")
# endings of the names of shortened copies: the same model, and notes say what was shortened
SHORTENED = re.compile(r"-(short|quick|small|reduced|\d+-?epochs?|limit-?\d+)$")
Plain = Mapping[str, Any]
Kind = Literal["missing", "reduced", "stand-in", "paper", "reading"]
Axis = Literal["model", "metric", "part"]
Winner = Literal["ours", "paper", "tie"]
Verdict = Literal["holds", "does not hold", "missing"]


# What the paper prints


@dataclass(frozen=True)
class PublishedValue:
    """One printed number, in the unit and with the digits of the paper."""

    table: str
    group: str  # block of lines
    row: str  # line, as the paper names it
    column: str
    metric: str  # name in the library's records
    value: float
    sd: float | None
    bold: bool
    recomputed: float | None  # an average, from the parts that the paper prints
    mark: str  # † where an average is not that to rounding, ‡ where it is off by more than its sd
    place: str
    digits: int  # printed after the point
    printed: str  # with the standard deviation


def published_values(name: str) -> tuple[PublishedValue, ...]:
    """Read the numbers that the paper prints in a table.

    Args:
        name: `table1` to `table5`, or `fig2` to `fig4`, of which none are printed.

    Returns:
        The numbers in the order of the paper.

    Raises:
        ValueError: there is no such table or figure.
    """
    check_choice("name", name, (*TABLES, *FIGURES))
    found = []
    for line in csv.DictReader(io.StringIO("" if name in FIGURES else published(f"{name}.csv"))):
        own: dict[str, Any] = {k: float(line[k]) if line[k] else None for k in ("value", "sd", "recomputed")}
        own |= {"bold": line["bold"] == "yes", "digits": len(line["value"].partition(".")[2])}
        own["printed"] = " ± ".join(filter(None, (line["value"], line["sd"])))
        found.append(PublishedValue(**{**line, **own}))
    return tuple(found)


@dataclass(frozen=True)
class Measure:
    """A metric as the paper prints it."""

    label: str
    records: Sequence[str]  # metrics of an evaluation's records, the one most like the paper's first
    detail: Mapping[str, str] = field(default_factory=dict)  # of the record

    @property
    def metric(self) -> Metric:
        """Direction, scale and unit are those of the library's metric."""
        return METRICS[self.records[0]]

    @property
    def heading(self) -> str:
        """Label, unit and direction; the paper leaves per cent out."""
        unit = "" if self.metric.unit in ("", "%") else f", {self.metric.unit}"
        return f"{self.label}{unit} {self.metric.arrow}"


MEASURES = {
    label: Measure(label, **entry) for label, entry in tomllib.loads(published("measures.toml")).items()
}


class Key(NamedTuple):
    """Which number: model, metric, and part of the data (or detector, or layer)."""

    model: str
    metric: str
    part: str


@dataclass(frozen=True)
class Note:
    """One remark, and the recipe that it is about, if it is about one."""

    kind: Kind
    text: str
    recipe: str = ""


@dataclass(frozen=True)
class TableSpec:
    """A table or figure as its TOML file in `published/` describes it."""

    name: str
    title: str
    place: str
    axes: Sequence[Axis]  # what blocks, lines and columns are
    parts_are: str  # heading of the parts
    suites: Sequence[str]
    data: str
    metrics: Sequence[str]  # of `MEASURES`
    models: Sequence[Plain]
    parts: Sequence[Plain]
    training: Plain
    claims: Sequence[Plain]
    slots: Sequence[Plain] = ()  # the paper's out-of-distribution sets, and how names of ours begin
    remarks: Sequence[Plain] = ()
    extras: str = ""  # how names of further models begin
    seeds: int | None = None  # of the paper, where it says
    digits: int = 3
    across: str = ""  # what the columns of a figure count

    def labels(self, axis: Axis) -> list[str]:
        """Labels of the paper's models, metrics or parts."""
        if axis == "metric":
            return list(self.metrics)
        return [each["label"] for each in (self.models if axis == "model" else self.parts)]

    def key(self, block: str, line: str, column: str) -> Key:
        """The number at a place of the layout."""
        return Key(**dict(zip(self.axes, (block, line, column), strict=True)))

    @cached_property
    def own_parts(self) -> list[str]:
        """Parts that the paper has; the others are lines of ours only."""
        return [part["label"] for part in self.parts if not part.get("extra", False)]

    @cached_property
    def published(self) -> dict[Key, PublishedValue]:
        """The paper's numbers by model, metric and part."""
        names = {model.get("published", model["label"]): model["label"] for model in self.models}
        found = {}
        for value in published_values(self.name):
            key = self.key(value.group, value.row, value.column)
            found[key._replace(model=names[key.model])] = value
        return found


def table_spec(name: str) -> TableSpec:
    """Read the description of `table1` to `table5` or `fig2` to `fig4`."""
    check_choice("name", name, (*TABLES, *FIGURES))
    return TableSpec(name=name, **tomllib.loads(published(f"{name}.toml")))


# Whether the paper's claims hold


@dataclass(frozen=True)
class Count:
    """The number of cases in which something holds, of those that have figures, and of all."""

    so: int
    measured: int
    cases: int

    def __str__(self) -> str:
        unmeasured = self.cases - self.measured
        return f"{self.so} of {self.cases}" + (f" ({unmeasured} missing)" if unmeasured else "")


@dataclass(frozen=True)
class ClaimResult:
    """A claim of the paper, and how it fares in its own figures and in ours."""

    text: str
    paper: Count | None  # None where the paper prints no figures
    paper_verdict: Verdict | None
    ours: Count
    verdict: Verdict


def check_claim(spec: TableSpec, claim: Plain, values: Mapping[Key, float]) -> tuple[Count, Verdict]:
    """In how many cases a claim holds, and the verdict: as soon as missing figures cannot change it."""
    metrics = claim.get("metrics") or spec.labels("metric")
    if claim.get("rises", False):
        ends = [[values.get(Key(model, metric, claim["parts"][end])) for end in (0, -1)]
                for model in claim["models"] for metric in metrics]  # fmt: skip
        cases = [None if a is None or b is None else b > a for a, b in ends]
    else:
        parts = claim.get("parts") or spec.own_parts
        cases = [_beats(claim, values, metric, part) for metric in metrics for part in parts]
    count = Count(cases.count(True), len(cases) - cases.count(None), len(cases))
    most = count.so + cases.count(None)
    if "at_most" in claim:
        low, high = count.so <= claim["at_most"], most <= claim["at_most"]
        return count, "holds" if high else "missing" if low else "does not hold"
    wanted = claim.get("at_least", count.cases)
    return count, "holds" if count.so >= wanted else "missing" if most >= wanted else "does not hold"


def _beats(claim: Plain, values: Mapping[Key, float], metric: str, part: str) -> bool | None:
    """Whether the models beat the others; None where the figures that are missing could change it."""
    shown = MEASURES[metric].metric
    best, worst = (max, min) if shown.larger else (min, max)
    good = math.inf if shown.larger else -math.inf

    def beats(missing: float) -> bool:
        """Whether they do if missing figures were this number, and those of the others its opposite."""
        sides = (("models", missing), ("against", -missing))
        mine, theirs = ([values.get(Key(m, metric, part), x) for m in claim[side]] for side, x in sides)
        one, rival = (worst if claim.get("all", False) else best)(mine), best(theirs)
        # "comparable" is only said of metrics of which less is better
        return one <= claim["within"] * rival if "within" in claim else shown.better(one, rival)

    return True if beats(-good) else None if beats(good) else False


# Which runs are which rows, and how they differ from the paper's experiments


def match_runs(spec: TableSpec, groups: Iterable[Group]) -> tuple[dict[str, Group], dict[str, Group]]:
    """Runs of the paper's models by label, and further ones of ours by theirs.

    Recipes are known by their names.  Of several that fit, one that has the table's suites goes first, then
    whole ones before shortened ones, then the one with most runs.
    """
    here = []
    for each in groups:
        if each.runs[0].data == spec.data:
            having = tuple(run for run in each.runs if any(suite in run.suites for suite in spec.suites))
            here.append(Group(each.name, having or each.runs))
    rows: dict[str, Group] = {}
    for model in spec.models:
        places = {each.name: _place(model, each) for each in here}
        fitting = [each for each in here if places[each.name] is not None]
        if fitting:
            rows[model["label"]] = min(
                fitting, key=lambda g: (not _has(g, spec), places[g.name], -len(g.runs), g.name)
            )
    others = [g for g in here if g not in rows.values() and _has(g, spec) and g.name.startswith(spec.extras)]
    return rows, {f"{each.name} (ours)": each for each in others}


def _has(group: Group, spec: TableSpec) -> bool:
    """Whether any run has any suite of the table."""
    return any(suite in run.suites for run in group.runs for suite in spec.suites)


def _recipe_name(group: Group) -> str:
    """The name of the recipe, without the values that distinguish runs of the same name."""
    return name_without_seed(group.runs[0].parsed.name)


def _place(model: Plain, group: Group) -> int | None:
    """Place among the model's recipes, whole ones before shortened ones; None if it is another model."""
    name = _recipe_name(group)
    whole = SHORTENED.sub("", name)
    return 2 * model["recipes"].index(whole) + (whole != name) if whole in model["recipes"] else None


def caveats(spec: TableSpec, rows: Mapping[str, Group], extras: Iterable[Group]) -> Iterator[Note]:
    """Everything that keeps our figures from being the paper's experiment."""
    for model in spec.models:
        label, of = model["label"], rows.get(model["label"])
        if of is None:
            yield Note("missing", f"{label}: no run of the recipe {' or '.join(model['recipes'])}")
        elif not _has(of, spec):
            how = f"`gpattention evaluate RUN --suite {spec.suites[0]}` makes it"
            yield Note("missing", f"{label}: {of.name} has no evaluation for this; {how}")
        else:
            yield from (Note("reduced", text, of.name) for text in _model_caveats(spec, model, of))
    epochs = sum(spec.training["epochs"])
    for of in extras:
        ours = of.runs[0].parsed.epochs
        if epochs and ours != epochs:
            yield Note("reduced", f"{ours} epochs, the paper's models {epochs}", of.name)
    for of in (*rows.values(), *extras):
        if _has(of, spec):
            yield from (Note(kind, text, of.name) for kind, text in _group_caveats(spec, of))


def _model_caveats(spec: TableSpec, model: Plain, group: Group) -> Iterator[str]:
    """Differences of the recipe from what the paper says about the model."""
    recipe = group.runs[0].parsed
    if _recipe_name(group) != model["recipes"][0]:
        yield f"fills the row {model['label']}, as {model['recipes'][0]} has no evaluation"
    theirs, ours = list(spec.training["epochs"]), [recipe.phases.kernel_epochs, recipe.phases.epochs]
    unstated = model.get("unstated", False)  # the paper is silent on how long it was trained
    total = len(theirs) == 1 or unstated
    if theirs and (sum(ours) != sum(theirs) if total else ours != theirs):
        trained, printed = " + ".join(map(str, ours if ours[0] else ours[1:])), " + ".join(map(str, theirs))
        silent = f"; the paper's own models {sum(theirs)}, of this one it does not say"
        yield f"{trained} epochs{silent if unstated else f', in the paper {printed}'}"
    values = flat(recipe.to_dict())
    for key, value in {**spec.training["settings"], **model.get("settings", {})}.items():
        if values.get(key) not in (None, value):  # None: the recipe leaves the model's default
            yield f"{key} = {values[key]}, in the paper {value}"
    if "alpha" in model:
        alphas = [recipe.regularizer.start, recipe.regularizer.end], list(model["alpha"])
        here, there = (f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in alphas)
        if recipe.regularizer.normalised:
            yield f"alpha {here} per token and dimension, in the paper {there} of another sum"
        elif alphas[0] != alphas[1]:
            yield f"alpha {here}, in the paper {there}"


def _group_caveats(spec: TableSpec, group: Group) -> Iterator[tuple[Kind, str]]:
    """Reduced data, embeddings, seeds and suites."""
    options = group.runs[0].parsed.data.options
    for option in ("subset", "limit"):
        if options.get(option):
            yield "reduced", f"trained with data.options.{option} = {options[option]}"
    if "contextual" in spec.training:
        theirs, given = spec.training["contextual"], options.get("contextual", {})
        given = given if isinstance(given, Mapping) else {"kind": str(given)}
        kind = given.get("kind", "none")
        if kind in ("none", "learned"):
            yield "stand-in", f"learned embeddings alone, in the paper {theirs} beside them"
        elif kind != theirs:
            source = f" ({Path(str(given['path'])).name})" if "path" in given else ""
            yield "stand-in", f"{kind}{source} stands for {theirs} as contextual embedding"
    seeds = [run.seed for run in group.runs]
    if len(set(seeds)) == 1:
        runs = f"; the paper has {spec.seeds} runs" if spec.seeds else ""
        yield "reduced", f"one seed, so no standard error{runs}"
    repeated = sorted({str(seed) for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        yield "reduced", f"several runs of seed {', '.join(repeated)}, which count once, by their mean"
    for suite in (run.suites[name] for run in group.runs for name in spec.suites if name in run.suites):
        if suite.data.endswith("-subset"):
            yield "stand-in", f"evaluated on {suite.data}"
        for note in suite.notes:  # they may begin with what they are about
            start, colon, rest = note.partition(": ")
            about = colon and start in ("missing", "reduced")
            yield (start, rest) if about else ("stand-in", note)  # type: ignore[misc]
        parts = {r.set for r in suite.records if r.set.startswith("corrupted/") and r.set.count("/") == 2}
        whole = len(CORRUPTIONS) * len(SEVERITIES)
        if suite.suite == "corrupted" and 0 < len(parts) < whole:
            yield "reduced", f"{len(parts)} of {whole} corruptions and severities"


# One number of the table of results: the model's own prediction, without temperature, as in the paper

Found = tuple[OverSeeds | None, list[Note]]


def find_value(spec: TableSpec, results: Results, recipe: str, measure: Measure, part: Plain) -> Found:
    """A number over the seeds of a recipe, and notes on it; None where no run has it."""
    if "mean_of" in part:  # an average over detectors is the mean of their means
        of = [each for each in spec.parts if each["label"] in part["mean_of"]]
        several = [find_value(spec, results, recipe, measure, each)[0] for each in of]
        whole = [found for found in several if found is not None]
        return (average(whole) if len(whole) == len(several) else None), []
    for metric in measure.records:
        for suite in spec.suites:
            if "scores" in part:
                found = _of_detector(spec, results, recipe, suite, measure, metric, part)
            else:
                detail = {**measure.detail, **part.get("detail", {})}
                figures = (results.find(recipe, suite, place, metric, **detail) for place in part["sets"])
                found = next((figure for figure in figures if figure is not None), None), []
            if found[0] is not None:
                return found
    return None, []


def _of_detector(
    spec: TableSpec, results: Results, recipe: str, suite: str, measure: Measure, metric: str, part: Plain
) -> Found:
    """The mean over the out-of-distribution sets."""
    for score in part["scores"]:
        sets = results.sets(recipe, suite)
        several = {place: results.find(recipe, suite, place, metric, score=score) for place in sets}
        by_set = {place.removeprefix("ood/"): figure for place, figure in several.items() if figure}
        used = {slot["label"]: name for slot in spec.slots if (name := _standing_for(slot, by_set))}
        if not used:
            continue
        notes = []
        if missing := [slot["label"] for slot in spec.slots if slot["label"] not in used]:
            text = f"mean over {', '.join(used)} only; no figures for {', '.join(missing)}"
            notes.append(Note("reduced", text, recipe))
        right = {slot["label"]: slot["names"][0] for slot in spec.slots}
        texts = [f"{name} stands for {label}" for label, name in used.items() if name != right[label]]
        for label, own, first in (
            (measure.label, metric, measure.records[0]),
            (part["label"], score, part["scores"][0]),
        ):
            texts += [f"{label} is {own}, as the evaluation has no {first}"] if own != first else []
        notes += [Note("stand-in", text, recipe) for text in texts]
        return average([by_set[name] for name in used.values()]), notes
    return None, []


def _standing_for(slot: Plain, sets: Collection[str]) -> str | None:
    """The name of our set for this one of the paper, which may be a subset or a stand-in."""
    for name in slot["names"]:
        fitting = [each for each in sets if each.startswith(name)]
        if fitting:
            return min(fitting, key=lambda each: (len(each), each))
    return None


# The table


@dataclass(frozen=True)
class PaperCell:
    """One number of ours and of the paper's, in its unit; either may be missing."""

    key: Key
    measure: Measure
    digits: int  # after the point
    ours: OverSeeds | None
    paper: PublishedValue | None
    paper_runs: int | None = None  # where the paper says

    @property
    def winner(self) -> Winner | None:
        """Whose figure is better as printed; None unless there are both."""
        return self._against(self.paper.value if self.paper else None)

    @property
    def winner_recomputed(self) -> Winner | None:
        """The same against the recomputed average."""
        return self._against(self.paper.recomputed if self.paper else None)

    @property
    def clear(self) -> bool:
        """Whether ours and the paper's figure differ clearly; see `gpattention.runs.results`."""
        if self.ours is None or self.paper is None:
            return False
        return difference_from(self.ours, self.paper.value, self.paper.sd, self.paper_runs).clear

    def _against(self, theirs: float | None) -> Winner | None:
        if self.ours is None or theirs is None:
            return None
        mine, other = round(self.ours.mean, self.digits), round(theirs, self.digits)
        if mine == other:
            return "tie"
        return "ours" if self.measure.metric.better(mine, other) else "paper"


@dataclass(frozen=True)
class PaperRow:
    """A line of the layout."""

    group: str
    label: str
    cells: tuple[PaperCell, ...]
    recipe: str | None  # whose runs; None where there are none
    runs: int
    extra: bool  # ours only: the paper has no such line


@dataclass(frozen=True)
class PaperTable:
    """A table or figure in the paper's layout."""

    spec: TableSpec
    rows: tuple[PaperRow, ...]
    claims: tuple[ClaimResult, ...]
    notes: tuple[Note, ...]

    @property
    def headings(self) -> list[str]:
        """Headings of the columns of words: what blocks and lines are."""
        parts_are = self.spec.parts_are
        return [parts_are if axis == "part" else axis.capitalize() for axis in self.spec.axes[:2]]

    @property
    def columns(self) -> list[str]:
        """Headings of the columns of numbers."""
        return [_shown(self.spec.axes[2], label) for label in self.spec.labels(self.spec.axes[2])]

    @property
    def cells(self) -> tuple[PaperCell, ...]:
        """The cells of the paper's own lines."""
        return tuple(cell for row in self.rows if not row.extra for cell in row.cells)

    @property
    def filled(self) -> int:
        """How many of them have our figure."""
        return sum(cell.ours is not None for cell in self.cells)

    @property
    def wins(self) -> dict[Winner, int]:
        """Whose figure is better, counted over cells that have both."""
        winners = [cell.winner for cell in self.cells]
        return {who: winners.count(who) for who in ("ours", "paper", "tie")}

    @property
    def share(self) -> str:
        """How much of the table is filled, and who wins how often, in words."""
        filled = f"{self.filled} of {len(self.cells)} cells filled"
        if all(cell.paper is None for cell in self.cells):
            return f"{filled}. The paper prints no numbers."
        wins = self.wins
        counts = f"ours in {wins['ours']}, the paper in {wins['paper']}, equal in {wins['tie']}"
        several = any(cell.ours and cell.ours.error is not None for cell in self.cells)
        clear = f" {sum(cell.clear for cell in self.cells)} of the differences are clear ({HOW_CLEAR})."
        return f"{filled}. Better of {sum(wins.values())} compared: {counts}.{clear if several else ''}"


def paper_table(name: str, runs: str | Path | Sequence[Group]) -> PaperTable:
    """Set our figures beside the paper's.

    Args:
        name: `table1` to `table5`, or `fig2` to `fig4`, of which the paper prints no numbers.
        runs: the folder where evaluated runs are, at any depth; or the runs, seeds of one model together.

    Returns:
        The table in the paper's layout, with claims and notes.

    Raises:
        ValueError: there is no such table, or a recipe cannot be read.
        FileNotFoundError: there are no runs in the folder.
    """
    spec = table_spec(name)
    groups = read_groups(runs) if isinstance(runs, str | Path) else runs
    rows, extras = match_runs(spec, sorted(groups, key=lambda each: each.name))
    values: dict[Key, OverSeeds] = {}
    found_notes: list[Note] = []
    results = Results.of({**rows, **extras}.values())
    for label, of in {**rows, **extras}.items():
        for measure in (MEASURES[metric] for metric in spec.metrics):
            for part in spec.parts:
                found, notes = find_value(spec, results, of.name, measure, part)
                if found is not None:
                    values[Key(label, measure.label, part["label"])] = found.times(measure.metric.scale)
                    found_notes += [] if part.get("extra") else notes
    lines = tuple(_rows(spec, values, rows, extras))
    remarks = (Note(**remark) for remark in spec.remarks)
    gaps = _gap_notes(spec, values, rows)
    all_notes = (*caveats(spec, rows, extras.values()), *gaps, *found_notes, *remarks, *_change_notes(lines))
    ours = {key: found.mean for key, found in values.items()}
    theirs = {key: value.value for key, value in spec.published.items()}
    claims = []
    for claim in spec.claims:
        there, holds_there = check_claim(spec, claim, theirs) if theirs else (None, None)
        claims.append(ClaimResult(claim["text"], there, holds_there, *check_claim(spec, claim, ours)))
    return PaperTable(spec, lines, tuple(claims), tuple(dict.fromkeys(all_notes)))


def read_groups(folder: str | Path) -> list[Group]:
    """Read every run in or below a folder, seeds of one recipe together."""
    if not find_runs(folder, unfinished=True):
        raise FileNotFoundError(f"expected runs in {folder}, got none: a run has a file recipe.json")
    runs = read_runs([folder])
    for run in runs:
        _ = run.parsed  # a recipe that cannot be read is an error that names its folder
    return group(runs)


def _rows(
    spec: TableSpec, values: Mapping[Key, OverSeeds], rows: Mapping[str, Group], extras: Mapping[str, Group]
) -> Iterator[PaperRow]:
    """Rows in the paper's order; our further models follow, in their own blocks or at the end of each."""
    groups = {**rows, **extras}
    blocks, lines = ([*spec.labels(axis), *(extras if axis == "model" else ())] for axis in spec.axes[:2])
    for block, line in ((block, line) for block in blocks for line in lines):
        cells = []
        for column in spec.labels(spec.axes[2]):
            key = spec.key(block, line, column)
            paper = spec.published.get(key)
            digits = spec.digits if paper is None else paper.digits
            cells.append(PaperCell(key, MEASURES[key.metric], digits, values.get(key), paper, spec.seeds))
        model, _, part = cells[0].key
        extra = model in extras or part not in spec.own_parts
        if extra and all(cell.ours is None for cell in cells):
            continue
        labels = _shown(spec.axes[0], block), _shown(spec.axes[1], line)
        recipe = groups[model].name if model in groups else None
        runs = max((cell.ours.count for cell in cells if cell.ours), default=0)
        yield PaperRow(*labels, tuple(cells), recipe, runs, extra)


def _shown(axis: Axis, label: str) -> str:
    return MEASURES[label].heading if axis == "metric" else label


def _gap_notes(spec: TableSpec, values: Mapping[Key, OverSeeds], rows: Mapping[str, Group]) -> Iterator[Note]:
    """Records that an evaluation lacks; where there is no evaluation, `caveats` says so."""
    for model, of in rows.items():
        for metric in spec.metrics:
            lacking = [part for part in spec.own_parts if Key(model, metric, part) not in values]
            if lacking and _has(of, spec):
                records = " or ".join(MEASURES[metric].records)
                yield Note("missing", f"{model}: {of.name} has no {records} for {', '.join(lacking)}")


def _change_notes(rows: Sequence[PaperRow]) -> Iterator[Note]:
    """Averages where the paper's mistake decides who wins."""
    for cell in (cell for row in rows for cell in row.cells):
        if cell.paper and cell.paper.mark and cell.winner != cell.winner_recomputed:
            text = (
                f"{', '.join(cell.key)}: better against the printed average is {cell.winner}, against the "
                f"recomputed one {cell.winner_recomputed}"
            )
            yield Note("paper", text)
