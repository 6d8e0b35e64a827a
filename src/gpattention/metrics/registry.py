"""The list of metrics: their names, which direction is better, how they are shown, and their functions.

To add a metric, write its function and one row of `METRICS`: evaluations then compute it, and tables and
reports show it.  `bootstrap` estimates how much a metric would change with other items of the same kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gpattention.checks import check_count, check_fraction
from gpattention.metrics import classification as of
from gpattention.metrics.ood import aupr_in, aupr_out, auroc, fpr_at_tpr

# the arguments of a function: probs and labels; the same with batch_size=; scores inside and outside
Kind = Literal["labels", "batches", "scores", "other"]
PAPER_BINS = 10  # of the calibration errors that the paper averages over batches


@dataclass(frozen=True)
class Metric:
    """One metric of an evaluation's records.

    Attributes:
        name: in records.
        label: its name for readers.
        larger: whether larger is better; None if neither direction is.
        kind: the arguments of `function`: "labels", "batches", "scores" or "other".
        function: computes it; None if a suite measures it itself.
        scale: factor of the value when it is shown in `unit`.
        unit: in which it is shown.
        short: a short heading for tables; the label if empty.
        counted_in: the meaning of a number without a unit, such as nats.
    """

    name: str
    label: str
    larger: bool | None
    kind: Kind = "other"
    function: Callable[..., float] | None = None
    scale: float = 1.0
    unit: str = ""
    short: str = ""
    counted_in: str = ""

    @property
    def named(self) -> str:
        """The label with the unit, such as "accuracy, %"."""
        what = "%" if self.unit == "%" else self.counted_in  # labels of costs contain it already
        return f"{self.label}, {what}" if what else self.label

    @property
    def digits(self) -> int:
        """The number of digits after the point."""
        return 2 if self.unit == "%" else 3

    @property
    def arrow(self) -> str:
        """An arrow in the direction that is better."""
        return {None: "", True: "↑", False: "↓"}[self.larger]

    @property
    def heading(self) -> str:
        """The heading of a column, with unit and direction."""
        name = self.short or self.label
        unit = f", {self.unit}" if self.unit else ""
        return f"{name[:1].upper()}{name[1:]}{unit} {self.arrow}".rstrip()

    def better(self, one: float, other: float) -> bool:
        """Whether one value beats another."""
        if self.larger is None:
            return False
        return one > other if self.larger else one < other

    def best(self, values: list[float]) -> float | None:
        """The best value; None if there is none, or neither direction is better."""
        if self.larger is None or not values:
            return None
        return max(values) if self.larger else min(values)


_PER_CENT: dict[str, Any] = {"scale": 100.0, "unit": "%"}
_ALL = (
    Metric("accuracy", "accuracy", True, "labels", of.accuracy, **_PER_CENT),
    Metric("mcc", "MCC", True, "labels", of.mcc, **_PER_CENT),
    Metric("nll", "NLL", False, "labels", of.nll, counted_in="nats"),
    Metric("brier", "Brier score", False, "labels", of.brier, counted_in="0 to 2"),
    Metric("ece", "ECE", False, "labels", of.ece, counted_in="0 to 1"),
    Metric("mce", "MCE", False, "labels", of.mce, counted_in="0 to 1"),
    Metric("adaptive_ece", "adaptive ECE", False, "labels", of.adaptive_ece, counted_in="0 to 1"),
    Metric("classwise_ece", "classwise ECE", False, "labels", of.classwise_ece, counted_in="0 to 1"),
    Metric("aurc", "AURC", False, "labels", of.aurc, counted_in="0 to 1"),
    *(
        Metric(
            f"batch_{f.__name__}", f"{f.__name__.upper()}, mean over batches", False, "batches",
            partial(f, bins=PAPER_BINS), short=f"{f.__name__.upper()}, batches", counted_in="0 to 1",
        )
        for f in (of.ece, of.mce)
    ),
    Metric("auroc", "AUROC", True, "scores", auroc, **_PER_CENT),
    Metric("aupr_in", "AUPR-in", True, "scores", aupr_in, **_PER_CENT),
    Metric("aupr_out", "AUPR-out", True, "scores", aupr_out, **_PER_CENT),
    # items inside are positive, as in the literature that named it
    Metric("fpr95", "FPR at 95 % TPR", False, "scores", fpr_at_tpr, short="FPR95", **_PER_CENT),
    # items outside are, as in pytorch-ood
    Metric(
        "fpr95_out", "FPR at 95 % TPR, items outside positive", False, "scores",
        partial(fpr_at_tpr, positive="out"), short="FPR95, outside", **_PER_CENT,
    ),
    Metric("conformal_coverage", "conformal coverage", None, counted_in="0 to 1"),
    Metric("conformal_size", "conformal set size", False, counted_in="classes"),
    Metric("token_similarity", "similarity of tokens", False, counted_in="cosine"),
    Metric("train_epoch_seconds", "training, seconds per epoch", False, unit="s", short="epoch"),
    Metric(
        "predict_seconds", "prediction, milliseconds per item", False, scale=1000.0, unit="ms",
        short="prediction",
    ),
    Metric("train_peak_mib", "training, peak memory in MiB", False, unit="MiB", short="training"),
    Metric("predict_peak_mib", "prediction, peak memory in MiB", False, unit="MiB", short="prediction"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _ALL}


def metrics_of(kind: Kind) -> dict[str, Callable[..., float]]:
    """Functions that compute metrics of a kind.

    Args:
        kind: "labels", "batches" or "scores".

    Returns:
        Functions by the metrics' names in records.
    """
    return {m.name: m.function for m in _ALL if m.kind == kind and m.function is not None}


def metric_of(name: str) -> Metric:
    """The metric of a name.

    Args:
        name: in records.

    Returns:
        Its row; for an unknown name a row with this name, and without a better direction.
    """
    return METRICS.get(name) or Metric(name, name.replace("_", " "), None)


@dataclass(frozen=True)
class Estimate:
    """A metric with its uncertainty.

    Attributes:
        value: for the original items.
        standard_error: standard deviation of the resampled values.
        low: lower end of the percentile interval.
        high: upper end.
    """

    value: float
    standard_error: float
    low: float
    high: float


def bootstrap(
    metric: Callable[..., float],
    *tensors: Tensor,  # each [items, ...]
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    paired: bool = True,
) -> Estimate:
    """`metric(*tensors)` for `replicates` samples of the items, drawn with replacement.

    Metrics that are biased for few items, such as calibration errors, become more biased by resampling, so
    that their interval is too high.

    Args:
        metric: a function of tensors.
        tensors: each [items, ...].
        replicates: number of samples.
        level: of the interval.
        seed: of the samples.
        paired: whether the tensors describe the same items, like probabilities and labels; else each is
            sampled separately, like scores inside and outside.

    Returns:
        The metric with its standard error and interval.

    Raises:
        ValueError: there is no item, or paired tensors differ in length.

    >>> bootstrap(ece, probs, labels)
    >>> bootstrap(auroc, scores_in, scores_out, paired=False)
    """
    replicates = check_count("replicates", replicates, least=2)
    check_fraction("level", level)
    sizes = [len(tensor) for tensor in tensors]
    if not sizes or min(sizes) == 0 or (paired and len(set(sizes)) > 1):
        raise ValueError(f"expected tensors of at least one item{', all alike' * paired}, got sizes {sizes}")
    # drawn on the CPU: the same items on every device
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(replicates, dtype=torch.float64)
    for number in range(replicates):
        drawn_from = sizes[:1] if paired else sizes
        chosen = [torch.randint(size, (size,), generator=generator) for size in drawn_from]
        chosen = chosen * len(sizes) if paired else chosen
        drawn[number] = metric(*(t[c.to(t.device)] for t, c in zip(tensors, chosen, strict=True)))
    tail = (1 - level) / 2
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(float(metric(*tensors)), float(drawn.std()), low, high)
