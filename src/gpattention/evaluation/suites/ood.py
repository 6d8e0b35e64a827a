"""Suite `ood`: telling items of other kinds from the test set by scores that are larger for the others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.ood_scores import OodScores
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.findings import Findings, detail_of, numbers, thinned
from gpattention.metrics import metrics_of

BINS = 30
TAIL = 0.005  # of the scores beyond either end of a histogram; they go to its first or last bin


def ood_findings(
    predictor: str,
    validation: Predicted | None,
    test: Predicted,
    outside: Mapping[str, Predicted],
    *,
    curves: bool = False,
) -> Findings:
    """Records of every set of `outside` (named ood/NAME) and every score; curves on demand.

    The scores' templates come from `validation`; without it, scores that need them are absent.  "scores"
    holds histograms as fractions of the items; "roc" calls items inside positive, as FPR@95 does: `tpr` of
    the test items and `fpr` of the others score below a threshold.
    """
    fitted = OodScores.fit(validation)
    inside = fitted(test)
    records: list[Record] = []
    histograms: dict[str, Any] = {}
    rocs: dict[str, Any] = {}
    for name, other in outside.items():
        scores = fitted(other)
        for score in (each for each in inside if each in scores):
            pair = inside[score], scores[score]
            detail = detail_of(test, score=score)
            records += [
                Record(name, predictor, metric, f(*pair), detail)
                for metric, f in metrics_of("scores").items()
            ]
            if curves:
                histograms.setdefault(name, {})[score] = histogram(*pair)
                rocs.setdefault(name, {})[score] = roc(*pair)
    return Findings(tuple(records), {"scores": histograms, "roc": rocs} if curves else {})


def histogram(inside: Tensor, outside: Tensor) -> dict[str, list[float | None]]:
    """Both kinds in the same bins."""
    both = torch.cat([inside, outside]).double().cpu()
    both = both[both.isfinite()]
    if len(both) == 0:
        both = torch.zeros(1, dtype=torch.float64)
    low, high = (float(both.quantile(q)) for q in (TAIL, 1 - TAIL))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    return {
        "in": numbers(_fractions(inside, edges)),
        "out": numbers(_fractions(outside, edges)),
        "edges": numbers(edges),
    }


def roc(inside: Tensor, outside: Tensor) -> dict[str, list[float | None]]:
    """From accepting nothing to accepting everything, at most 200 points."""
    low, others = inside.double().cpu().sort().values, outside.double().cpu().sort().values
    thresholds = torch.cat([low, others]).unique()  # rising
    tpr = torch.searchsorted(low, thresholds, right=True).double() / len(low)
    fpr = torch.searchsorted(others, thresholds, right=True).double() / len(others)
    zero = tpr.new_zeros(1)
    tpr, fpr = torch.cat([zero, tpr]), torch.cat([zero, fpr])
    kept = thinned(len(tpr))
    return {"fpr": numbers(fpr[kept]), "tpr": numbers(tpr[kept])}


def _fractions(scores: Tensor, edges: Tensor) -> Tensor:
    """How many of the scores lie in each bin, those beyond in the outer ones.  [K]"""
    place = torch.bucketize(scores.double().cpu(), edges[1:-1], right=True)
    return torch.bincount(place, minlength=len(edges) - 1).double() / len(scores)
