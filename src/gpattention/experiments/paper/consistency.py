"""Whether the paper's figures agree with each other: averages with their parts, bold type with the best."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpattention.experiments.paper.measures import MEASURES
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.published import PublishedValue
from gpattention.experiments.paper.spec import AverageSpec, Key, TableSpec

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
    return {key: _checked(average, key, values) for key in values if key.part == average.part}


def _checked(average: AverageSpec, key: Key, values: Mapping[Key, PublishedValue]) -> AverageCheck:
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
        told = [_told(check) for check in wrong if check.key.metric == measure.label]
        if told:
            yield Note("paper", f"{measure.label}: {'; '.join(told)}")


def _told(check: AverageCheck) -> str:
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
