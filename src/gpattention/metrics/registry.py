"""The one list of metrics: what each is called, which way is better, how it is shown, what computes it.

A new metric is one line here: evaluations compute it, tables and reports show it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gpattention.metrics.calibration import adaptive_ece, classwise_ece, ece, mce
from gpattention.metrics.classification import accuracy, mcc
from gpattention.metrics.ood import aupr_in, aupr_out, auroc, fpr_at_tpr
from gpattention.metrics.scoring import brier, nll
from gpattention.metrics.selective import aurc

# of what a function computes a metric: probs and labels; the same with batch_size=; scores inside and outside
Kind = Literal["labels", "batches", "scores", "other"]
PAPER_BINS = 10  # of the calibration errors that the paper averages over batches


@dataclass(frozen=True)
class Metric:
    """One metric of an evaluation's records."""

    name: str  # in records
    label: str  # as a reader knows it
    larger: bool | None  # whether larger is better; None: neither is
    kind: Kind = "other"
    function: Callable[..., float] | None = None  # None: a suite measures it by itself
    scale: float = 1.0  # what is shown is the value times this, in `unit`
    unit: str = ""
    short: str = ""  # as a table is headed that has little room; the label if empty

    @property
    def digits(self) -> int:
        """After the point, where it is shown."""
        return 2 if self.unit == "%" else 3

    @property
    def arrow(self) -> str:
        """Which way is better."""
        return "" if self.larger is None else "↑" if self.larger else "↓"

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


_BATCHED: dict[str, Any] = {"bins": PAPER_BINS, "aggregation": "batch_mean"}
_PER_CENT: dict[str, Any] = {"scale": 100.0, "unit": "%"}
_ALL = (
    Metric("accuracy", "accuracy", True, "labels", accuracy, **_PER_CENT),
    Metric("mcc", "MCC", True, "labels", mcc, **_PER_CENT),
    Metric("nll", "NLL", False, "labels", nll),
    Metric("brier", "Brier score", False, "labels", brier),
    Metric("ece", "ECE", False, "labels", ece),
    Metric("mce", "MCE", False, "labels", mce),
    Metric("adaptive_ece", "adaptive ECE", False, "labels", adaptive_ece),
    Metric("classwise_ece", "classwise ECE", False, "labels", classwise_ece),
    Metric("aurc", "AURC", False, "labels", aurc),
    Metric(
        "batch_ece", "ECE, mean over batches", False, "batches", partial(ece, **_BATCHED),
        short="ECE, batches",
    ),
    Metric(
        "batch_mce", "MCE, mean over batches", False, "batches", partial(mce, **_BATCHED),
        short="MCE, batches",
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
    Metric("conformal_coverage", "conformal coverage", None),
    Metric("conformal_size", "conformal set size", False),
    Metric("token_similarity", "similarity of tokens", False),
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
    """Functions that compute metrics of a kind, by their names in records."""
    return {m.name: m.function for m in _ALL if m.kind == kind and m.function is not None}


def metric_of(name: str) -> Metric:
    """By its name in records; one that is not in the list is called as it is, and neither way is better."""
    return METRICS.get(name) or Metric(name, name.replace("_", " "), None)
