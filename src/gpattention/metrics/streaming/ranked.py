"""Metrics of rankings, which need every item's score: 16 bytes per item, gathered from all processes."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from gpattention.checks import check_count
from gpattention.metrics.binning import BINS
from gpattention.metrics.calibration import adaptive_gap
from gpattention.metrics.checks import check_choice, check_fraction, read_scores
from gpattention.metrics.classification import hits
from gpattention.metrics.ood import POSITIVES, aupr_in, aupr_out, auroc, fpr_at_tpr
from gpattention.metrics.selective import curve, read_certainty
from gpattention.metrics.streaming.base import ItemMetric, check_items


class _Ranked(ItemMetric):
    """Scores and a mark, true or not, of every item.

    Both are float64: what a process without items sends must be of the type that the others send.
    """

    scores: list[Tensor]  # each [B]
    marks: list[Tensor]  # each [B], 0 or 1

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("marks", [], dist_reduce_fx="cat")

    def add(self, scores: Tensor, marks: Tensor) -> None:
        """Keep a batch."""
        self.scores.append(scores.double())
        self.marks.append(marks.double())

    def all_items(self) -> tuple[Tensor, Tensor]:
        """Scores and marks of all items so far.  [B], [B]"""
        parts = self.scores if isinstance(self.scores, list) else [self.scores]  # one once synchronised
        check_items(sum(len(part) for part in parts))
        return dim_zero_cat(self.scores), dim_zero_cat(self.marks) > 0


class AdaptiveECE(_Ranked):
    """`gpattention.metrics.adaptive_ece`, streaming."""

    higher_is_better = False

    def __init__(self, bins: int = BINS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        bins = check_count("bins", bins)
        self.bins = bins

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        probs, labels = self.items(probs, labels)
        self.add(probs.amax(-1), hits(probs, labels))

    def compute(self) -> Tensor:
        """The adaptive calibration error of all items so far.  []"""
        return self.scalar(adaptive_gap(*self.all_items(), self.bins))


class AURC(_Ranked):
    """`gpattention.metrics.aurc`, streaming."""

    higher_is_better = False

    def update(self, probs: Tensor, labels: Tensor, certainty: Tensor | None = None) -> None:
        """Add items with `probs` [B, C], `labels` [B] and, if not the confidence, `certainty` [B]."""
        probs, labels = self.items(probs, labels)
        self.add(read_certainty(probs, certainty), ~hits(probs, labels))

    def compute(self) -> Tensor:
        """The area under the risk-coverage curve of all items so far.  []"""
        return curve(*self.all_items()).risk.mean()


class _OutOfDistribution(_Ranked):
    """Metrics of scores inside and outside; use `update`, for a batch of one kind alone has no value."""

    higher_is_better = True

    def update(self, scores: Tensor, outside: Tensor) -> None:
        """Add items with `scores` [B], larger further out, of which some are `outside` [B] (bool)."""
        if outside.dtype != torch.bool or outside.shape != scores.shape:
            raise ValueError(
                f"expected outside to be bool of shape {list(scores.shape)}, one per score, "
                f"got shape {list(outside.shape)} and {outside.dtype}"
            )
        self.add(read_scores("scores", scores, least=0).to(self.device), outside.to(self.device))

    def both(self) -> tuple[Tensor, Tensor]:
        """Scores inside and outside.  [n], [m]"""
        scores, outside = self.all_items()
        return scores[~outside], scores[outside]


class AUROC(_OutOfDistribution):
    """`gpattention.metrics.auroc`, streaming."""

    def compute(self) -> Tensor:
        """The area under the ROC curve of all items so far.  []"""
        return self.scalar(auroc(*self.both()))


class AUPRIn(_OutOfDistribution):
    """`gpattention.metrics.aupr_in`, streaming."""

    def compute(self) -> Tensor:
        """The average precision for items inside, of all items so far.  []"""
        return self.scalar(aupr_in(*self.both()))


class AUPROut(_OutOfDistribution):
    """`gpattention.metrics.aupr_out`, streaming."""

    def compute(self) -> Tensor:
        """The average precision for items outside, of all items so far.  []"""
        return self.scalar(aupr_out(*self.both()))


class FPRAtTPR(_OutOfDistribution):
    """`gpattention.metrics.fpr_at_tpr`, streaming."""

    higher_is_better = False

    def __init__(self, tpr: float = 0.95, positive: str = "in", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_fraction("tpr", tpr, one=True)
        check_choice("positive", positive, POSITIVES)
        self.tpr, self.positive = tpr, positive

    def compute(self) -> Tensor:
        """The false-positive rate of all items so far.  []"""
        return self.scalar(fpr_at_tpr(*self.both(), tpr=self.tpr, positive=self.positive))
