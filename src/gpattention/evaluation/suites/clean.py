"""Suite `clean`: every metric on labelled items as they are, and the reliability diagram of the test set."""

from collections.abc import Mapping

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites.classification import classification_records
from gpattention.evaluation.suites.findings import Findings
from gpattention.evaluation.suites.reliability import Curve, reliability_curve
from gpattention.metrics import reliability_bins


def clean_findings(predictor: str, sets: Mapping[str, Predicted], *, batch: int) -> Findings:
    """Records of every set that has labels; the curve "reliability" of the set `test`.

    `batch` is the number of items over which the paper averages its calibration errors.
    """
    records = [
        record
        for name, predicted in sets.items()
        if predicted.labels is not None
        for record in classification_records(name, predictor, predicted, batch)
    ]
    curves = {"reliability": {predictor: _reliability(sets["test"])}} if "test" in sets else {}
    return Findings(tuple(records), curves)


def _reliability(predicted: Predicted) -> Curve:
    return reliability_curve(reliability_bins(predicted.prediction.probs, predicted.known_labels))
