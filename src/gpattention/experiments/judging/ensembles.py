"""Runs that differ by their seed alone, as one ensemble.

Runs of other seeds may have other splits: an item that one of them tests on, another may have been trained
on.  The ensemble is judged on the items of the first run that none of its members has seen in training.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gpattention.evaluation.items import ItemSet, row_digests
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import SuiteResult, write_suite
from gpattention.evaluation.suites import Findings
from gpattention.experiments.judging.corrupted_source import CorruptedSource
from gpattention.experiments.judging.judges import JUDGES
from gpattention.experiments.judging.one_run import Evaluation
from gpattention.experiments.judging.session import Progress, Steps

NAME = "ensemble"
REDUCED = "unseen_test_items"  # in the detail of records on fewer items than those of the run


@dataclass(frozen=True, eq=False)
class Unseen:
    """Places of the first run's items that no member was trained on."""

    validation: Tensor  # [k]
    test: Tensor  # [k]

    @staticmethod
    def by(members: Sequence[Evaluation]) -> "Unseen":
        """Compare every item with the training items of the others."""
        seen = {digest for member in members[1:] for digest in _fingerprints(member.sets.train)}
        sets = members[0].sets
        return Unseen(_places(sets.validation, seen), _places(sets.test, seen))


class Ensemble:
    """The models of several evaluations, mixed with equal weights; see `Judged`.

    With temperature, each member has its own, fitted on its own validation items.
    """

    def __init__(self, members: Sequence[Evaluation], unseen: "Unseen") -> None:
        self.members = tuple(members)
        self.names: tuple[str, ...] = (NAME,)
        self.sets, self.device = members[0].sets, members[0].device
        self.steps = Steps()
        self._kept = unseen.test
        self.validation = self.sets.validation.select(unseen.validation)
        self.test = self.sets.test.select(unseen.test)
        self.notes = tuple(
            f"ensemble of {len(members)} runs: {len(kept)} of {len(whole)} {whole.name} items, the others "
            "were trained on by some member"
            for kept, whole in ((self.validation, self.sets.validation), (self.test, self.sets.test))
            if len(kept) < len(whole)
        )

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        items = self.sets.corrupted_items(source, corruption, severity)
        return items if len(self._kept) == len(items) else items.select(self._kept)

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
    weights = json.dumps([member.weights for member in members])
    if fresh:
        for member in members:
            shutil.rmtree(_aside(members[0], member), ignore_errors=True)
    unseen: Unseen | None = None
    changed = {}
    for suite in (name for name in suites if name in JUDGES):
        before = members[0].suite(suite)
        if before.environment.get(NAME) == weights and not fresh:
            changed[suite] = before
            continue
        start = time.perf_counter()
        unseen = Unseen.by(members) if unseen is None else unseen
        found = _judged(members, unseen, suite, progress)
        changed[suite] = _merged(before, found, weights, time.perf_counter() - start)
        write_suite(members[0].run.folder, changed[suite])
    return changed


def _judged(members: Sequence[Evaluation], unseen: Unseen, suite: str, progress: Progress | None) -> Findings:
    if min(len(unseen.test), len(unseen.validation)) == 0:
        return Findings(notes=("no ensemble: its members were trained on all of the first run's items",))
    ensemble = Ensemble(members, unseen)
    found = JUDGES[suite](ensemble, progress)
    records = found.records
    if ensemble.notes:  # numbers on other items than the run's are told apart
        more = {REDUCED: len(ensemble.test)}
        records = tuple(replace(record, detail={**record.detail, **more}) for record in records)
    return Findings(records, found.curves, (*found.notes, *ensemble.notes))


def _merged(before: SuiteResult, found: Findings, weights: str, seconds: float) -> SuiteResult:
    kept = Findings(
        tuple(record for record in before.records if not record.predictor.startswith(NAME)),
        before.curves,
        before.notes,
    )
    both = Findings.merge([kept, found])
    return replace(
        before,
        records=both.records,
        curves=both.curves,
        notes=both.notes,
        environment={**before.environment, NAME: weights},
        seconds=before.seconds + seconds,
    )


def _aside(first: Evaluation, member: Evaluation) -> Path:
    """Where a member's predictions of the first run's items are kept that are not its own items."""
    return first.run.folder / "evaluation" / "predictions" / f"of-{member.weights[:12]}"


def _fingerprints(items: ItemSet) -> list[bytes]:
    """Of what the items are, whatever the vocabulary that encodes them."""
    if items.words is not None:
        return [" ".join(words).encode() for words in items.words]
    return row_digests(items.stored)


def _places(items: ItemSet, seen: set[bytes]) -> Tensor:
    """Places of the items that are not among `seen`.  [k]"""
    new = [digest not in seen for digest in _fingerprints(items)]
    return torch.tensor(new).nonzero()[:, 0]
