"""Environment and configuration: what the numbers depend on."""

import json
from typing import TYPE_CHECKING

from gpattention.reports.comparison import Comparison, Table
from gpattention.reports.html import folded, join, render
from gpattention.runs import RunData
from gpattention.runs.recipe import flat as flat_values

if TYPE_CHECKING:
    from markupsafe import Markup


def content(comparison: Comparison, name: str) -> "Markup":
    """Software, what differs between the recipes, and every recipe in full."""
    flat = {
        run.name: {
            k: v if isinstance(v, str) else json.dumps(v, default=str)
            for k, v in flat_values(run.recipe).items()
        }
        for run in comparison.runs
    }
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    table = [[key, *(of_run.get(key) for of_run in flat.values())] for key in keys]
    differing = [row for row in table if len(set(row[1:])) > 1]
    return join(
        _environment(comparison),
        render("table", Table(["recipe", *flat], differing), "Where the recipes differ", key=True)
        if differing
        else None,
        _evaluations(comparison),
        *(
            render("recipe", run.name, run.folder, json.dumps(run.recipe, indent=2, default=str))
            for run in comparison.runs
        ),
    )


def _environment(comparison: Comparison) -> "Markup | None":
    """One column where all evaluations agree, else one per run."""
    by_run = {run.name: values for run in comparison.runs if (values := _merged(run))}
    if not by_run:
        return None
    columns = list(by_run.values())
    heads = list(by_run)
    if all(other == columns[0] for other in columns):
        columns, heads = columns[:1], ["all runs"]
    keys = sorted({key for of_run in columns for key in of_run})
    table = Table(["what", *heads], [[key, *(values.get(key) for values in columns)] for key in keys])
    return render("table", table, "Where the evaluation ran", key=True)


def _merged(run: RunData) -> dict[str, str]:
    found: dict[str, str] = {}
    for suite in run.suites.values():
        for key, value in suite.environment.items():
            before, text = found.get(str(key)), str(value)
            if text.startswith("{"):  # an evaluation's own settings stand by it
                continue
            found[str(key)] = text if before in (None, text) else f"{before}; {text}"
    return found


def _evaluations(comparison: Comparison) -> "Markup | None":
    rows = []
    for run in comparison.runs:
        for name, suite in run.suites.items():
            settings = " ".join(str(v) for v in suite.environment.values() if str(v).startswith("{"))
            rows.append([f"{run.name}, {name}", f"{suite.samples}", f"{suite.seconds:.1f}", settings or None])
    return folded("Evaluations", Table(["run, suite", "draws of a prediction", "seconds", "settings"], rows))
