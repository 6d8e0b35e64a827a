"""Metrics as plain functions of tensors: accuracy, calibration, selective prediction, out-of-distribution.

Classification metrics take `probs` [B, C] and `labels` [B]; out-of-distribution metrics take `scores_in` [n]
and `scores_out` [m], which are larger for items further away.  All compute in float64, use all items
together, return floats and need only torch.  `gpattention.metrics.streaming` has them, on top of
torchmetrics, for items in batches and on several processes.  `METRICS` lists the metrics of evaluations by
name.
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
