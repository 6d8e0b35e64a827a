"""One number of a table out of one run's evaluations, and what must be said of it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from gpattention.evaluation.records import Record
from gpattention.experiments.paper.evaluated import EvaluatedRun
from gpattention.experiments.paper.measures import Measure
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.spec import PartSpec, SlotSpec, Source, TableSpec

PREDICTOR = "model"  # the model's own prediction; no temperature, as in the paper
TOKENS = 64  # of a CIFAR image in the paper


@dataclass(frozen=True)
class Found:
    """A number in the paper's unit."""

    value: float
    notes: tuple[Note, ...] = ()


def find_value(spec: TableSpec, run: EvaluatedRun, measure: Measure, part: PartSpec) -> Found | None:
    """None where the run has no such record."""
    found = _SOURCES[spec.source](spec, run, measure, part)
    return None if found is None else Found(found.value * measure.scale, found.notes)


def _records(spec: TableSpec, run: EvaluatedRun, metric: str) -> Iterator[Record]:
    """Those of the table's suites, without values that are not numbers."""
    for suite in spec.suites:
        if suite in run.suites:
            for record in run.suites[suite].records:
                if (record.metric, record.predictor) == (metric, PREDICTOR) and math.isfinite(record.value):
                    yield record


def _of_set(spec: TableSpec, run: EvaluatedRun, measure: Measure, part: PartSpec) -> Found | None:
    for metric in measure.records:
        for record in _records(spec, run, metric):
            if record.set in part.sets:
                return Found(record.value)
    return None


def _of_detector(spec: TableSpec, run: EvaluatedRun, measure: Measure, part: PartSpec) -> Found | None:
    """The mean over the out-of-distribution sets; an average over detectors is the mean of their means."""
    if part.mean_of:
        several = [_of_detector(spec, run, measure, spec.part(label)) for label in part.mean_of]
        whole = [found for found in several if found is not None]
        if len(whole) < len(several):
            return None
        return Found(fmean(found.value for found in whole))
    for metric in measure.records:
        for score in part.scores:
            by_set = {r.set: r.value for r in _records(spec, run, metric) if r.detail.get("score") == score}
            used = {slot.label: name for slot in spec.slots if (name := _standing_for(slot, by_set))}
            if used:
                notes = (*_told_sets(spec, run, used), *_told_forms(run, metric, measure, score, part))
                return Found(fmean(by_set[name] for name in used.values()), notes)
    return None


def _standing_for(slot: SlotSpec, sets: dict[str, float]) -> str | None:
    """The set that is this one of the paper, else a subset or a stand-in of it."""
    for name in slot.names:
        fitting = sorted(
            (s for s in sets if s.removeprefix("ood/").startswith(name)), key=lambda s: (len(s), s)
        )
        if fitting:
            return fitting[0]
    return None


def _told_sets(spec: TableSpec, run: EvaluatedRun, used: dict[str, str]) -> Iterator[Note]:
    missing = [slot.label for slot in spec.slots if slot.label not in used]
    if missing:
        text = f"mean over {', '.join(used)} only; no figures for {', '.join(missing)}"
        yield Note("reduced", text, run.recipe.name)
    for slot in spec.slots:
        name = used.get(slot.label, "").removeprefix("ood/")
        if name and name != slot.names[0]:
            yield Note("stand-in", f"{name} stands for {slot.label}", run.recipe.name)


def _told_forms(
    run: EvaluatedRun, metric: str, measure: Measure, score: str, part: PartSpec
) -> Iterator[Note]:
    if metric != measure.records[0]:
        text = f"{measure.label} is {metric}, as the evaluation has no {measure.records[0]}"
        yield Note("stand-in", text, run.recipe.name)
    if score != part.scores[0]:
        text = f"{part.label} is {score}, as the evaluation has no {part.scores[0]}"
        yield Note("stand-in", text, run.recipe.name)


def _of_inducing(spec: TableSpec, run: EvaluatedRun, measure: Measure, part: PartSpec) -> Found | None:
    for metric in measure.records:
        for record in _records(spec, run, metric):
            same = record.detail.get("inducing") == part.inducing
            if same and record.detail.get("tokens", TOKENS) == TOKENS:
                return Found(record.value)
    return None


def _of_layer(spec: TableSpec, run: EvaluatedRun, measure: Measure, part: PartSpec) -> Found | None:
    """Layers count from 1 here, whatever number the first one has in the records."""
    by_layer = {
        record.detail["layer"]: record.value
        for metric in measure.records
        for record in _records(spec, run, metric)
        if all(record.detail.get(name) == value for name, value in measure.detail.items())
        and "layer" in record.detail
    }
    values = [by_layer[layer] for layer in sorted(by_layer)]
    place = (part.layer or 1) - 1
    return Found(values[place]) if place < len(values) else None


_SOURCES: dict[Source, Callable[[TableSpec, EvaluatedRun, Measure, PartSpec], Found | None]] = {
    "sets": _of_set,
    "detectors": _of_detector,
    "inducing": _of_inducing,
    "layers": _of_layer,
}
