"""The comparison as Markdown and CSV: means over seeds, and differences from the baseline."""

from collections.abc import Mapping, Sequence

from gpattention.experiments.adoption.cells import Cell
from gpattention.experiments.adoption.methods import BASELINE
from gpattention.experiments.adoption.summary import Column, Mean, column_mean, paired_difference
from gpattention.reports.escaping import Markup, csv_text, markdown, markdown_table

# Student's t, 97.5 %, by the number of seeds
T_VALUES = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
LAST = 2.228  # of 11 seeds; of more it is less, so this is to the safe side
EMPTY = "-"
DIFFERENCES = (
    "Differences are taken seed by seed, method minus {baseline}, with their standard error; bold ones are "
    "further from 0 than chance alone would bring them in one of twenty cases (Student's t)."
)


def grouped(cells: Sequence[Cell]) -> dict[str, dict[str, list[Cell]]]:
    """By group and method, in the order in which they come."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.group, {}).setdefault(cell.method, []).append(cell)
    return found


def to_markdown(
    cells: Sequence[Cell],
    columns: Sequence[Column],
    titles: Mapping[str, str],
    baselines: Sequence[str] = (BASELINE,),
) -> str:
    """For each group a table of means and one of differences from every baseline that it has."""
    parts = []
    for group, methods in grouped(cells).items():
        shown = [c for c in columns if any(column_mean(of, c) for of in methods.values())]
        parts += [f"## {markdown(group)}", means_table(methods, shown, titles)]
        for baseline in baselines:
            if baseline in methods and len(methods) > 1:
                told = DIFFERENCES.format(baseline=_title(titles, baseline))
                parts += [told, differences_table(methods, shown, titles, baseline)]
    return "\n\n".join(parts) + "\n"


def means_table(
    methods: Mapping[str, Sequence[Cell]], columns: Sequence[Column], titles: Mapping[str, str]
) -> str:
    """Mean and standard error; the best mean of a column is bold."""
    best = {c: _best([m for of in methods.values() if (m := column_mean(of, c))], c) for c in columns}
    rows = []
    for method, of in methods.items():
        found = [(column_mean(of, c), best[c]) for c in columns]
        cells = [_shown(mean, bold=mean is not None and mean.value == most) for mean, most in found]
        rows.append([_title(titles, method), *cells, str(len({cell.seed for cell in of}))])
    return _table(["", *(c.head for c in columns), "seeds"], rows)


def differences_table(
    methods: Mapping[str, Sequence[Cell]],
    columns: Sequence[Column],
    titles: Mapping[str, str],
    baseline: str = BASELINE,
) -> str:
    """Every method against the baseline."""
    rows = []
    for method, of in methods.items():
        if method == baseline:
            continue
        found = [paired_difference(of, methods[baseline], c) for c in columns]
        cells = [_shown(mean, bold=is_clear(mean), signed=True) for mean in found]
        rows.append([_title(titles, method), *cells])
    return _table([Markup(f"minus {_title(titles, baseline)}"), *(c.head for c in columns)], rows)


def is_clear(mean: Mean | None) -> bool:
    """Whether a mean is further from 0 than its error explains, and than the last digit shown."""
    if mean is None or mean.error is None or abs(mean.value) < 0.0005:
        return False
    return abs(mean.value) > T_VALUES.get(mean.seeds, LAST) * mean.error


def summary_csv(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """One line for each number of the tables, nothing rounded."""
    lines = []
    for group, methods in grouped(cells).items():
        for method, of in methods.items():
            for column in columns:
                mean = column_mean(of, column)
                gap = paired_difference(of, methods.get(BASELINE, []), column)
                if mean is not None:
                    lines.append([
                        group, method, column.set, column.metric, mean.seeds, mean.value, mean.error,
                        gap and gap.value, gap and gap.error,
                    ])  # fmt: skip
    heads = ["group", "method", "set", "metric", "seeds", "mean", "standard_error", "difference"]
    return csv_text([*heads, "difference_standard_error"], lines)


def cells_csv(cells: Sequence[Cell]) -> str:
    """Every number of every cell, but for single corruptions, of which there are hundreds."""
    lines = [
        [cell.group, cell.seed, cell.method, name, metric, value]
        for cell in cells
        for name, values in cell.values.items()
        if name.count("/") < 2
        for metric, value in values.items()
    ]
    return csv_text(["group", "seed", "method", "set", "metric", "value"], lines)


def _title(titles: Mapping[str, str], method: str) -> Markup:
    """Titles are ours and may have markup; a method without one is a name."""
    return Markup(titles[method]) if method in titles else markdown(method)


def _best(means: list[Mean], column: Column) -> float | None:
    values = {mean.value for mean in means}
    if len(values) < 2:
        return None
    return max(values) if column.larger else min(values)


def _shown(mean: Mean | None, *, bold: bool = False, signed: bool = False) -> str:
    if mean is None:
        return EMPTY
    text = f"{mean.value:+.3f}" if signed else f"{mean.value:.3f}"
    if mean.error is not None:
        text += f" ± {mean.error:.3f}"
    return Markup(f"**{text}**") if bold else text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(heads, rows, right=range(1, len(heads)))
