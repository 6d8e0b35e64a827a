"""Every metric of labelled predictions, as the records that tables and reports read."""

from collections.abc import Callable

from torch import Tensor

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.findings import detail_of
from gpattention.metrics import accuracy, adaptive_ece, aurc, brier, classwise_ece, ece, mcc, mce, nll

PAPER_BINS = 10
PAPER_BATCH = {"images": 1000, "texts": 32}  # items over which the paper's code averages ECE and MCE

POOLED: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "mcc": mcc,
    "nll": nll,
    "brier": brier,
    "ece": ece,
    "mce": mce,
    "adaptive_ece": adaptive_ece,
    "classwise_ece": classwise_ece,
    "aurc": aurc,
}


def classification_records(name: str, predictor: str, predicted: Predicted, batch: int) -> tuple[Record, ...]:
    """Of one set: pooled with 15 bins; and as the paper has them, 10 bins over batches of `batch` items."""
    probs, labels = predicted.prediction.probs, predicted.known_labels
    values = {metric: function(probs, labels) for metric, function in POOLED.items()}
    detail = detail_of(predicted)
    records = [Record(name, predictor, metric, value, detail) for metric, value in values.items()]
    paper = detail_of(predicted, bins=PAPER_BINS, batch=batch)
    for metric, function in (("batch_ece", ece), ("batch_mce", mce)):
        value = function(probs, labels, bins=PAPER_BINS, aggregation="batch_mean", batch_size=batch)
        records.append(Record(name, predictor, metric, value, paper))
    return tuple(records)
