"""From a folder of runs to a table of the paper."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from gpattention.experiments.paper.caveats import caveats
from gpattention.experiments.paper.claims import check_claims
from gpattention.experiments.paper.consistency import check_averages, told_averages, told_bold
from gpattention.experiments.paper.evaluated import RunGroup, read_groups
from gpattention.experiments.paper.matching import match_runs
from gpattention.experiments.paper.measures import MEASURES
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.sources import find_value
from gpattention.experiments.paper.spec import Axis, Key, TableSpec, table_spec
from gpattention.experiments.paper.table import Measured, PaperCell, PaperRow, PaperTable

_PARTS = {"sets": "Dataset", "detectors": "Detector", "inducing": "Inducing inputs", "layers": "Layer"}


def paper_table(name: str, folder: str | Path, only: Collection[Path] | None = None) -> PaperTable:
    """Our figures beside the paper's.

    Args:
        name: `table1` to `table5`, or `fig2` to `fig4`, of which the paper prints no numbers.
        folder: where runs with their evaluations are, at any depth.
        only: some of these runs; all if not given.
    """
    spec = table_spec(name)
    matching = match_runs(spec, read_groups(folder, only))
    further = {f"{group.name} (ours)": group for group in matching.extras}
    figures = _measured(spec, {**matching.rows, **further})
    published = {key: value.value for key, value in spec.published().items()}
    rows = tuple(_rows(spec, figures, further))
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


@dataclass(frozen=True)
class _Figures:
    """All numbers of the runs, whose they are, and what must be said of some."""

    values: Mapping[Key, Measured]
    groups: Mapping[str, RunGroup]
    notes: tuple[Note, ...]


def _measured(spec: TableSpec, groups: Mapping[str, RunGroup]) -> _Figures:
    values: dict[Key, Measured] = {}
    notes: list[Note] = []
    for model, group in groups.items():
        for measure in spec.metrics:
            for part in spec.parts:
                found = [f for run in group.runs if (f := find_value(spec, run, measure, part)) is not None]
                if found:
                    several = [f.value for f in found]
                    sd = stdev(several) if len(several) > 1 else None
                    values[Key(model, measure.label, part.label)] = Measured(fmean(several), sd, len(several))
                    notes += [note for f in found for note in f.notes if not part.extra]
    return _Figures(values, groups, tuple(notes))


def _rows(spec: TableSpec, figures: _Figures, further: Mapping[str, RunGroup]) -> Iterator[PaperRow]:
    """In the paper's order; our further models follow, in their own blocks or at the end of each."""
    blocks, lines = ((*spec.labels(axis), *(further if axis == "model" else ())) for axis in spec.axes[:2])
    for block in blocks:
        for line in lines:
            cells = tuple(_cells(spec, figures, block, line))
            first = cells[0].key
            extra = first.model in further or spec.part(first.part).extra
            if extra and all(cell.ours is None for cell in cells):
                continue
            group = figures.groups.get(first.model)
            yield PaperRow(
                group=_shown(spec.axes[0], block),
                label=_shown(spec.axes[1], line),
                cells=cells,
                recipe=None if group is None else group.name,
                runs=max((cell.ours.n for cell in cells if cell.ours), default=0),
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
            recomputed=None if check is None else check.recomputed,
            mark="" if check is None else check.mark,
        )


def _shown(axis: Axis, label: str) -> str:
    return MEASURES[label].heading if axis == "metric" else label


def _heading(spec: TableSpec, axis: Axis) -> str:
    return _PARTS[spec.source] if axis == "part" else axis.capitalize()


def _told_gaps(spec: TableSpec, figures: _Figures, rows: Mapping[str, RunGroup]) -> Iterator[Note]:
    """Records that an evaluation lacks; where there is no evaluation, that is said elsewhere."""
    for model, group in rows.items():
        for measure in spec.metrics:
            parts = [part.label for part in spec.parts if not part.extra]
            lacking = [part for part in parts if Key(model, measure.label, part) not in figures.values]
            if lacking and group.has(spec.suites):
                records = " or ".join(measure.records)
                yield Note("missing", f"{model}: {group.name} has no {records} for {', '.join(lacking)}")


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
