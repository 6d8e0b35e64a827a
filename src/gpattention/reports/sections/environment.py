"""Environment and configuration: what the numbers depend on."""

import json
from collections.abc import Collection, Mapping

from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Table
from gpattention.reports.sections.registry import section
from gpattention.runs import RunData
from gpattention.runs.recipe import flat as flat_values


@section(
    "environment", "Environment and config", "What the numbers depend on.",
    place=110,
)  # fmt: skip
def content(comparison: Comparison, name: str) -> "html.Markup":
    """Software, what differs between the recipes, and every recipe in full."""
    runs = comparison.runs
    flat = {run.name: {k: _text(v) for k, v in flat_values(run.recipe).items()} for run in runs}
    rows = _rows(flat.values())
    differing = Table(["recipe", *flat], [row for row in rows if len(set(row[1:])) > 1])
    recipes = [
        html.render("recipe", r.name, r.folder, json.dumps(r.recipe, indent=2, default=str)) for r in runs
    ]
    return html.join(
        _environment(comparison),
        html.key_table("Where the recipes differ", differing),
        _evaluations(comparison),
        *recipes,
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _rows(columns: Collection[Mapping[str, str]]) -> list[list[str | float | None]]:
    """One row per key, one column per mapping."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(column.get(key) for column in columns)] for key in keys]


def _environment(comparison: Comparison) -> "html.Markup | None":
    """One column where all evaluations agree, else one per run."""
    by_run = {run.name: values for run in comparison.runs if (values := _merged(run))}
    heads, columns = list(by_run), list(by_run.values())
    if all(column == columns[0] for column in columns):
        heads, columns = ["all runs"], columns[:1]
    rows = sorted(_rows(columns), key=lambda row: str(row[0]))
    return html.key_table("Where the evaluation ran", Table(["what", *heads], rows))


def _merged(run: RunData) -> dict[str, str]:
    """What all suites say of a run, several values after one another; their settings stand elsewhere."""
    found: dict[str, dict[str, None]] = {}
    for key, value in (item for suite in run.suites.values() for item in suite.environment.items()):
        if not str(value).startswith("{"):
            found.setdefault(str(key), {})[str(value)] = None
    return {key: "; ".join(values) for key, values in found.items()}


def _evaluations(comparison: Comparison) -> "html.Markup | None":
    rows = []
    for run in comparison.runs:
        for name, suite in run.suites.items():
            settings = " ".join(str(v) for v in suite.environment.values() if str(v).startswith("{"))
            rows.append([f"{run.name}, {name}", f"{suite.samples}", f"{suite.seconds:.1f}", settings or None])
    return html.folded(
        "Evaluations", Table(["run, suite", "draws of a prediction", "seconds", "settings"], rows)
    )
