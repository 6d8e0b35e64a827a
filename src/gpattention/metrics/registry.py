"""The one list of metrics: what each is called, which way is better, how it is shown, what computes it.

A new metric is one row of `METRICS` and its function: evaluations compute it, tables and reports show it.
`bootstrap` says how much one would change with other items of the same kind.
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

# of what a function computes a metric: probs and labels; the same with batch_size=; scores inside and outside
Kind = Literal["labels", "batches", "scores", "other"]
PAPER_BINS = 10  # of the calibration errors that the paper averages over batches


@dataclass(frozen=True)
class Metric:
    """One metric of an evaluation's records.

    Attributes:
        name: in records.
        label: as a reader knows it.
        larger: whether larger is better; None: neither is.
        kind: what `function` takes: "labels", "batches", "scores" or "other".
        function: computes it; None: a suite measures it by itself.
        scale: what is shown is the value times this, in `unit`.
        unit: as it is shown.
        short: as a table is headed that has little room; the label if empty.
        counted_in: what a number without a unit is, such as nats.
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
        """With what it is counted in, such as "accuracy, %"."""
        what = "%" if self.unit == "%" else self.counted_in  # labels of costs say it already
        return f"{self.label}, {what}" if what else self.label

    @property
    def digits(self) -> int:
        """After the point, where it is shown."""
        return 2 if self.unit == "%" else 3

    @property
    def arrow(self) -> str:
        """Which way is better."""
        return {None: "", True: "↑", False: "↓"}[self.larger]

    @property
    def heading(self) -> str:
        """Of a table's column, with unit and direction."""
        name = self.short or self.label
        unit = f", {self.unit}" if self.unit else ""
        return f"{name[:1].upper()}{name[1:]}{unit} {self.arrow}".rstrip()

    def better(self, one: float, other: float) -> bool:
        """Whether one value beats another."""
        if self.larger is None:
            return False
        return one > other if self.larger else one < other

    def best(self, values: list[float]) -> float | None:
        """Of some values; None where there are none, or none is better."""
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
        Its row; of a name that is not in the list, one that is called as it is, and neither way is better.
    """
    return METRICS.get(name) or Metric(name, name.replace("_", " "), None)


@dataclass(frozen=True)
class Estimate:
    """A metric and how sure it is.

    Attributes:
        value: on the items as they are.
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
    """`metric(*tensors)` with items drawn anew, with replacement, `replicates` times.

    Metrics that are biased for few items, such as calibration errors, are more so when resampled: their
    interval lies too high.

    Args:
        metric: a function of tensors.
        tensors: each [items, ...].
        replicates: how often items are drawn.
        level: of the interval.
        seed: of the draws.
        paired: whether the tensors describe the same items, as probabilities and labels do; else each is
            drawn on its own, as scores inside and outside are.

    Returns:
        The metric with its standard error and interval.

    Raises:
        ValueError: if there is no item, or paired tensors differ in length.

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
