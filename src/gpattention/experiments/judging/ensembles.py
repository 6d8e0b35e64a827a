"""Runs that differ by their seed alone, as one ensemble.

Runs of other seeds may have other splits: an item that one of them tests on, another may have been trained
on, or its weights may have been chosen and its temperature fitted on it.  The ensemble is judged on the items
of the first run that no other member knows.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch

from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import SuiteResult, write_suite
from gpattention.evaluation.suites import SUITES, Findings
from gpattention.experiments.judging.corrupted_source import CorruptedSource
from gpattention.experiments.judging.judges import JUDGES
from gpattention.experiments.judging.one_run import Evaluation
from gpattention.experiments.judging.session import Progress, Steps
from gpattention.experiments.judging.unseen_items import Unseen

NAME = "ensemble"
REDUCED = "unseen_test_items"  # in the detail of records on fewer items than those of the run
REDUCED_VALIDATION = "unseen_validation_items"  # likewise
FEWEST = 20  # validation items to take thresholds and templates from; conformal sets of 95 % need 19
KNOWN = {"test": "trained or validated on", "validation": "trained on"}  # by others: see `Unseen`
TOO_FEW = {  # what cannot be had without validation items
    "clean": "not judged on validation",
    "ood": "no scores by templates of validation items",
    "selective": "left out, its thresholds come from validation items",
}
OLD_NOTES = (f"{NAME} of ", f"no {NAME}", f"no conformal sets of {NAME}")  # how those of an ensemble begin


class Ensemble:
    """The models of several evaluations, mixed with equal weights; see `Judged`.

    With temperature, each member has its own, fitted on its own validation items.
    """

    def __init__(self, members: Sequence[Evaluation]) -> None:
        self.members = tuple(members)
        self.names: tuple[str, ...] = (NAME,)
        self.label = f"{NAME} of {len(members)} runs"
        self.sets, self.device = members[0].sets, members[0].device
        self.steps = Steps()
        self._unseen = Unseen.by(self.sets, [member.sets for member in members[1:]])
        self._left = {"validation": len(self._unseen.validation), "test": len(self._unseen.test)}
        self._all = {"validation": len(self.sets.validation), "test": len(self.sets.test)}

    @cached_property
    def validation(self) -> ItemSet | None:
        """What is left of the first run's; None where it is too little."""
        enough = self._left["validation"] >= min(FEWEST, self._all["validation"])
        return self.sets.validation.select(self._unseen.validation) if enough else None

    @cached_property
    def test(self) -> ItemSet | None:
        """What is left of the first run's; None where it is nothing."""
        return self.sets.test.select(self._unseen.test) if self._left["test"] else None

    def lacks(self, suite: str) -> bool:
        """Whether items are missing without which there is nothing to judge."""
        no_thresholds = suite == "selective" and self.validation is None
        return no_thresholds or (suite != "clean" and self.test is None)

    def notes(self, suite: str) -> tuple[str, ...]:
        """What is to be said about the items of a suite."""
        notes = []
        if self._is_reduced("test"):
            missing = "not judged on test: " if suite == "clean" else "left out: "
            notes.append(f"{missing if self.test is None else ''}{self._told('test')}")
        if suite != "corrupted" and self._is_reduced("validation"):
            left, enough = self._told("validation"), self.validation is not None
            notes.append(left if enough else f"{TOO_FEW[suite]}: {left}; at least {FEWEST} are needed")
        return tuple(f"{self.label}: {note}" for note in notes)

    def counts(self, suite: str, set: str) -> dict[str, int]:
        """For the detail of a record: how many items its set has left, where some are left out."""
        if set == "validation":
            return {REDUCED_VALIDATION: self._left[set]} if self._is_reduced(set) else {}
        uses_test = suite != "clean" or set == "test"  # sentences out of domain are all left
        return {REDUCED: self._left["test"]} if uses_test and self._is_reduced("test") else {}

    def _is_reduced(self, part: str) -> bool:
        return self._left[part] < self._all[part]

    def _told(self, part: str) -> str:
        return (
            f"{self._left[part]} of {self._all[part]} {part} items, those that no other member was "
            f"{KNOWN[part]}"
        )

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        items = self.sets.corrupted_items(source, corruption, severity)
        return items.select(self._unseen.test) if self._is_reduced("test") else items

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """All members' draws, as they are and at the members' temperatures."""
        raws, fitted = [], list[dict[str, float]]()
        for member in self.members:
            session = member.session
            own = items if member is self.members[0] else member.sets.adopt(items)
            raws.append(session.raw("model", own, aside=_aside(self.members[0], member)))
            fitted.append(session.temperatures("model"))
        self.steps.finish_one()
        logits = torch.cat([raw.logits for raw in raws])  # [M S, B, C]
        found = [(name, Predicted.from_logits(logits, items.labels))]
        for suffix in fitted[0]:
            temperatures = [of_member[suffix] for of_member in fitted if suffix in of_member]
            if len(temperatures) == len(raws):
                heated = torch.cat([raw.logits / t for raw, t in zip(raws, temperatures, strict=True)])
                tempered = Predicted.from_logits(heated, items.labels)
                found.append((f"{name}{suffix}", replace(tempered, temperature=fmean(temperatures))))
        return found


def add_ensemble(
    members: Sequence[Evaluation],
    suites: Sequence[str],
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> dict[str, SuiteResult]:
    """The first run's results with the ensemble's records, written again; those of predictions alone."""
    described = json.dumps(
        {"members": [member.weights for member in members], "known": KNOWN, "fewest": FEWEST}
    )
    if fresh:
        for member in members:
            shutil.rmtree(_aside(members[0], member), ignore_errors=True)
    ensemble: Ensemble | None = None
    changed = {}
    for suite in (name for name in suites if SUITES[name].predictions):
        before = members[0].suite(suite)
        if before.environment.get(NAME) == described and not fresh:
            changed[suite] = before
            continue
        start = time.perf_counter()
        ensemble = Ensemble(members) if ensemble is None else ensemble
        both = _added(_without_ensemble(before), ensemble, suite, progress)
        changed[suite] = replace(
            before,
            records=both.records,
            curves=both.curves,
            notes=both.notes,
            environment={**before.environment, NAME: described},
            seconds=before.seconds + time.perf_counter() - start,
        )
        write_suite(members[0].run.folder, changed[suite])
    return changed


def _added(own: Findings, ensemble: Ensemble, suite: str, progress: Progress | None) -> Findings:
    """The run's own findings and the ensemble's, whose notes are told apart by how they begin."""
    found = _judged(ensemble, suite, progress)
    further = tuple(f"{ensemble.label}: {note}" for note in found.notes if note not in own.notes)
    return Findings.merge([own, replace(found, notes=(*further, *ensemble.notes(suite)))])


def _judged(ensemble: Ensemble, suite: str, progress: Progress | None) -> Findings:
    """With, in every record, how many items are left where the set is not the run's."""
    if ensemble.lacks(suite):
        return Findings()
    found = JUDGES[suite](ensemble, progress)
    records = tuple(
        replace(record, detail={**record.detail, **ensemble.counts(suite, record.set)})
        for record in found.records
    )
    return replace(found, records=records)


def _without_ensemble(result: SuiteResult) -> Findings:
    """What the run has by itself, without an ensemble of other members that was judged before."""
    return Findings(
        tuple(record for record in result.records if not _is_ensemble(record.predictor)),
        {
            name: {key: x for key, x in curve.items() if not _is_ensemble(key)}
            if isinstance(curve, Mapping)
            else curve
            for name, curve in result.curves.items()
        },
        tuple(note for note in result.notes if not note.startswith(OLD_NOTES)),
    )


def _is_ensemble(name: str) -> bool:
    """With or without temperature."""
    return name.partition("+")[0] == NAME


def _aside(first: Evaluation, member: Evaluation) -> Path:
    """Where a member's predictions of the first run's items are kept that are not its own items."""
    return first.run.folder / "evaluation" / "predictions" / f"of-{member.weights[:12]}"
