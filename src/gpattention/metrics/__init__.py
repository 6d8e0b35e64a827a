"""Metrics of predictions as plain functions of tensors: right, calibrated, selective, aware of the unknown.

Classification metrics take `probs` [B, C] and `labels` [B]; out-of-distribution metrics take `scores_in` [n]
and `scores_out` [m], larger for items further out.  All compute in float64, pool all items, return floats
and need torch alone.  `gpattention.metrics.streaming` has the same for items that come in batches and
processes, on top of torchmetrics.  `METRICS` lists every metric of an evaluation by name.
"""

from gpattention.metrics.classification import (
    ReliabilityBins,
    RiskCoverage,
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    classwise_ece,
    ece,
    mcc,
    mce,
    nll,
    reliability_bins,
    risk_coverage,
)
from gpattention.metrics.ood import aupr_in, aupr_out, auroc, fpr_at_tpr
from gpattention.metrics.registry import METRICS, Estimate, Metric, bootstrap, metric_of, metrics_of
from gpattention.metrics.resampling import (
    auroc_replicates,
    classification_replicates,
    interval_about,
    share_interval,
)

__all__ = [
    "METRICS", "Estimate", "Metric", "ReliabilityBins", "RiskCoverage", "accuracy", "adaptive_ece", "aupr_in",
    "aupr_out", "aurc", "auroc", "auroc_replicates", "bootstrap", "brier", "classification_replicates",
    "classwise_ece", "ece", "fpr_at_tpr", "interval_about", "mcc", "mce", "metric_of", "metrics_of", "nll",
    "reliability_bins", "risk_coverage", "share_interval",
]  # fmt: skip
