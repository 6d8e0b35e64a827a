"""Figures 2, 3 and 4 of the paper from our runs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.experiments.paper.published import FIGURES
from gpattention.experiments.paper.table import PaperRow, PaperTable
from gpattention.reports.palette import GRID, INK, Style, styles_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTER, KEY = 0.075, 0.6  # inches that a letter and the line before a name take in a legend


def paper_figure(table: PaperTable) -> "Figure":
    """One panel for each block of the table, one line for each model, bars of one standard deviation."""
    if table.name not in FIGURES:
        raise ValueError(f"expected one of the figures {', '.join(FIGURES)}, got {table.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'gpattention[train]'") from error
    groups = list(dict.fromkeys(row.group for row in table.rows))
    styles = styles_for(list(dict.fromkeys(row.label for row in table.rows)))
    figure = Figure(figsize=(4.6 * len(groups), 4.0), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        _draw(panel, table, [row for row in table.rows if row.group == group], styles)
        panel.set_title(group, color=INK, fontsize=10)
    figure.suptitle(f"{table.title} ({table.place.partition(',')[0]} of the paper, our runs)", fontsize=10)
    _legend(figure, panels)
    return figure


def _draw(panel: Any, table: PaperTable, rows: list[PaperRow], styles: Mapping[str, Style]) -> None:
    for row in rows:
        found = [(int(cell.key.part), cell.ours) for cell in row.cells if cell.ours is not None]
        if not found:
            continue
        style = styles[row.label]
        panel.errorbar(
            [place for place, _ in found],
            [ours.mean for _, ours in found],
            yerr=[ours.sd or 0.0 for _, ours in found],
            label=row.label, color=style.colour, marker=style.marker, linestyle=style.dash, capsize=3,
        )  # fmt: skip
    panel.set_xlabel(table.across, color=INK)
    panel.set_xticks([int(column) for column in table.columns])
    panel.grid(color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    if rows[0].cells[0].measure.unit:  # costs are compared from nothing
        panel.set_ylim(bottom=0)
    if not panel.get_legend_handles_labels()[1]:
        panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=INK)


def _legend(figure: "Figure", panels: Sequence[Any]) -> None:
    """One for all panels, below them and never over a line; as many columns as its longest name leaves."""
    keys: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        keys |= dict(zip(labels, handles, strict=True))
    if not keys:
        return
    wide = LETTER * max(map(len, keys)) + KEY
    columns = max(1, min(len(keys), int(figure.get_figwidth() // wide)))
    figure.legend(
        list(keys.values()), list(keys), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
