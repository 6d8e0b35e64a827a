"""The metrics for items that come in batches and on several processes, as `torchmetrics.Metric`s.

Each gives what its plain function gives for all items at once, however they are split: states are sums, or
all scores where a ranking needs them (16 bytes per item, gathered from all processes).  Needs torchmetrics:
`pip install 'gpattention[train]'`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_count, check_fraction
from gpattention.metrics import classification as of
from gpattention.metrics import ood

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ModuleNotFoundError as error:
    if error.name != "torchmetrics":
        raise  # it is there, and something it needs is not
    needs = "gpattention.metrics.streaming needs torchmetrics: pip install 'gpattention[train]'"
    raise ImportError(needs, name="torchmetrics") from error


__all__ = [
    "AURC", "AUROC", "ECE", "MCC", "MCE", "NLL", "AUPRIn", "AUPROut", "Accuracy", "AdaptiveECE", "Brier",
    "ClasswiseECE", "FPRAtTPR", "Reliability",
]  # fmt: skip


class StreamingMetric(Metric):
    """A metric that is updated batch by batch; batches may be empty, the whole may not.

    A subclass says in `_terms` what a batch adds to the states, and in `_value` what they come to.

    Args:
        states: a tensor of zeros for each state that is a sum, an empty list for each that keeps all items.
        classes: number of classes, where the states depend on it.
        kwargs: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False  # forward() adds the batch's own states to the whole
    higher_is_better: bool | None = False
    count: Tensor  # [] items so far

    def __init__(self, states: dict[str, Any], classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # the type of what a process without items sends in place of its scores
        self.set_dtype(torch.float64)
        self.classes = classes
        for name, start in {"count": torch.zeros((), dtype=torch.int64), **states}.items():
            self.add_state(name, start, dist_reduce_fx="cat" if isinstance(start, list) else "sum")

    def _terms(self, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What a batch adds to each state."""
        raise NotImplementedError

    def _value(self) -> Any:
        """The metric of the states."""
        raise NotImplementedError

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        self.add(len(probs), self._terms(*self.items(probs, labels)))

    def compute(self) -> Any:
        """The metric of all items so far.  []"""
        if int(self.count) == 0:
            raise ValueError("expected at least one item before compute(), got 0")
        return self._value()

    def items(self, probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Checked, and on the metric's device.  [B, C], [B]"""
        probs, labels = of.read_items(probs, labels, least=0)
        if self.classes is not None and probs.shape[1] != self.classes:
            raise ValueError(f"expected probs of {self.classes} classes, got {probs.shape[1]}")
        return probs.to(self.device), labels.to(self.device)

    def add(self, count: int, terms: dict[str, Tensor]) -> None:
        """Add a batch of `count` items to the states."""
        self.count = self.count + count
        for name, more in terms.items():
            state = getattr(self, name)
            if isinstance(state, list):
                state.append(more)
            else:
                setattr(self, name, state + more)

    def scalar(self, value: float) -> Tensor:
        """A result as torchmetrics wants it."""
        return torch.tensor(value, dtype=torch.float64, device=self.device)


class _ItemMean(StreamingMetric):
    """The mean of a number per item."""

    total: Tensor  # []
    per_item: ClassVar[Callable[..., Tensor]]  # what is averaged, of probs and labels

    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"total": torch.zeros((), dtype=torch.float64)}, **kwargs)

    def _terms(self, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"total": type(self).per_item(probs, labels).double().sum()}

    def _value(self) -> Tensor:
        return self.total / self.count


class Accuracy(_ItemMean):
    """`gpattention.metrics.accuracy`, streaming."""

    higher_is_better = True
    per_item = staticmethod(of.hits)


class NLL(_ItemMean):
    """`gpattention.metrics.nll`, streaming."""

    per_item = staticmethod(of.nll_per_item)


class Brier(_ItemMean):
    """`gpattention.metrics.brier`, streaming."""

    per_item = staticmethod(of.brier_per_item)


class MCC(StreamingMetric):
    """`gpattention.metrics.mcc`, streaming.

    Args:
        classes: how many.
        kwargs: of `torchmetrics.Metric`.
    """

    higher_is_better = True
    confusion: Tensor  # [C, C]

    def __init__(self, classes: int, **kwargs: Any) -> None:
        classes = check_count("classes", classes)
        zeros = torch.zeros(classes, classes, dtype=torch.int64)
        super().__init__({"confusion": zeros}, classes, **kwargs)

    def _terms(self, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"confusion": of.confusion_matrix(probs, labels)}

    def _value(self) -> Tensor:
        return self.scalar(of.mcc_from_confusion(self.confusion))


class ECE(StreamingMetric):
    """`gpattention.metrics.ece`, pooled, streaming.

    Args:
        bins: how many.
        classes: of subclasses that have bins for every class.
        kwargs: of `torchmetrics.Metric`.
    """

    counts: Tensor  # [G, K]
    predicted: Tensor  # [G, K]
    occurred: Tensor  # [G, K]

    def __init__(self, bins: int = of.BINS, *, classes: int | None = None, **kwargs: Any) -> None:
        groups = 1 if classes is None else check_count("classes", classes)
        zeros = torch.zeros(groups, check_count("bins", bins))
        states = {"counts": zeros.long(), "predicted": zeros.double(), "occurred": zeros.long()}
        super().__init__(states, classes, **kwargs)
        self.bins = zeros.shape[1]

    def _terms(self, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return vars(of.top_sums(probs, labels, self.bins))

    def sums(self) -> of.BinSums:
        """Of all items so far."""
        return of.BinSums(self.counts, self.predicted, self.occurred)

    def _value(self) -> Any:
        return of.expected_gap(self.sums()).mean()


class MCE(ECE):
    """`gpattention.metrics.mce`, pooled, streaming; arguments as of `ECE`."""

    def _value(self) -> Tensor:
        return of.largest_gap(self.sums())[0]


class Reliability(ECE):
    """`gpattention.metrics.reliability_bins`, streaming; arguments as of `ECE`.

    torchmetrics hands on no frozen dataclass, so it comes as its fields.

    >>> ReliabilityBins(**metric.compute())
    """

    higher_is_better = None

    def _value(self) -> dict[str, Tensor]:
        return vars(of.reliability(self.sums()))


class ClasswiseECE(ECE):
    """`gpattention.metrics.classwise_ece`, streaming.

    Args:
        classes: how many.
        bins: how many for each class.
        kwargs: of `torchmetrics.Metric`.
    """

    def __init__(self, classes: int, bins: int = of.BINS, **kwargs: Any) -> None:
        super().__init__(bins, classes=classes, **kwargs)

    def _terms(self, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return vars(of.class_sums(probs, labels, self.bins))


class _Ranked(StreamingMetric):
    """Scores and a mark, true or not, of every item.

    Both are float64: what a process without items sends must be of the type that the others send.
    """

    scores: list[Tensor]  # each [B]
    marks: list[Tensor]  # each [B], 0 or 1

    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"scores": [], "marks": []}, **kwargs)

    def rank(self, scores: Tensor, marks: Tensor) -> None:
        """Keep a batch."""
        self.add(len(scores), {"scores": scores.double(), "marks": marks.double()})

    def all_items(self) -> tuple[Tensor, Tensor]:
        """Scores and marks of all items so far.  [B], [B]"""
        return dim_zero_cat(self.scores), dim_zero_cat(self.marks) > 0


class AdaptiveECE(_Ranked):
    """`gpattention.metrics.adaptive_ece`, streaming.

    Args:
        bins: how many.
        kwargs: of `torchmetrics.Metric`.
    """

    def __init__(self, bins: int = of.BINS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = check_count("bins", bins)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add items with `probs` [B, C] and `labels` [B]."""
        probs, labels = self.items(probs, labels)
        self.rank(probs.amax(-1), of.hits(probs, labels))

    def _value(self) -> Tensor:
        return self.scalar(of.adaptive_gap(*self.all_items(), self.bins))


class AURC(_Ranked):
    """`gpattention.metrics.aurc`, streaming."""

    def update(self, probs: Tensor, labels: Tensor, certainty: Tensor | None = None) -> None:
        """Add items with `probs` [B, C], `labels` [B] and, if not the confidence, `certainty` [B]."""
        probs, labels = self.items(probs, labels)
        self.rank(of.read_certainty(probs, certainty), ~of.hits(probs, labels))

    def _value(self) -> Tensor:
        return of.curve(*self.all_items()).risk.mean()


class AUROC(_Ranked):
    """`gpattention.metrics.auroc`, streaming; use `update`, for a batch of one kind alone has no value."""

    higher_is_better = True
    function: ClassVar[Callable[..., float]] = staticmethod(ood.auroc)

    def update(self, scores: Tensor, outside: Tensor) -> None:
        """Add items with `scores` [B], larger further out, of which some are `outside` [B] (bool)."""
        if outside.dtype != torch.bool or outside.shape != scores.shape:
            wanted, got = list(scores.shape), f"shape {list(outside.shape)} and {outside.dtype}"
            raise ValueError(f"expected outside to be bool of shape {wanted}, one per score, got {got}")
        read = of.read_scores("scores", scores, least=0)
        self.rank(read.to(self.device), outside.to(self.device))

    def _value(self, **options: Any) -> Tensor:
        scores, outside = self.all_items()
        return self.scalar(type(self).function(scores[~outside], scores[outside], **options))


class AUPRIn(AUROC):
    """`gpattention.metrics.aupr_in`, streaming."""

    function = staticmethod(ood.aupr_in)


class AUPROut(AUROC):
    """`gpattention.metrics.aupr_out`, streaming."""

    function = staticmethod(ood.aupr_out)


class FPRAtTPR(AUROC):
    """`gpattention.metrics.fpr_at_tpr`, streaming.

    Args:
        tpr: the true-positive rate, in (0, 1].
        positive: "in" or "out".
        kwargs: of `torchmetrics.Metric`.
    """

    higher_is_better = False
    function = staticmethod(ood.fpr_at_tpr)

    def __init__(self, tpr: float = 0.95, positive: str = "in", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_fraction("tpr", tpr, one=True)
        check_choice("positive", positive, ood.POSITIVES)
        self.tpr, self.positive = tpr, positive

    def _value(self, **_: Any) -> Tensor:
        return super()._value(tpr=self.tpr, positive=self.positive)
