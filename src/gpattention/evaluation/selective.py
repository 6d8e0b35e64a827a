"""Selective prediction: answer where the score says so, and hand the rest to somebody else.

Geifman and El-Yaniv (2017).  Coverage is the fraction of items answered, risk the fraction of wrong
answers among them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.evaluation.bounds import BOUNDS, upper_bound
from gpattention.metrics.checks import check_choice, check_fraction, check_labels
from gpattention.models.prediction import Prediction

SCORES = ("confidence", "entropy", "expected_entropy", "mutual_information")
_LEVELS = 100  # coverages tried when a bound must hold for all of them at once


@dataclass(frozen=True)
class RiskCoverageCurve:
    """Risk at every coverage that a threshold can give, from the surest items on; K distinct scores."""

    coverage: Tensor  # [K] fraction accepted, rising to 1
    risk: Tensor  # [K] fraction of wrong ones among the accepted
    threshold: Tensor  # [K] the score of the last accepted item
    accepted: Tensor  # [K] their number
    errors: Tensor  # [K] wrong ones among them


def risk_coverage_curve(
    prediction: Prediction, labels: Tensor, *, score: str = "confidence"
) -> RiskCoverageCurve:
    """How the risk grows as less sure items are answered; items of equal score come together."""
    check_labels(labels, len(prediction), prediction.classes)
    if len(prediction) == 0:
        raise ValueError("expected a prediction of at least one item, got 0")
    sure = _certainty(prediction, score)  # [B]
    order = sure.argsort(descending=True, stable=True)
    wrong = (prediction.label != labels.to(prediction.label.device))[order]
    sure = sure[order]
    last = torch.cat([sure[1:] != sure[:-1], sure.new_ones(1, dtype=torch.bool)])  # [B] of its score
    accepted = last.nonzero()[:, 0] + 1  # [K]
    errors = wrong.cumsum(0)[last]  # [K]
    return RiskCoverageCurve(
        coverage=accepted.double() / len(sure),
        risk=errors.double() / accepted,
        threshold=sure[last] * _sign(score),
        accepted=accepted,
        errors=errors,
    )


@dataclass(frozen=True)
class SelectivePredictor:
    """A threshold on a score of a prediction; made by `fit`.

    Accepts scores of at least the threshold for confidence, of at most it for the entropies and the
    mutual information.
    """

    score: str
    threshold: float
    coverage: float  # on the items it was fitted on
    risk: float  # likewise
    risk_bound: float | None = None  # what the true risk exceeds with probability at most delta

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        labels: Tensor,  # [B]
        *,
        coverage: float | None = None,
        risk: float | None = None,
        score: str = "confidence",
        delta: float | None = None,
        bound: str = "clopper-pearson",
    ) -> "SelectivePredictor":
        """On held-out items, for a coverage or for a risk.

        `coverage` gives the strictest threshold that accepts at least this fraction.  `risk` gives the
        largest coverage whose risk on these items is at most this; with `delta`, whose upper bound on the
        true risk is: then, except with probability `delta`, the risk on new items of the same kind is at
        most `risk`.  The bound ("clopper-pearson" or "hoeffding") holds for 100 coverages at once, each
        with delta / 100, since the largest is chosen after seeing the labels.
        """
        if (coverage is None) == (risk is None):
            raise ValueError(f"expected one of coverage and risk, got coverage={coverage} and risk={risk}")
        check_choice("bound", bound, BOUNDS)
        curve = risk_coverage_curve(prediction, labels, score=score)
        if coverage is not None:
            if delta is not None:
                raise ValueError(f"expected delta only together with risk, got {delta}")
            check_fraction("coverage", coverage, one=True)
            wanted = math.ceil(coverage * len(prediction) - 1e-9)  # 0.7 * 10 must not round up to 8
            return cls._at(curve, int((curve.accepted >= wanted).nonzero()[0]), score)
        assert risk is not None
        if not 0 <= risk <= 1:
            raise ValueError(f"expected risk in [0, 1], got {risk}")
        if delta is None:
            return cls._at(curve, _largest(curve, curve.risk, risk, "risk"), score)
        check_fraction("delta", delta)
        tried = _levels(curve)  # [L]
        least = upper_bound(curve.errors[tried], curve.accepted[tried], delta / len(tried), bound=bound)
        bounds = torch.full_like(curve.risk, torch.inf)  # [K]
        bounds[tried] = least
        best = _largest(curve, bounds, risk, f"upper bound of the risk with delta={delta}")
        return cls._at(curve, best, score, float(bounds[best]))

    @classmethod
    def _at(
        cls, curve: RiskCoverageCurve, place: int, score: str, bound: float | None = None
    ) -> "SelectivePredictor":
        threshold, coverage, risk = (x[place].item() for x in (curve.threshold, curve.coverage, curve.risk))
        return cls(score, threshold, coverage, risk, bound)

    def accept(self, prediction: Prediction) -> Tensor:
        """True for the items to answer.  [B]"""
        sign = _sign(self.score)
        return _certainty(prediction, self.score) >= sign * self.threshold


def _sign(score: str) -> int:
    """Entropies are high where the model is unsure."""
    return 1 if score == "confidence" else -1


def _certainty(prediction: Prediction, score: str) -> Tensor:
    """The score turned so that more is surer.  [B]"""
    check_choice("score", score, SCORES)
    return getattr(prediction, score) * _sign(score)


def _levels(curve: RiskCoverageCurve) -> Tensor:
    """Places in the curve nearest to evenly spaced coverages, chosen without looking at labels.  [L]"""
    total = int(curve.accepted[-1])
    wanted = torch.linspace(total / _LEVELS, total, _LEVELS, dtype=torch.float64).ceil()  # [100]
    return torch.searchsorted(curve.accepted, wanted.to(curve.accepted)).unique()


def _largest(curve: RiskCoverageCurve, values: Tensor, risk: float, what: str) -> int:
    """The last place with a value of at most `risk`."""
    good = (values <= risk).nonzero()
    if len(good) == 0:
        least = int(values.argmin())
        raise ValueError(
            f"expected a risk that some threshold attains, got {risk}: the smallest {what} on these "
            f"{int(curve.accepted[-1])} items is {float(values[least]):.4f}, at coverage "
            f"{float(curve.coverage[least]):.4f}"
        )
    return int(good[-1])
