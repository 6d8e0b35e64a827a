"""Suite `ood`: separating items of other kinds from the test set by scores that are larger for the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.ood_scores import OodScores
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites.examples import gallery
from gpattention.evaluation.suites.findings import (
    Curve,
    Findings,
    Subject,
    count_items_of,
    detail_of,
    numbers,
    rounded,
    thinned,
)
from gpattention.metrics import auroc_replicates, interval_about, metrics_of
from gpattention.runs import Record
from gpattention.strangeness import Head, Strangeness

BINS = 30
FEW = 3  # items shown of each group and set
HELD = 5  # severity of corruptions that are used as sets of other kinds
SUPERSEDED = (
    "gp_variance is for comparison alone: it averages layers whose variances rise and fall, so that they "
    "cancel; variance_density and strangeness look at both sides"
)
RATES = (0.01, 0.05)  # of false alarms at which flags are counted
TAIL = 0.005  # share of scores beyond each end of a histogram, counted in its first or last bin


def evaluate_ood(subject: Subject) -> Findings:
    """Every set of another kind on this machine against the test set."""
    outside, notes = subject.sets.load_outside()
    if subject.held and subject.sets.corruptions is not None:
        source = subject.sets.corruptions.open(subject.device)
        corrupted = ((kind, subject.corrupted(source, kind, HELD)) for kind in subject.held)
        outside += [replace(items, name=f"ood/{kind}-{HELD}") for kind, items in corrupted]
        notes = (*notes, *source.notes)
    if not outside:
        return Findings(notes=notes)
    parts = []
    for label, found in subject.predictions("ood", subject.validation, subject.test, *outside):
        if label == subject.names[0]:  # signals belong to the model, not to a predictor
            sets = [x for x in (subject.validation, subject.test, *outside) if x is not None]
            found |= {x.name: replace(found[x.name], signals=subject.signals(x)) for x in sets}
        own, others = (found.get("validation"), found["test"]), {x.name: found[x.name] for x in outside}
        parts.append(ood_findings(label, *own, others, head=subject.head, curves=label == "model"))
        parts.append(count_items_of(label, others))
        if label == "model" and subject.run is not None:
            about = (subject.sets.classes, subject.device)
            shown = {
                x.name: gallery(subject.run.model, x, others[x.name], *about, count=FEW) for x in outside
            }
            parts.append(Findings(curves={"gallery": {"sets": shown}}))
    return Findings.merge([*parts, Findings(notes=notes)])


def ood_findings(
    predictor: str, validation: Predicted | None, test: Predicted, outside: Mapping[str, Predicted], *,
    head: Head | None = None, curves: bool = False,
) -> Findings:  # fmt: skip
    """How well every score separates items of other kinds from the test set.

    Args:
        predictor: its name in records.
        validation: items for the templates of scores; without them, scores that need them are left out.
        test: items of the kind that was trained on.
        outside: items of other kinds, by the names of their sets, ood/NAME.
        head: weight and bias of the linear head of the model, for ViM.
        curves: whether to add curves: "scores", histograms as fractions of the items; "roc", where test items
            are the positive ones, as for FPR@95, so that a share `tpr` of them and a share `fpr` of the
            others score below a threshold; and "p_values", the distribution of the p-values of strangeness.

    Returns:
        Records of every set and score.
    """
    fitted = OodScores.fit(validation, head)
    inside = fitted(test)
    records: list[Record] = []
    histograms: dict[str, Any] = {}
    rocs: dict[str, Any] = {}
    for name, other in outside.items():
        scores = fitted(other)
        for score in (each for each in inside if each in scores):
            pair, detail = (inside[score], scores[score]), detail_of(test, score=score)
            values = {m: f(*pair) for m, f in metrics_of("scores").items()}
            ends = rounded(interval_about(values["auroc"], auroc_replicates(*pair), 0.0, 1.0))
            details = {"auroc": {**detail, "interval": ends}}
            records += [Record(name, predictor, m, x, details.get(m, detail)) for m, x in values.items()]
            if curves:
                histograms.setdefault(name, {})[score] = histogram(*pair)
                rocs.setdefault(name, {})[score] = roc(*pair)
    notes = (SUPERSEDED,) if any(record.detail["score"] == "gp_variance" for record in records) else ()
    found = Findings(tuple(records), {"scores": histograms, "roc": rocs} if curves else {}, notes)
    if fitted.strangeness is None or test.signals is None:
        return found
    return Findings.merge([found, _p_values(fitted.strangeness, {"test": test, **outside}, curves)])


def _p_values(strangeness: Strangeness, sets: Mapping[str, Predicted], curves: bool) -> Findings:
    """The distribution of the p-values of every set, and a note on how many test items are flagged."""
    known = {name: x.signals for name, x in sets.items() if x.signals is not None}
    p = {name: strangeness.p_value(signals).sort().values for name, signals in known.items()}
    items = len(strangeness.calibration)
    rates = [rate for rate in RATES if rate * (items + 1) >= 1]
    flagged = ", ".join(
        f"{100 * float((p['test'] <= rate).double().mean()):.1f} % at a rate of {rate}" for rate in rates
    )
    about = f"false alarms of strangeness on test items, {items} calibration items"
    notes = [f"{about}: {flagged}"] if rates else []
    found = {"p_values": {name: ecdf(values) for name, values in p.items()}} if curves else {}
    return Findings((), found, tuple(notes))


def ecdf(values: Tensor) -> Curve:
    """The share of sorted numbers up to each of them, at about 200 points and at the rates of flags."""
    share = torch.arange(1, len(values) + 1).double() / len(values)
    flagged = [int((values <= rate).sum()) for rate in RATES]
    kept = sorted({*thinned(len(values)), *(count - 1 for count in flagged if count)})
    return {"p": numbers(values[kept]), "share": numbers(share[kept])}


def histogram(inside: Tensor, outside: Tensor) -> Curve:
    """Histograms of both kinds with the same bins."""
    both = torch.cat([inside, outside]).double().cpu()
    both = both[both.isfinite()] if bool(both.isfinite().any()) else both.new_zeros(1)
    # a few extreme scores would put all others into one bin
    low, high = (float(both.quantile(q)) for q in (TAIL, 1 - TAIL))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    shares = {"in": _fractions(inside, edges), "out": _fractions(outside, edges)}
    return {name: numbers(x) for name, x in {**shares, "edges": edges}.items()}


def roc(inside: Tensor, outside: Tensor) -> Curve:
    """The ROC curve, from accepting nothing to accepting everything, with at most 200 points."""
    both = {"fpr": outside.double().cpu().sort().values, "tpr": inside.double().cpu().sort().values}
    thresholds = torch.cat(list(both.values())).unique()  # rising
    kept, zero = thinned(1 + len(thresholds)), thresholds.new_zeros(1)
    below = {name: torch.searchsorted(x, thresholds, right=True).double() for name, x in both.items()}
    return {name: numbers(torch.cat([zero, n / len(both[name])])[kept]) for name, n in below.items()}


def _fractions(scores: Tensor, edges: Tensor) -> Tensor:
    """The share of scores in each bin; the outer bins include scores beyond them.  [K]"""
    place = torch.bucketize(scores.double().cpu(), edges[1:-1], right=True)
    return torch.bincount(place, minlength=len(edges) - 1).double() / len(scores)
