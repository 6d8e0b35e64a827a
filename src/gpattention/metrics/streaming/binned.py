"""Calibration errors in equal-width bins, from sums over the items of each bin."""

from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.metrics.binning import (
    BINS,
    BinSums,
    class_sums,
    expected_gap,
    largest_gap,
    reliability,
    top_sums,
)
from gpattention.metrics.streaming.base import ItemMetric, check_items

_STATES = {"counts": torch.int64, "predicted": torch.float64, "occurred": torch.int64}


class _Binned(ItemMetric):
    """Sums of G groups in K bins."""

    higher_is_better: bool | None = False
    counts: Tensor  # [G, K]
    predicted: Tensor  # [G, K]
    occurred: Tensor  # [G, K]

    def __init__(self, groups: int, bins: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        bins = check_count("bins", bins)
        self.bins = bins
        for name, dtype in _STATES.items():
            self.add_state(name, torch.zeros(groups, bins, dtype=dtype), dist_reduce_fx="sum")

    def sums_of(self, probs: Tensor, labels: Tensor) -> BinSums:
        """Of one batch."""
        return top_sums(*self.items(probs, labels), self.bins)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        batch = self.sums_of(probs, labels)
        self.counts = self.counts + batch.counts
        self.predicted = self.predicted + batch.predicted
        self.occurred = self.occurred + batch.occurred

    def sums(self) -> BinSums:
        """Of all items so far."""
        check_items(int(self.counts.sum()))
        return BinSums(self.counts, self.predicted, self.occurred)


class ECE(_Binned):
    """`gpattention.metrics.ece`, pooled, streaming."""

    def __init__(self, bins: int = BINS, **kwargs: Any) -> None:
        super().__init__(1, bins, **kwargs)

    def compute(self) -> Tensor:
        """The expected calibration error of all items so far.  []"""
        return expected_gap(self.sums())[0]


class MCE(_Binned):
    """`gpattention.metrics.mce`, pooled, streaming."""

    def __init__(self, bins: int = BINS, **kwargs: Any) -> None:
        super().__init__(1, bins, **kwargs)

    def compute(self) -> Tensor:
        """The maximum calibration error of all items so far.  []"""
        return largest_gap(self.sums())[0]


class Reliability(_Binned):
    """`gpattention.metrics.reliability_bins`, streaming.

    torchmetrics hands on no frozen dataclass, so it comes as its fields.

    >>> ReliabilityBins(**metric.compute())
    """

    higher_is_better = None

    def __init__(self, bins: int = BINS, **kwargs: Any) -> None:
        super().__init__(1, bins, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """The fields of `ReliabilityBins` by name."""
        return reliability(self.sums())


class ClasswiseECE(_Binned):
    """`gpattention.metrics.classwise_ece`, streaming."""

    def __init__(self, classes: int, bins: int = BINS, **kwargs: Any) -> None:
        classes = check_count("classes", classes)
        super().__init__(classes, bins, **kwargs)
        self.classes = classes

    def sums_of(self, probs: Tensor, labels: Tensor) -> BinSums:
        """Of one batch, a group for each class."""
        return class_sums(*self.items(probs, labels, self.classes), self.bins)

    def compute(self) -> Tensor:
        """The mean over the classes, of all items so far.  []"""
        return expected_gap(self.sums()).mean()
