"""Every metric of labelled predictions, as the records that tables and reports read."""

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.findings import detail_of
from gpattention.metrics.registry import PAPER_BINS, metrics_of

PAPER_BATCH = {"images": 1000, "texts": 32}  # items over which the paper's code averages ECE and MCE


def classification_records(name: str, predictor: str, predicted: Predicted, batch: int) -> tuple[Record, ...]:
    """Of one set: pooled with 15 bins; and as the paper has them, 10 bins over batches of `batch` items."""
    probs, labels = predicted.prediction.probs, predicted.known_labels
    values = {metric: function(probs, labels) for metric, function in metrics_of("labels").items()}
    detail = detail_of(predicted)
    records = [Record(name, predictor, metric, value, detail) for metric, value in values.items()]
    paper = detail_of(predicted, bins=PAPER_BINS, batch=batch)
    for metric, function in metrics_of("batches").items():
        records.append(Record(name, predictor, metric, function(probs, labels, batch_size=batch), paper))
    return tuple(records)
