"""What the paper says its tables and figures show: counted in its own figures and in ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpattention.experiments.paper.measures import MEASURES, Measure
from gpattention.experiments.paper.spec import ClaimSpec, Key, TableSpec

Verdict = Literal["holds", "does not hold", "missing"]


@dataclass(frozen=True)
class Count:
    """In how many cases something is so, of those where there are figures, of all."""

    so: int
    measured: int
    cases: int

    def __str__(self) -> str:
        unmeasured = self.cases - self.measured
        return f"{self.so} of {self.cases}" + (f" ({unmeasured} missing)" if unmeasured else "")


@dataclass(frozen=True)
class ClaimResult:
    """A claim and how it fares."""

    text: str
    paper: Count | None  # None where the paper prints no figures
    paper_verdict: Verdict | None
    ours: Count
    verdict: Verdict


def check_claims(
    spec: TableSpec, ours: Mapping[Key, float], paper: Mapping[Key, float]
) -> tuple[ClaimResult, ...]:
    """Every claim of a table on our means and on the paper's own figures."""
    return tuple(_checked(spec, claim, ours, paper) for claim in spec.claims)


def _checked(
    spec: TableSpec, claim: ClaimSpec, ours: Mapping[Key, float], paper: Mapping[Key, float]
) -> ClaimResult:
    here = _count(spec, claim, ours)
    there = _count(spec, claim, paper) if paper else None
    told = None if there is None else _verdict(claim, there)
    return ClaimResult(claim.text, there, told, here, _verdict(claim, here))


def _count(spec: TableSpec, claim: ClaimSpec, values: Mapping[Key, float]) -> Count:
    found = list(_rising(claim, values) if claim.rises else _beating(spec, claim, values))
    return Count(so=found.count(True), measured=len(found) - found.count(None), cases=len(found))


def _beating(spec: TableSpec, claim: ClaimSpec, values: Mapping[Key, float]) -> Iterator[bool | None]:
    """For each case whether the models beat the others; None where a figure is missing."""
    parts = claim.parts or tuple(part.label for part in spec.parts if not part.extra)
    for metric in claim.metrics or spec.labels("metric"):
        measure = MEASURES[metric]
        for part in parts:
            mine, theirs = (
                [values.get(Key(model, metric, part)) for model in models]
                for models in (claim.models, claim.against)
            )
            yield _beats(claim, measure, mine, theirs)


def _beats(
    claim: ClaimSpec, measure: Measure, mine: list[float | None], theirs: list[float | None]
) -> bool | None:
    """None where the figures that are missing could change it."""
    have = [value for value in mine if value is not None]
    other = [value for value in theirs if value is not None]
    if not have or not other:
        return None
    one, rival = measure.worst(have) if claim.all else measure.best(have), measure.best(other)
    # "comparable" is only said of metrics of which less is better
    so = measure.better(one, rival) if claim.within is None else one <= claim.within * rival
    more_of_mine, more_of_theirs = len(have) < len(mine), len(other) < len(theirs)
    if so:
        return None if more_of_theirs or (more_of_mine and claim.all) else True
    return None if more_of_mine and not claim.all else False


def _rising(claim: ClaimSpec, values: Mapping[Key, float]) -> Iterator[bool | None]:
    for model in claim.models:
        for metric in claim.metrics:
            first, last = (values.get(Key(model, metric, claim.parts[end])) for end in (0, -1))
            yield None if first is None or last is None else last > first


def _verdict(claim: ClaimSpec, count: Count) -> Verdict:
    """Decided as soon as the missing cases cannot change it."""
    missing = count.cases - count.measured
    if claim.at_most is not None:
        if count.so > claim.at_most:
            return "does not hold"
        return "holds" if count.so + missing <= claim.at_most else "missing"
    wanted = count.cases if claim.at_least is None else claim.at_least
    if count.so >= wanted:
        return "holds"
    return "missing" if count.so + missing >= wanted else "does not hold"
