"""A table or figure of the paper with our figures beside its own, from a folder of runs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpattention.experiments.reporting import read_runs
from gpattention.experiments.runs import find_runs
from gpattention.runs import Group, OverSeeds, Results, average, difference_from, group
from gpattention.runs.results import HOW_CLEAR
from gpattention.studies.paper.caveats import Matching, caveats, has, match_runs
from gpattention.studies.paper.checks import (
    ClaimResult,
    check_averages,
    check_claims,
    told_averages,
    told_bold,
)
from gpattention.studies.paper.spec import (
    MEASURES,
    Axis,
    Key,
    Measure,
    Note,
    PartSpec,
    PublishedValue,
    SlotSpec,
    TableSpec,
    table_spec,
)

Winner = Literal["ours", "paper", "tie"]
TOKENS = 64  # of a CIFAR image in the paper
_PARTS = {"sets": "Dataset", "detectors": "Detector", "inducing": "Inducing inputs", "layers": "Layer"}


@dataclass(frozen=True)
class PaperCell:
    """One number of ours and of the paper's, in its unit; either may be missing."""

    key: Key
    measure: Measure
    digits: int  # after the point
    ours: OverSeeds | None
    paper: PublishedValue | None
    paper_runs: int | None = None  # where the paper says
    recomputed: float | None = None  # the paper's average from its own parts
    mark: str = ""  # † ‡: the paper's average does not follow from its parts

    @property
    def winner(self) -> Winner | None:
        """Whose figure is better as printed; None unless there are both."""
        return None if self.paper is None else self._against(self.paper.value)

    @property
    def winner_recomputed(self) -> Winner | None:
        """The same against the recomputed average."""
        return None if self.recomputed is None else self._against(self.recomputed)

    @property
    def clear(self) -> bool:
        """Whether ours and the paper's figure differ clearly; see `gpattention.runs.results`."""
        if self.ours is None or self.paper is None:
            return False
        return difference_from(self.ours, self.paper.value, self.paper.sd, self.paper_runs).clear

    def _against(self, theirs: float) -> Winner | None:
        if self.ours is None:
            return None
        mine, other = round(self.ours.mean, self.digits), round(theirs, self.digits)
        if mine == other:
            return "tie"
        return "ours" if self.measure.better(mine, other) else "paper"


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

    name: str
    title: str
    place: str  # in the paper
    headings: tuple[str, str]  # of blocks and of lines
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    claims: tuple[ClaimResult, ...]
    notes: tuple[Note, ...]
    across: str = ""  # what the columns of a figure count

    @property
    def cells(self) -> tuple[PaperCell, ...]:
        """Those of the paper's own lines."""
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
        told = f"{self.filled} of {len(self.cells)} cells filled"
        if all(cell.paper is None for cell in self.cells):
            return f"{told}. The paper prints no numbers."
        wins = self.wins
        counts = f"ours in {wins['ours']}, the paper in {wins['paper']}, equal in {wins['tie']}"
        several = any(cell.ours and cell.ours.error is not None for cell in self.cells)
        clear = f" {sum(cell.clear for cell in self.cells)} of the differences are clear ({HOW_CLEAR})."
        return f"{told}. Better of {sum(wins.values())} compared: {counts}.{clear if several else ''}"


def paper_table(name: str, runs: str | Path | Sequence[Group]) -> PaperTable:
    """Our figures beside the paper's.

    Args:
        name: `table1` to `table5`, or `fig2` to `fig4`, of which the paper prints no numbers.
        runs: the folder where evaluated runs are, at any depth; or the runs, seeds of one model together.
    """
    spec = table_spec(name)
    groups = read_groups(runs) if isinstance(runs, str | Path) else runs
    matching = match_runs(spec, sorted(groups, key=lambda each: each.name))
    figures = _measured(spec, matching)
    published = {key: value.value for key, value in spec.published().items()}
    rows = tuple(_rows(spec, figures, matching))
    notes = (
        *caveats(spec, matching),
        *_told_gaps(spec, figures, matching.rows),
        *figures.notes,
        *spec.remarks,
        *told_averages(spec, check_averages(spec)),
        *_told_changes(rows),
        *told_bold(spec),
    )
    return PaperTable(
        name=name,
        title=spec.title,
        place=spec.place,
        headings=(_heading(spec, spec.axes[0]), _heading(spec, spec.axes[1])),
        columns=tuple(_shown(spec.axes[2], label) for label in spec.labels(spec.axes[2])),
        rows=rows,
        claims=check_claims(spec, {key: found.mean for key, found in figures.values.items()}, published),
        notes=tuple(dict.fromkeys(notes)),
        across=spec.across,
    )


def read_groups(folder: str | Path) -> list[Group]:
    """Every run in or below a folder, seeds of one recipe together."""
    if not find_runs(folder, unfinished=True):
        raise FileNotFoundError(f"expected runs in {folder}, got none: a run has a file recipe.json")
    runs = read_runs([folder])
    for run in runs:
        _ = run.parsed  # a recipe that cannot be read is told with its folder
    return group(runs)


@dataclass(frozen=True)
class _Figures:
    """All numbers of the runs, whose they are, and what must be said of some."""

    values: Mapping[Key, OverSeeds]
    notes: tuple[Note, ...]


def _measured(spec: TableSpec, matching: Matching) -> _Figures:
    values: dict[Key, OverSeeds] = {}
    notes: list[Note] = []
    groups = matching.groups
    results = Results.of(groups.values())
    for model, of in groups.items():
        for measure in spec.metrics:
            for part in spec.parts:
                found, told = find_value(spec, results, of.name, measure, part)
                if found is not None:
                    values[Key(model, measure.label, part.label)] = found.times(measure.metric.scale)
                    notes += [] if part.extra else told
    return _Figures(values, tuple(notes))


def _rows(spec: TableSpec, figures: _Figures, matching: Matching) -> Iterator[PaperRow]:
    """In the paper's order; our further models follow, in their own blocks or at the end of each."""
    further, groups = matching.further, matching.groups
    blocks, lines = ((*spec.labels(axis), *(further if axis == "model" else ())) for axis in spec.axes[:2])
    for block in blocks:
        for line in lines:
            cells = tuple(_cells(spec, figures, block, line))
            first = cells[0].key
            extra = first.model in further or spec.part(first.part).extra
            if extra and all(cell.ours is None for cell in cells):
                continue
            yield PaperRow(
                group=_shown(spec.axes[0], block),
                label=_shown(spec.axes[1], line),
                cells=cells,
                recipe=groups[first.model].name if first.model in groups else None,
                runs=max((cell.ours.count for cell in cells if cell.ours), default=0),
                extra=extra,
            )


def _cells(spec: TableSpec, figures: _Figures, block: str, line: str) -> Iterator[PaperCell]:
    published, checks = spec.published(), check_averages(spec)
    for column in spec.labels(spec.axes[2]):
        key = spec.key(block, line, column)
        paper, check = published.get(key), checks.get(key)
        yield PaperCell(
            key=key,
            measure=MEASURES[key.metric],
            digits=spec.digits if paper is None else paper.digits,
            ours=figures.values.get(key),
            paper=paper,
            paper_runs=spec.seeds,
            recomputed=None if check is None else check.recomputed,
            mark="" if check is None else check.mark,
        )


def _shown(axis: Axis, label: str) -> str:
    return MEASURES[label].heading if axis == "metric" else label


def _heading(spec: TableSpec, axis: Axis) -> str:
    return _PARTS[spec.source] if axis == "part" else axis.capitalize()


def _told_gaps(spec: TableSpec, figures: _Figures, rows: Mapping[str, Group]) -> Iterator[Note]:
    """Records that an evaluation lacks; where there is no evaluation, that is said elsewhere."""
    for model, of in rows.items():
        for measure in spec.metrics:
            parts = [part.label for part in spec.parts if not part.extra]
            lacking = [part for part in parts if Key(model, measure.label, part) not in figures.values]
            if lacking and has(of, spec.suites):
                records = " or ".join(measure.records)
                yield Note("missing", f"{model}: {of.name} has no {records} for {', '.join(lacking)}")


def _told_changes(rows: tuple[PaperRow, ...]) -> Iterator[Note]:
    """Averages where the paper's mistake decides who wins."""
    for row in rows:
        for cell in row.cells:
            if cell.mark and cell.winner != cell.winner_recomputed:
                text = (
                    f"{cell.key.model}, {cell.key.metric}, {cell.key.part}: better against the printed "
                    f"average is {cell.winner}, against the recomputed one {cell.winner_recomputed}"
                )
                yield Note("paper", text)


# One number out of the table of results; the model's own prediction, without temperature, as in the paper

Found = tuple[OverSeeds | None, list[Note]]


def find_value(spec: TableSpec, results: Results, recipe: str, measure: Measure, part: PartSpec) -> Found:
    """Over the seeds of a recipe, with what must be said of it; None where no run has such a record."""
    if part.mean_of:  # an average over detectors is the mean of their means
        several = [find_value(spec, results, recipe, measure, spec.part(each))[0] for each in part.mean_of]
        whole = [found for found in several if found is not None]
        return (average(whole) if len(whole) == len(several) else None), []
    for metric in measure.records:
        for suite in spec.suites:
            if spec.source == "detectors":
                found = _of_detector(spec, results, recipe, suite, measure, metric, part)
            else:
                found = _of_record(spec, results, recipe, suite, measure, metric, part), []
            if found[0] is not None:
                return found
    return None, []


def _of_record(
    spec: TableSpec, results: Results, recipe: str, suite: str, measure: Measure, metric: str, part: PartSpec
) -> OverSeeds | None:
    if spec.source == "sets":
        found = (results.find(recipe, suite, place, metric) for place in part.sets)
        return next((figure for figure in found if figure is not None), None)
    told = list(results.figures(recipe=recipe, suite=suite, metric=metric, predictor="model"))
    if spec.source == "inducing":
        sizes = ((what.get("inducing"), what.get("tokens", TOKENS), figure) for what, figure in told)
        return next((figure for m, n, figure in sizes if (m, n) == (part.inducing, TOKENS)), None)
    # layers count from 1 here, whatever number the first one has in the records
    by_layer = {
        what["layer"]: figure
        for what, figure in told
        if "layer" in what and all(what.get(name) == value for name, value in measure.detail.items())
    }
    values = [by_layer[layer] for layer in sorted(by_layer)]
    place = (part.layer or 1) - 1
    return values[place] if place < len(values) else None


def _of_detector(
    spec: TableSpec, results: Results, recipe: str, suite: str, measure: Measure, metric: str, part: PartSpec
) -> Found:
    """The mean over the out-of-distribution sets."""
    for score in part.scores:
        several = {
            s: results.find(recipe, suite, s, metric, score=score) for s in results.sets(recipe, suite)
        }
        by_set = {name: figure for name, figure in several.items() if figure is not None}
        used = {slot.label: name for slot in spec.slots if (name := _standing_for(slot, by_set))}
        if used:
            notes = [*_told_sets(spec, recipe, used), *_told_forms(recipe, metric, measure, score, part)]
            return average([by_set[name] for name in used.values()]), notes
    return None, []


def _standing_for(slot: SlotSpec, sets: Collection[str]) -> str | None:
    """The set that is this one of the paper, else a subset or a stand-in of it."""
    for name in slot.names:
        fitting = [each for each in sets if each.removeprefix("ood/").startswith(name)]
        if fitting:
            return min(fitting, key=lambda each: (len(each), each))
    return None


def _told_sets(spec: TableSpec, recipe: str, used: dict[str, str]) -> Iterator[Note]:
    missing = [slot.label for slot in spec.slots if slot.label not in used]
    if missing:
        text = f"mean over {', '.join(used)} only; no figures for {', '.join(missing)}"
        yield Note("reduced", text, recipe)
    for slot in spec.slots:
        name = used.get(slot.label, "").removeprefix("ood/")
        if name and name != slot.names[0]:
            yield Note("stand-in", f"{name} stands for {slot.label}", recipe)


def _told_forms(recipe: str, metric: str, measure: Measure, score: str, part: PartSpec) -> Iterator[Note]:
    if metric != measure.records[0]:
        text = f"{measure.label} is {metric}, as the evaluation has no {measure.records[0]}"
        yield Note("stand-in", text, recipe)
    if score != part.scores[0]:
        text = f"{part.label} is {score}, as the evaluation has no {part.scores[0]}"
        yield Note("stand-in", text, recipe)
