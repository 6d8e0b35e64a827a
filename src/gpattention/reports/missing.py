"""What a report says where there is nothing to show, and what an evaluation said about itself."""

import shlex
from collections.abc import Sequence

from gpattention.evaluation.suites import SUITES
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.words import OTHER_WEIGHTS, listed
from gpattention.runs import RunData

MANY = 4  # folders in a command; more are three dots


def missing(comparison: Comparison, suite: str, what: str | None = None) -> Safe:
    """The command that fills the section, or that nothing can; `what` is a part of the suite."""
    what = SUITES[suite].what if what is None else what
    if comparison.texts and SUITES[suite].images:
        return tag("p", f"Nothing to show for {what}: this suite needs images.", class_="missing")
    return tag(
        "p", f"These runs have no {what} yet. This command adds it: ", _command(comparison.runs, suite),
        class_="missing",
    )  # fmt: skip


def has(comparison: Comparison, suite: str) -> bool:
    """Whether any run was evaluated so."""
    return any(suite in run.suites for run in comparison.runs)


def remarks(comparison: Comparison, suite: str, beside: Sequence[str] = ()) -> Safe | None:
    """Runs that were left out, and the suite's own notes.

    Of suites `beside` it, whose numbers stand there too, only which are not of the run's weights.
    """
    without = [run for run in comparison.runs if suite not in run.suites]
    lines = []
    if without:
        names = listed([run.name for run in without])
        lines.append(tag("li", f"Not evaluated: {names}. ", _command(without, suite)))
    lines += [tag("li", note) for note in _notes(comparison, suite)]
    for other in beside:
        replaced = [note for note in _notes(comparison, other) if note.endswith(OTHER_WEIGHTS)]
        lines += [tag("li", f"{other}: {note}") for note in replaced]
    if not lines:
        return None
    return tag("aside", tag("h4", "Read with this in mind"), tag("ul", *lines), class_="notes")


def _notes(comparison: Comparison, suite: str) -> list[str]:
    """Each note once; with the runs it belongs to where it is not all of them."""
    evaluated = [run for run in comparison.runs if suite in run.suites]
    owners: dict[str, list[str]] = {}
    for run in evaluated:
        for note in run.suites[suite].notes:
            owners.setdefault(str(note), []).append(run.name)
    return [
        note if len(names) == len(evaluated) else f"{listed(names)}: {note}" for note, names in owners.items()
    ]


def _command(runs: list[RunData], suite: str) -> Safe:
    folders = [shlex.quote(run.folder or run.name) for run in runs[:MANY]]
    dots = " ..." if len(runs) > MANY else ""
    return join(tag("code", f"gpattention evaluate {' '.join(folders)}{dots} --suite {suite}"))
