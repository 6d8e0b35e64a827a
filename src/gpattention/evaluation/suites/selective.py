"""Suite `selective`: answering only when sure, and answering with sets of classes.

Thresholds are chosen on validation items and judged on test items, as they would be in use.
"""

import torch

from gpattention.evaluation.conformal import ConformalSets
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.selective import SelectivePredictor
from gpattention.evaluation.suites.findings import Findings, detail_of, numbers, thinned
from gpattention.metrics import aurc, risk_coverage

RISKS = (0.01, 0.05, 0.1)  # of an answer that is given
COVERAGES = (0.8, 0.9)  # fractions of items answered
ALPHAS = (0.05, 0.1)  # of a set without the right class


def selective_findings(predictor: str, validation: Predicted, test: Predicted) -> Findings:
    """Risk against coverage by confidence, answers at three risks and two coverages, conformal sets.

    `coverage_at_risk_05` is the fraction of test items that are answered by the threshold with a risk of at
    most 0.05 on validation items (0 if there is none), and `risk_at_risk_05` the risk that they then have
    (absent if none is answered); `risk_at_coverage_80` likewise.  Conformal sets score a class by 1 - p
    ("lac").
    """
    parts = [
        _curve(predictor, test),
        *(_at_risk(predictor, validation, test, risk) for risk in RISKS),
        *(_at_coverage(predictor, validation, test, coverage) for coverage in COVERAGES),
        *(_conformal(predictor, validation, test, alpha) for alpha in ALPHAS),
    ]
    return Findings.merge(parts)


def _curve(predictor: str, test: Predicted) -> Findings:
    probs, labels = test.prediction.probs, test.known_labels
    curve = risk_coverage(probs, labels)
    kept = thinned(len(curve.risk))
    plain = {"coverage": numbers(curve.coverage[kept]), "risk": numbers(curve.risk[kept])}
    record = Record("test", predictor, "aurc", aurc(probs, labels), detail_of(test))
    return Findings((record,), {"risk_coverage": {predictor: plain}})


def _at_risk(predictor: str, validation: Predicted, test: Predicted, risk: float) -> Findings:
    name = f"{round(100 * risk):02d}"
    try:
        chosen = SelectivePredictor.fit(validation.prediction, validation.known_labels, risk=risk)
    except ValueError:  # no threshold is that good, so nothing would be answered
        record = Record("test", predictor, f"coverage_at_risk_{name}", 0.0, detail_of(test))
        return Findings((record,))
    return _answered(predictor, test, chosen, f"coverage_at_risk_{name}", f"risk_at_risk_{name}")


def _at_coverage(predictor: str, validation: Predicted, test: Predicted, coverage: float) -> Findings:
    name = f"{round(100 * coverage):02d}"
    chosen = SelectivePredictor.fit(validation.prediction, validation.known_labels, coverage=coverage)
    return _answered(predictor, test, chosen, f"coverage_at_coverage_{name}", f"risk_at_coverage_{name}")


def _answered(
    predictor: str, test: Predicted, chosen: SelectivePredictor, coverage: str, risk: str
) -> Findings:
    accepted = chosen.accept(test.prediction)  # [B]
    wrong = (test.prediction.label != test.known_labels)[accepted]
    detail = detail_of(test)
    records = [Record("test", predictor, coverage, float(accepted.double().mean()), detail)]
    if len(wrong):
        records.append(Record("test", predictor, risk, float(wrong.double().mean()), detail))
    return Findings(tuple(records))


def _conformal(predictor: str, validation: Predicted, test: Predicted, alpha: float) -> Findings:
    try:
        fitted = ConformalSets.fit(validation.prediction.probs, validation.known_labels, alpha)
    except ValueError as error:  # too few validation items for this alpha
        return Findings(notes=(f"no conformal sets of {predictor} for alpha={alpha}: {error}",))
    sets = fitted.sets(test.prediction.probs)  # [B, C]
    inside = sets.gather(1, test.known_labels[:, None])
    detail = detail_of(test, alpha=alpha)
    return Findings(
        (
            Record("test", predictor, "conformal_coverage", float(inside.double().mean()), detail),
            Record("test", predictor, "conformal_size", float(sets.sum(-1).to(torch.float64).mean()), detail),
        )
    )
