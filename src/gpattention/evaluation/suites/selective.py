"""Suite `selective`, and the rules that it evaluates: answering only if certain, and sets of classes.

Selective prediction (Geifman and El-Yaniv 2017): answer if a score is good enough, and leave other items to
somebody else.  Coverage is the fraction of items answered, risk the fraction of wrong answers among them;
upper confidence bounds of a risk are exact (Clopper-Pearson).

Split-conformal prediction sets: sets of classes that contain the right one with a given probability.  The
threshold is the ceil((n + 1)(1 - alpha))-th smallest score of n held-out items; for a new item of the same
kind the set contains its class with probability at least 1 - alpha, for any model.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_fraction, check_labels
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites.findings import Findings, Subject, detail_of, numbers, thinned
from gpattention.metrics import aurc, risk_coverage
from gpattention.metrics.classification import check_probs
from gpattention.models import Prediction
from gpattention.runs import Record


def upper_bound(errors: Tensor, accepted: Tensor, delta: float) -> Tensor:
    """Bounds that each true rate exceeds with probability at most `delta`.  [K] from counts [K]

    The bound of Clopper and Pearson is the rate at which so few errors have probability `delta`, here found
    by bisection.
    """
    low, high = errors / accepted.double(), torch.ones_like(errors, dtype=torch.float64)
    for _ in range(60):
        middle = 0.5 * (low + high)
        likely = _log_binomial_cdf(errors, accepted, middle) > math.log(delta)
        low, high = torch.where(likely, middle, low), torch.where(likely, high, middle)
    return torch.where(errors == accepted, 1.0, high)


def _log_binomial_cdf(errors: Tensor, accepted: Tensor, rate: Tensor) -> Tensor:
    """log P(Binomial(accepted, rate) <= errors).  [K]"""
    n, j = accepted.double()[:, None], torch.arange(int(errors.max()) + 1, device=errors.device).double()
    left = (n - j).clamp(min=0)  # [K, J]; terms beyond `errors` are dropped below
    choose = (n + 1).lgamma() - (j + 1).lgamma() - (left + 1).lgamma()  # [K, J] log of n over j
    # in logarithms: the terms themselves underflow for thousands of items
    terms = choose + torch.xlogy(j, rate[:, None]) + torch.special.xlog1py(left, -rate[:, None])
    return terms.masked_fill(j > errors[:, None], -torch.inf).logsumexp(-1)


SCORES = ("confidence", "entropy", "expected_entropy", "mutual_information")
_LEVELS = 100  # coverages for all of which a bound must hold together


@dataclass(frozen=True)
class RiskCoverageCurve:
    """Risk at every coverage that a threshold can give, beginning with the most certain items.

    Attributes:
        coverage: [K] fraction of accepted items for K distinct scores, rising to 1.
        risk: [K] fraction of wrong ones among the accepted.
        threshold: [K] the score of the last accepted item.
        accepted: [K] number of accepted items.
        errors: [K] number of wrong ones among them.
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor
    accepted: Tensor
    errors: Tensor


def risk_coverage_curve(
    prediction: Prediction, labels: Tensor, *, score: str = "confidence"
) -> RiskCoverageCurve:
    """How the risk grows as less certain items are answered; items with equal scores come together.

    Args:
        prediction: of B items.
        labels: [B].
        score: confidence, entropy, expected_entropy or mutual_information.

    Returns:
        One point for each distinct score.

    Raises:
        ValueError: there are no items, the labels do not fit, or the score is unknown.
    """
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
    coverage, risk = accepted.double() / len(sure), errors.double() / accepted
    return RiskCoverageCurve(coverage, risk, sure[last] * _sign(score), accepted, errors)


@dataclass(frozen=True)
class SelectivePredictor:
    """A threshold for a score of predictions; made by `fit`.

    It accepts confidences of at least the threshold, and entropies and mutual information of at most the
    threshold.

    Attributes:
        score: the score that is compared.
        threshold: of the score.
        coverage: on the items of the fit.
        risk: likewise.
        risk_bound: the true risk exceeds it with probability at most delta; None without delta.
    """

    score: str
    threshold: float
    coverage: float
    risk: float
    risk_bound: float | None = None

    @classmethod
    def fit(
        cls, prediction: Prediction, labels: Tensor, *, coverage: float | None = None,
        risk: float | None = None, score: str = "confidence", delta: float | None = None,
    ) -> "SelectivePredictor":  # fmt: skip
        """Fit to held-out items, for a coverage or for a risk.

        `coverage` gives the strictest threshold that accepts at least this fraction.  `risk` gives the
        largest coverage at which the risk on these items is at most this.  With `delta` it gives the largest
        one at which the upper bound of the true risk is: then the risk on new items of the same kind is at
        most `risk`, except with probability `delta`.  The bound of Clopper and Pearson is taken for 100
        coverages, each with delta / 100, since the largest is chosen after seeing the labels.

        Args:
            prediction: of B held-out items.
            labels: [B].
            coverage: fraction of items to answer.
            risk: allowed fraction of wrong answers; exactly one of the two is given.
            score: confidence, entropy, expected_entropy or mutual_information.
            delta: probability with which the bound of the risk may fail.

        Returns:
            The threshold.

        Raises:
            ValueError: a number is out of its range, or no threshold attains the risk.
        """
        if (coverage is None) == (risk is None):
            raise ValueError(f"expected one of coverage and risk, got coverage={coverage} and risk={risk}")
        curve = risk_coverage_curve(prediction, labels, score=score)
        values, what = curve.risk, "risk"  # [K]
        if coverage is not None:
            if delta is not None:
                raise ValueError(f"expected delta only together with risk, got {delta}")
            check_fraction("coverage", coverage, one=True)
            wanted = math.ceil(coverage * len(prediction) - 1e-9)  # 0.7 * 10 must not round up to 8
            place = int((curve.accepted >= wanted).nonzero()[0])
        else:
            assert risk is not None
            if not 0 <= risk <= 1:
                raise ValueError(f"expected risk in [0, 1], got {risk}")
            if delta is not None:
                check_fraction("delta", delta)
                what, total = f"upper bound of the risk with delta={delta}", len(prediction)
                # places near evenly spaced coverages, which do not depend on labels
                levels = torch.linspace(total / _LEVELS, total, _LEVELS, dtype=torch.float64).ceil()  # [100]
                tried = torch.searchsorted(curve.accepted, levels.to(curve.accepted)).unique()  # [L]
                share = delta / len(tried)
                values = torch.full_like(curve.risk, torch.inf)
                values[tried] = upper_bound(curve.errors[tried], curve.accepted[tried], share)
            good, least = (values <= risk).nonzero(), int(values.argmin())
            if len(good) == 0:
                best = f"the smallest {what} on these {len(prediction)} items is {float(values[least]):.4f}"
                where = f"at coverage {float(curve.coverage[least]):.4f}"
                raise ValueError(f"expected a risk that some threshold attains, got {risk}: {best}, {where}")
            place = int(good[-1])
        threshold, covered, wrong = (float(x[place]) for x in (curve.threshold, curve.coverage, curve.risk))
        return cls(score, threshold, covered, wrong, None if delta is None else float(values[place]))

    def accept(self, prediction: Prediction) -> Tensor:
        """True for the items to answer.  [B]"""
        return _certainty(prediction, self.score) >= _sign(self.score) * self.threshold


def _sign(score: str) -> int:
    """-1 for entropies, which are high if the model is uncertain."""
    return 1 if score == "confidence" else -1


def _certainty(prediction: Prediction, score: str) -> Tensor:
    """The score with a sign that makes larger values more certain.  [B]"""
    check_choice("score", score, SCORES)
    return getattr(prediction, score) * _sign(score)


SET_SCORES = ("lac", "aps")


@dataclass(frozen=True)
class ConformalSets:
    """A threshold for the scores of classes; made by `fit`.

    Attributes:
        score: lac or aps.
        alpha: probability with which a set may miss the right class.
        threshold: of the scores.
        items: number of held-out items of the fit.
        classes: number of classes.
    """

    score: str
    alpha: float
    threshold: float
    items: int
    classes: int

    @classmethod
    def fit(cls, probs: Tensor, labels: Tensor, alpha: float, *, score: str = "lac") -> "ConformalSets":
        """Fit to held-out items.

        The score `"lac"` of a class is 1 - p (Sadinle et al. 2019), which gives the smallest sets on average,
        some of them empty.  The score `"aps"` is the probability of all classes that are at least as
        probable, itself included (Romano et al. 2020), which gives larger sets for hard items.

        Args:
            probs: [n, C] of held-out items.
            labels: [n].
            alpha: probability with which a set may miss the right class.
            score: lac or aps.

        Returns:
            An object that makes sets for new items.

        Raises:
            ValueError: there are too few items for alpha, or an argument is out of its range.
        """
        check_choice("score", score, SET_SCORES)
        check_fraction("alpha", alpha)
        check_probs(probs, least=0)  # too few for alpha are refused below
        check_labels(labels, len(probs), probs.shape[1])
        rank = math.ceil((len(probs) + 1) * (1 - alpha) - 1e-9)  # 10 * (1 - 0.1) must not round up to 10
        if rank > len(probs):
            least = f"at least {math.ceil(1 / alpha - 1 - 1e-9)} held-out items for alpha={alpha}"
            raise ValueError(f"expected {least}, got {len(probs)}")
        scores = _scores(probs, score)  # [n, C]
        right = scores.gather(1, labels.to(probs.device, torch.int64)[:, None])[:, 0]  # [n]
        threshold = float(right.sort().values[rank - 1])
        return cls(score, alpha, threshold, len(probs), probs.shape[1])

    def sets(self, probs: Tensor) -> Tensor:
        """True for the classes in the set of each item.  [B, C]"""
        check_probs(probs, least=0)
        if probs.shape[1] != self.classes:
            raise ValueError(f"expected probs of {self.classes} classes as fitted on, got {probs.shape[1]}")
        return _scores(probs, self.score) <= self.threshold


def _scores(probs: Tensor, score: str) -> Tensor:
    """How badly each class fits each item, in float64.  [B, C]"""
    p = probs.double()
    if score == "lac":
        return 1 - p
    falling, order = p.sort(dim=-1, descending=True, stable=True)  # [B, C]
    return torch.empty_like(p).scatter_(-1, order, falling.cumsum(-1))


# The suite: thresholds are chosen on validation items and evaluated on test items, as in practice

RISKS = (0.01, 0.05, 0.1)  # fractions of wrong answers
COVERAGES = (0.8, 0.9)  # fractions of items answered
ALPHAS = (0.05, 0.1)  # probabilities of sets without the right class


def evaluate_selective(subject: Subject) -> Findings:
    """Thresholds from the validation set, evaluated on the test set."""
    if subject.validation is None:
        return Findings()
    return Findings.merge(
        selective_findings(label, found["validation"], found["test"])
        for label, found in subject.predictions("selective", subject.validation, subject.test)
    )


def selective_findings(predictor: str, validation: Predicted, test: Predicted) -> Findings:
    """Risk against coverage by confidence, answers at three risks and two coverages, conformal sets.

    `coverage_at_risk_05` is the fraction of test items answered with the threshold whose risk on validation
    items is at most 0.05 (0 if there is none), and `risk_at_risk_05` their risk (absent if none is answered);
    `risk_at_coverage_80` likewise.  Conformal sets have the score 1 - p ("lac").

    Args:
        predictor: its name in records.
        validation: items from which thresholds are chosen.
        test: items on which they are evaluated.

    Returns:
        Records of the set `test`, and the curve "risk_coverage".
    """
    probs, labels = test.prediction.probs, test.known_labels
    curve = risk_coverage(probs, labels)
    kept = thinned(len(curve.risk))
    curves = {"coverage": numbers(curve.coverage[kept]), "risk": numbers(curve.risk[kept])}
    notes: list[str] = []
    records: list[Record] = []

    def add(metric: str, value: float, **more: float) -> None:
        records.append(Record("test", predictor, metric, value, detail_of(test, **more)))

    add("aurc", aurc(probs, labels))
    held_out, known = validation.prediction, validation.known_labels
    for what, value in (*(("risk", r) for r in RISKS), *(("coverage", c) for c in COVERAGES)):
        name, target = f"{what}_{round(100 * value):02d}", cast(dict[str, Any], {what: value})
        try:
            chosen = SelectivePredictor.fit(held_out, known, **target)
        except ValueError:  # no threshold is good enough, so that nothing is answered
            add(f"coverage_at_{name}", 0.0)
            continue
        accepted = chosen.accept(test.prediction)  # [B]
        wrong = (test.prediction.label != labels)[accepted]
        add(f"coverage_at_{name}", float(accepted.double().mean()))
        if len(wrong):
            add(f"risk_at_{name}", float(wrong.double().mean()))
    for alpha in ALPHAS:
        try:
            fitted = ConformalSets.fit(held_out.probs, known, alpha)
        except ValueError as error:  # too few validation items for this alpha
            notes.append(f"no conformal sets of {predictor} for alpha={alpha}: {error}")
            continue
        sets = fitted.sets(probs)  # [B, C]
        add("conformal_coverage", float(sets.gather(1, labels[:, None]).double().mean()), alpha=alpha)
        add("conformal_size", float(sets.sum(-1).to(torch.float64).mean()), alpha=alpha)
    return Findings(tuple(records), {"risk_coverage": {predictor: curves}}, tuple(notes))
