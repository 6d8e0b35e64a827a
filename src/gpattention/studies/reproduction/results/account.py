"""How the results were made: commands, runs, hardware, dates, times, and everything that was cut."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from itertools import dropwhile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from gpattention.runs import Group, RunData
from gpattention.runs.results import Plain, recorded_settings
from gpattention.runs.tables import Markup, markdown, markdown_line, markdown_table, visible
from gpattention.studies.reproduction.results.reading import PlanResults, is_shared
from gpattention.training.folder import TAKEN

SETTINGS = ("samples", "limit", "seed", "predictors", "types", "severities")
FILES = {  # the first that fits
    "summary.md": "every model with every way to predict: means and standard errors over seeds",
    "summary.csv": "one line a figure: every severity, every score of other items",
    "choice.md": "what is chosen on validation items, and the verdicts against goals and rivals",
    "table*": "the paper's tables with our figures beside them",
    "fig*": "the paper's figures from our runs",
    "severity-*": "against the severity of corruption; bands are one standard error over seeds",
    "training-*.csv": "what every seed of a model logged while training",
    "training-*": "validation by epoch; bands are one standard error over seeds",
    "reliability-*": "confidence against accuracy of the chosen model and of the rivals, all seeds together",
    "ood-*": "AUROC of every model against items of other kinds",
    "report.html": "one page that compares all runs",
    "configs.json": "the recipe of every model in full",
    "records.tar.xz": (
        "the records of every run, without weights: `--stage results` rebuilds this folder from them"
    ),
}


def readme(results: PlanResults, commands: list[str], files: list[str], left_out: tuple[str, ...]) -> str:
    """The page that stands above everything."""
    shown = "\n".join(visible(command).replace("```", "` ` `") for command in commands)
    parts = [
        f"# {markdown(results.plan.name)}\n",
        _extent(results),
        f"## How it was made\n\n```console\n{shown}\n```\n",
        "Everything here follows from the run folders, or without them from their records in\n"
        "[records.tar.xz](records.tar.xz); the last command writes the same files again.\n",
        f"## Models\n\n{_models(results)}",
        f"## Training\n\n{_training(results)}",
        *([f"## Runs that broke off\n\n{_failed(results)}"] if results.failed else []),
        f"## Evaluation\n\n{_evaluation(results)}",
        f"## What was cut or stands in\n\n{_cuts(results, left_out)}",
        f"## Files\n\n{_files(files)}",
    ]
    return "\n".join(parts)


def wall_seconds(events: Sequence[Plain]) -> float:
    """From each start of the training process to the last it told, stops between them left out.

    Where the clock was set back between two events, nobody knows how long it took: it counts as nothing.
    """
    total, events = 0.0, tuple(event for event in events if "time" in event)
    for i in range(1, len(events)):
        follow = dropwhile(lambda event: event.get("event") == "phase", events[i:])
        # a process that resumes sets up its phases first, and then says so
        resumes = _starts(events, i) and next(follow, {}).get("event") == "resumed"
        if not resumes:
            total += max(0.0, events[i]["time"] - events[i - 1]["time"])
    return total


def _starts(events: Sequence[Plain], i: int) -> bool:
    """Whether it is the first of some phases in a row."""
    return events[i].get("event") == "phase" and events[i - 1].get("event") != "phase"


def _extent(results: PlanResults) -> str:
    runs, planned = len(results.runs), len(results.plan.trainings)
    whose = "this part of the plan" if results.plan.part else "the plan"
    told = f"{runs} of {planned} runs of {whose} are trained and evaluated"
    broke_off = f"; {len(results.failed)} broke off" if results.failed else ""
    return f"{told}: {len(results.models)} models, seeds {_seeds(results.runs)}{broke_off}.\n"


def _seeds(runs: "list[RunData] | tuple[RunData, ...]") -> str:
    return ", ".join(map(str, sorted({run.seed for run in runs if run.seed is not None})))


def _models(results: PlanResults) -> str:
    rows = []
    for model in results.models:
        recipe = model.runs[0].parsed
        first, second = recipe.phases.kernel_epochs, recipe.phases.epochs
        epochs = f"{first} + {second}" if first else f"{second}"
        kind = f"{recipe.model.attention}{', rows' if _rows(recipe.model.options) else ''}"
        batch = str(recipe.optimizer.batch_size)
        rows.append([model.name, recipe.data.name, kind, epochs, _seeds(model.runs), batch])
    return markdown_table(["Model", "Data", "Attention", "Epochs", "Seeds", "Batch"], rows, left=None)


def _rows(options: Mapping[str, Any]) -> bool:
    return options.get("normalize") == "rows"


def _training(results: PlanResults) -> str:
    rows = []
    for run in results.runs:
        if is_shared(run):
            rows.append([run.name, "", "elsewhere: a shared model", "", "", "", ""])
            continue
        phases = [event for event in run.events if event.get("event") == "phase"]
        device = ", ".join(dict.fromkeys(_where(event) for event in phases))
        stops = sum(event.get("event") == "resumed" for event in run.events)
        taken = next((e["source"] for e in run.events if e.get("event") == TAKEN), "")
        rows.append(
            [
                run.name, date_of(run.events[0]["time"]) if run.events else "",
                _finished(run), in_words(wall_seconds(run.events)), device,
                str(max(0, stops - bool(taken))) if run.events else "", taken,
            ]
        )  # fmt: skip
    headings = ["Run", "Started (UTC)", "Finished", "Wall time", "Device", "Resumed", "First phase from"]
    note = (
        "\nRuns may have shared their device, so that their times are not the models' speed; a run that\n"
        "took its first phase from another one did not spend that time.\n"
    )
    return markdown_table(headings, rows, left=None) + note


def _failed(results: PlanResults) -> str:
    rows = []
    for run in results.failed:
        failure, last = run.failure or {}, run.rows[-1] if run.rows else {}
        accuracy, nll = last.get("validation_accuracy"), last.get("validation_nll")
        rows.append(
            [
                run.name, str(failure.get("step", "")), str(last.get("epoch", "")),
                "" if accuracy is None else f"{100 * accuracy:.2f}", "" if nll is None else f"{nll:.3f}",
                str(failure.get("reason", "")),
            ]
        )  # fmt: skip
    headings = ["Run", "Step", "Last validation after epoch", "Accuracy, %", "NLL", "Reason"]
    return markdown_table(headings, rows, left=None) + "\nThey have no part in any other table.\n"


def _where(event: Mapping[str, Any]) -> str:
    """Device, how steps run, and their precision where it is not plain float32."""
    told = f"{event.get('device')}, {event.get('engine')}"
    precision = event.get("precision", "32-true")  # older runs do not say: they had no choice
    return told if precision == "32-true" else f"{told}, {precision}"


def _finished(run: RunData) -> str:
    ends = [event["time"] for event in run.events if event.get("event") == "finished"]
    return date_of(ends[-1]) if ends else "not finished"


def _evaluation(results: PlanResults) -> str:
    rows = [row for model in results.models for row in _evaluations(model)]
    headings = ["Model", "Suites", "Settings", "Time, all seeds", "Where"]
    return markdown_table(headings, rows, left=None)


def _evaluations(model: Group) -> Iterator[list[str]]:
    """Suites that were computed in the same way and place together."""
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    for run in model.runs:
        for name, suite in run.suites.items():
            settings = recorded_settings(suite)
            told = ", ".join(
                f"{key} {_value(settings[key])}" for key in SETTINGS if settings.get(key) is not None
            )
            place = suite.environment
            where = ", ".join(
                f"{key} {place[key]}" if key != "device" else place[key]
                for key in ("device", "torch", "python", "gpattention")
                if key in place
            )
            seconds = grouped.setdefault((told, where), {})
            seconds[name] = seconds.get(name, 0.0) + suite.seconds
    for (told, where), seconds in grouped.items():
        yield [model.name, ", ".join(seconds), told, in_words(sum(seconds.values())), where]


def _value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cuts(results: PlanResults, left_out: tuple[str, ...]) -> str:
    """Each once, with whose it is where it is not everyone's."""
    owners: dict[str, list[str]] = {}
    for model in results.models:
        for run in model.runs:
            told = [note for suite in run.suites.values() for note in suite.notes]
            told += [f"not the plan's recipe: {each}" for each in results.differences(run)]
            for note in told:
                of = owners.setdefault(note, [])
                of += [] if model.name in of else [model.name]
    everyone = [model.name for model in results.models]
    lines = [note if of == everyone else f"{', '.join(of)}: {note}" for note, of in owners.items()]
    if results.missing:
        lines.append(f"not trained or not evaluated: {', '.join(results.missing)}")
    if left_out:
        lines.append(f"report.html is without {', '.join(left_out)}, to keep it small")
    return "".join(f"- {markdown_line(line)}\n" for line in lines) or "Nothing.\n"


def _files(files: list[str]) -> str:
    """Grouped by what they are; pictures in two formats are named once."""
    grouped: dict[str, list[str]] = {about: [] for about in FILES.values()}
    for name in sorted(files):
        about = next(about for pattern, about in FILES.items() if fnmatch(name, pattern))
        stem, _, form = name.rpartition(".")
        twice = form == "svg" and f"{stem}.png" in files
        grouped[about].append(f"[svg]({_link(name)})" if twice else f"[{markdown(name)}]({_link(name)})")
    rows = [[Markup(about), Markup(", ".join(names))] for about, names in grouped.items() if names]
    return markdown_table(["What", "Files"], rows, left=None)


def _link(name: str) -> str:
    """The address of a file beside the page."""
    return quote(name, safe="+=,@")


def listed_files(page: str) -> set[str]:
    """What an earlier README names as files of its results."""
    names = map(unquote, re.findall(r"\]\(([^()/]+)\)", page.partition("## Files\n")[2]))
    return {name for name in names if any(fnmatch(name, pattern) for pattern in FILES)}


def date_of(seconds: float) -> str:
    """UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def in_words(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def shown_path(path: Path) -> str:
    """From the current folder, so that no page tells where that is."""
    absolute = path.resolve()
    here = Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else Path(path.name)).as_posix()
