"""Environment and configuration: what the numbers depend on."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.tables import Table, table_html
from gpattention.runs import RunData


def content(comparison: Comparison, name: str) -> Safe:
    """Software, what differs between the recipes, and every recipe in full."""
    return join(_environment(comparison), _differences(comparison), _suites(comparison), _recipes(comparison))


def _environment(comparison: Comparison) -> Safe | None:
    """One column where all evaluations agree, else one per run."""
    by_run = {run.name: _merged(run) for run in comparison.runs}
    by_run = {name: values for name, values in by_run.items() if values}
    if not by_run:
        return None
    values = list(by_run.values())
    if all(other == values[0] for other in values):
        table = Table(["what", "all runs"], [[key, values[0][key]] for key in sorted(values[0])])
    else:
        keys = sorted({key for of_run in values for key in of_run})
        table = Table(["what", *by_run], [[key, *(v.get(key) for v in values)] for key in keys])
    return table_html(table, "Where the evaluation ran", key=True)


def _merged(run: RunData) -> dict[str, str]:
    found: dict[str, str] = {}
    for suite in run.suites.values():
        for key, value in suite.environment.items():
            before, text = found.get(str(key)), str(value)
            if text.startswith("{"):  # an evaluation's own settings stand by it
                continue
            found[str(key)] = text if before in (None, text) else f"{before}; {text}"
    return found


def _differences(comparison: Comparison) -> Safe | None:
    """Values of the recipes that are not the same everywhere."""
    flat = {run.name: dict(_flat(run.recipe)) for run in comparison.runs}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    rows = []
    for key in keys:
        values = [of_run.get(key) for of_run in flat.values()]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return None
    return table_html(Table(["recipe", *flat], rows), "Where the recipes differ", key=True)


def _flat(plain: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _suites(comparison: Comparison) -> Safe | None:
    rows = []
    for run in comparison.runs:
        for name, suite in run.suites.items():
            settings = (str(v) for v in suite.environment.values() if str(v).startswith("{"))
            told = [f"{suite.samples}", f"{suite.seconds:.1f}", " ".join(settings) or None]
            rows.append([f"{run.name}, {name}", *told])
    if not rows:
        return None
    table = Table(["run, suite", "draws of a prediction", "seconds", "settings"], rows)
    return tag("details", tag("summary", "Evaluations"), table_html(table, "Evaluations"))


def _recipes(comparison: Comparison) -> Safe:
    parts = []
    for run in comparison.runs:
        text = json.dumps(run.recipe, indent=2, default=str)
        title = f"Recipe of {run.name}"
        where = tag("p", "Folder: ", tag("code", run.folder)) if run.folder else None
        parts.append(
            tag(
                "details", tag("summary", title), where,
                tag("pre", tag("code", text), tabindex=0, role="region", aria_label=title),
            )
        )  # fmt: skip
    return join(*parts)
