"""Whether the paper's figures agree with each other, and whether its claims hold in them and in ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpattention.studies.paper.spec import (
    MEASURES,
    AverageSpec,
    ClaimSpec,
    Key,
    Measure,
    Note,
    PublishedValue,
    TableSpec,
)

LARGE = 0.1  # of a difference where the paper prints no standard deviation


@dataclass(frozen=True)
class AverageCheck:
    """A printed average, and what its own parts give."""

    key: Key
    printed: PublishedValue
    recomputed: float
    follows: bool  # whether it does so to rounding, with any of the weights that were tried

    @property
    def difference(self) -> float:
        """Printed minus recomputed."""
        return self.printed.value - self.recomputed

    @property
    def large(self) -> bool:
        """Whether it differs by more than its own standard deviation."""
        sd = LARGE if self.printed.sd is None else self.printed.sd
        return not self.follows and abs(self.difference) > sd

    @property
    def mark(self) -> str:
        """Of the figure in a table."""
        return "" if self.follows else "‡" if self.large else "†"


def check_averages(spec: TableSpec) -> dict[Key, AverageCheck]:
    """Every average of the table."""
    average, values = spec.average, spec.published()
    if average is None:
        return {}
    return {key: _checked_average(average, key, values) for key in values if key.part == average.part}


def _checked_average(average: AverageSpec, key: Key, values: Mapping[Key, PublishedValue]) -> AverageCheck:
    def mean(weights: Mapping[str, float]) -> float:
        total = sum(values[key._replace(part=part)].value * weight for part, weight in weights.items())
        return total / sum(weights.values())

    printed = values[key]
    tolerance = 2 * printed.rounding + 1e-9  # the parts are rounded too
    near = [abs(printed.value - mean(weights)) <= tolerance for weights in (average.of, *average.others)]
    return AverageCheck(key, printed, mean(average.of), any(near))


def told_averages(spec: TableSpec, checks: Mapping[Key, AverageCheck]) -> Iterator[Note]:
    """What to print of those that do not follow from their parts."""
    average = spec.average
    wrong = [check for check in checks.values() if not check.follows]
    if average is None or not wrong:
        return
    others = f", nor over {average.others_words}," if average.others else ""
    yield Note(
        "paper",
        f"{len(wrong)} of {len(checks)} averages are not the mean over {average.words}{others} of the "
        "figures printed beside them, to rounding (†; ‡ where they are off by more than "
        + ("their standard deviation" if wrong[0].printed.sd is not None else f"{LARGE}")
        + "). Printed, and recomputed from its own line:",
    )
    for measure in spec.metrics:
        told = [_told_average(check) for check in wrong if check.key.metric == measure.label]
        if told:
            yield Note("paper", f"{measure.label}: {'; '.join(told)}")


def _told_average(check: AverageCheck) -> str:
    digits = check.printed.digits
    return f"{check.key.model} {check.printed.value:.{digits}f}{check.mark} → {check.recomputed:.{digits}f}"


def told_bold(spec: TableSpec) -> Iterator[Note]:
    """Figures in bold that are not the best of their models, and best ones that are not in bold."""
    values = spec.published()
    cases = dict.fromkeys((key.metric, key.part) for key in values)
    for metric, part in cases:
        line = {key.model: value for key, value in values.items() if (key.metric, key.part) == (metric, part)}
        best = MEASURES[metric].best([value.value for value in line.values()])
        wrong = [model for model, value in line.items() if value.bold and value.value != best]
        right = [model for model, value in line.items() if value.bold and value.value == best]
        if wrong or not right:
            first = next(model for model, value in line.items() if value.value == best)
            digits = line[first].digits
            bold = f"{', '.join(wrong)} is in bold" if wrong else "nothing is in bold"
            text = f"{metric}, {part}: {bold}, but the best figure is {first}'s {best:.{digits}f}"
            yield Note("paper", text)


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
    return tuple(_checked_claim(spec, claim, ours, paper) for claim in spec.claims)


def _checked_claim(
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
