"""Accuracy, Matthews' correlation, negative log-likelihood and Brier score from sums over the items."""

from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.metrics.classification import confusion_matrix, hits, mcc_from_confusion
from gpattention.metrics.scoring import brier_per_item, nll_per_item
from gpattention.metrics.streaming.base import ItemMetric, check_items


class _ItemMean(ItemMetric):
    """The mean of a number per item."""

    total: Tensor  # []
    count: Tensor  # []

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def per_item(self, probs: Tensor, labels: Tensor) -> Tensor:
        """What is averaged.  [B]"""
        raise NotImplementedError

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        probs, labels = self.items(probs, labels)
        self.total = self.total + self.per_item(probs, labels).sum()
        self.count = self.count + len(probs)

    def compute(self) -> Tensor:
        """The mean over all items so far.  []"""
        check_items(int(self.count))
        return self.total / self.count


class Accuracy(_ItemMean):
    """`gpattention.metrics.accuracy`, streaming."""

    higher_is_better = True

    def per_item(self, probs: Tensor, labels: Tensor) -> Tensor:
        """1 where right, else 0.  [B]"""
        return hits(probs, labels).double()


class NLL(_ItemMean):
    """`gpattention.metrics.nll`, streaming."""

    higher_is_better = False

    def per_item(self, probs: Tensor, labels: Tensor) -> Tensor:
        """Negative log-probability.  [B]"""
        return nll_per_item(probs, labels)


class Brier(_ItemMean):
    """`gpattention.metrics.brier`, streaming."""

    higher_is_better = False

    def per_item(self, probs: Tensor, labels: Tensor) -> Tensor:
        """Squared distance.  [B]"""
        return brier_per_item(probs, labels)


class MCC(ItemMetric):
    """`gpattention.metrics.mcc`, streaming."""

    higher_is_better = True
    confusion: Tensor  # [C, C]

    def __init__(self, classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        classes = check_count("classes", classes)
        self.classes = classes
        zeros = torch.zeros(classes, classes, dtype=torch.int64)
        self.add_state("confusion", zeros, dist_reduce_fx="sum")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        self.confusion = self.confusion + confusion_matrix(*self.items(probs, labels, self.classes))

    def compute(self) -> Tensor:
        """The coefficient of all items so far.  []"""
        check_items(int(self.confusion.sum()))
        return self.scalar(mcc_from_confusion(self.confusion))
