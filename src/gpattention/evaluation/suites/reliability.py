"""Reliability diagrams as curves: of one set, or of many as if all their items were one."""

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites.findings import numbers
from gpattention.metrics.binning import BINS, BinSums, ReliabilityBins, reliability, top_sums

Curve = dict[str, list[float | None]]


def reliability_curve(bins: ReliabilityBins) -> Curve:
    """As files hold it."""
    return {
        "edges": numbers(bins.edges),
        "confidence": numbers(bins.confidence),
        "accuracy": numbers(bins.accuracy),
        "count": [int(count) for count in bins.counts.tolist()],
    }


class PooledReliability:
    """Sums over sets that come one after the other and need not be kept."""

    def __init__(self) -> None:
        self._sums: BinSums | None = None

    def add(self, predicted: Predicted) -> None:
        """The items of one more set."""
        more, before = top_sums(predicted.prediction.probs, predicted.known_labels, BINS), self._sums
        if before is not None:
            more = BinSums(
                before.counts + more.counts,
                before.predicted + more.predicted,
                before.occurred + more.occurred,
            )
        self._sums = more

    def curve(self) -> Curve:
        """Of everything so far."""
        if self._sums is None:
            raise ValueError("expected at least one set, got none")
        return reliability_curve(ReliabilityBins(**reliability(self._sums)))
