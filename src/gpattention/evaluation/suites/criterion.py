"""Suite `criterion`: the number by which plans choose, from validation items that fitted no temperature.

One half of the validation items fits every temperature, and the other half is evaluated: unchanged, and under
each synthetic shift with temperatures that have not seen that shift.  The criterion is the mean of the NLL of
clean items and the mean NLL over the shifts.  It uses neither test items nor corruptions.  The other suites
still fit their temperatures to all validation items.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.predictors import fit_temperature
from gpattention.evaluation.sets import shift_places, shifted_items
from gpattention.evaluation.suites.findings import Findings, Subject, detail_of
from gpattention.metrics import metrics_of
from gpattention.models import Signals
from gpattention.numerics import NumericalError
from gpattention.runs import Record
from gpattention.strangeness import AdaptiveTemperature

CLEAN, SHIFTED, BOTH = "validation/clean", "validation/shifts", "validation/criterion"
METRICS = ("accuracy", "nll", "ece")


@dataclass(frozen=True, eq=False)
class Seen:
    """A prediction of labelled items.

    Attributes:
        logits: [S, B, C].
        labels: [B].
        signals: of the model itself; None if no temperature needs them.
    """

    logits: Tensor
    labels: Tensor
    signals: Signals | None = None


Shifts = Mapping[str, Seen]
Heat = Callable[[Seen], float | Tensor | None]  # the temperature of items, or None for none


def evaluate_criterion(subject: Subject) -> Findings:
    """The criterion of every predictor and temperature of a run; ensembles have none."""
    if subject.run is None:
        return Findings()
    validation, adaptive = subject.sets.validation, "adaptive_temperature" in subject.heats
    halves = [validation.select(torch.arange(first, len(validation), 2)) for first in (0, 1)]
    try:
        shifted = [shifted_items(half, subject.sets.encoder) for half in halves]
    except ValueError as error:
        return Findings(notes=(f"no criterion: {error}",))
    sets = [
        replace(items, name=f"criterion/{part}-{kind}")
        for kind, both in (("clean", halves), ("shifted", shifted))
        for part, items in zip(("fitting", "judging"), both, strict=True)
    ]
    found = []
    for name in subject.names:
        known = [_seen(subject, name, items, adaptive) for items in sets]
        places = [shift_places(items) for items in shifted]
        shifts = [
            {kind: _part(seen, at) for kind, at in where.items()}
            for seen, where in zip(known[2:], places, strict=True)
        ]
        found.append(criterion_findings(name, (known[0], shifts[0]), (known[1], shifts[1]), subject.heats))
    return Findings.merge(found)


def criterion_findings(
    name: str, fitting: tuple[Seen, Shifts], judging: tuple[Seen, Shifts], heats: tuple[str, ...]
) -> Findings:
    """The criterion of one predictor, without temperature and with each kind of temperature.

    Args:
        name: of the predictor.
        fitting: clean and shifted items to fit temperatures to.
        judging: other clean and shifted items.
        heats: kinds of temperatures: temperature, shift_temperature or adaptive_temperature.

    Returns:
        Accuracy, NLL and ECE of clean items and of each shift, with a temperature fitted without that shift,
        their means over the shifts, and the criterion, an NLL.
    """
    found, (clean, shifts) = list[Findings](), judging
    for heat in ("", *heats):
        label = f"{name}+{heat}" if heat else name
        try:
            whole, without = fitted_heats(heat, *fitting)
        except (NumericalError, ValueError) as error:
            found.append(Findings(notes=(f"no criterion of {label}: {error}",)))
            continue
        records = list(_records(CLEAN, label, clean, whole))
        each = {kind: list(_records(f"{SHIFTED}/{kind}", label, seen, without.get(kind, whole)))
                for kind, seen in shifts.items()}  # fmt: skip
        means = [
            Record(SHIFTED, label, of[0].metric, fmean(record.value for record in of))
            for of in zip(*each.values(), strict=True)
        ]
        nll = fmean(record.value for record in (*records, *means) if record.metric == "nll")
        records += [*means, *(record for of in each.values() for record in of)]
        items = {label: dict.fromkeys((CLEAN, BOTH), len(clean.labels))}
        found.append(Findings((Record(BOTH, label, "nll", nll), *records), {"items": items}))
    return Findings.merge(found)


def fitted_heats(kind: str, clean: Seen, shifts: Shifts) -> tuple[Heat, dict[str, Heat]]:
    """The temperatures of one kind that leave out no shift, and each in turn.

    Args:
        kind: temperature, shift_temperature, adaptive_temperature; empty for none.
        clean: unchanged items.
        shifts: shifted items by shift.

    Returns:
        A function from items to their temperature, fitted to all shifts, and for every shift the one fitted
        to the others; none of these if the kind does not depend on shifts.

    Raises:
        NumericalError: no temperature is best.
        ValueError: items have no signals, or there are too few shifts.
    """
    if not kind:
        return (lambda seen: None), {}
    if kind == "adaptive_temperature":
        shifted = {name: (seen.logits, _signals(seen), seen.labels) for name, seen in shifts.items()}
        found, others = AdaptiveTemperature.cross_fit(
            clean.logits, _signals(clean), clean.labels, shifted=shifted
        )
        return _adaptive(found), {name: _adaptive(each) for name, each in others.items()}
    if kind == "temperature":
        return _constant([clean]), {}
    without = {name: _constant([s for k, s in shifts.items() if k != name]) for name in shifts}
    return _constant(list(shifts.values())), without


def _adaptive(fitted: AdaptiveTemperature) -> Heat:
    return lambda seen: fitted.temperature(seen.logits, _signals(seen))


def _constant(several: list[Seen]) -> Heat:
    constant = fit_temperature(
        torch.cat([seen.logits for seen in several], 1), torch.cat([seen.labels for seen in several])
    )
    return lambda seen: constant


def _records(place: str, label: str, seen: Seen, heat: Heat) -> Iterator[Record]:
    predicted = Predicted.from_logits(seen.logits, seen.labels, None, heat(seen))
    probs, detail = predicted.prediction.probs, detail_of(predicted)
    for metric in METRICS:
        yield Record(place, label, metric, metrics_of("labels")[metric](probs, seen.labels), detail)


def _seen(subject: Subject, name: str, items: ItemSet, signals: bool) -> Seen:
    logits = subject.logits(name, items)
    assert items.labels is not None  # `shifted_items` refuses items without
    return Seen(logits, items.labels.to(logits.device), subject.signals(items) if signals else None)


def _part(seen: Seen, at: slice) -> Seen:
    return Seen(seen.logits[:, at], seen.labels[at], None if seen.signals is None else seen.signals[at])


def _signals(seen: Seen) -> Signals:
    if seen.signals is None:
        raise ValueError("expected signals of the items, got none")
    return seen.signals
