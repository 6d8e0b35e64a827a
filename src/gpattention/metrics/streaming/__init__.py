"""The metrics for items that come in batches and on several processes, as `torchmetrics.Metric`s.

Each gives what its plain function gives for all items at once, however they are split: states are sums, or
all scores where a ranking needs them.  Needs torchmetrics: `pip install 'gpattention[train]'`.
"""

try:
    import torchmetrics as _torchmetrics  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torchmetrics":
        raise  # it is there, and something it needs is not
    raise ImportError(
        "gpattention.metrics.streaming needs torchmetrics: pip install 'gpattention[train]'",
        name="torchmetrics",
    ) from error

from gpattention.metrics.streaming.binned import ECE, MCE, ClasswiseECE, Reliability
from gpattention.metrics.streaming.counted import MCC, NLL, Accuracy, Brier
from gpattention.metrics.streaming.ranked import (
    AURC,
    AUROC,
    AdaptiveECE,
    AUPRIn,
    AUPROut,
    FPRAtTPR,
)

__all__ = [
    "AURC",
    "AUROC",
    "ECE",
    "MCC",
    "MCE",
    "NLL",
    "AUPRIn",
    "AUPROut",
    "Accuracy",
    "AdaptiveECE",
    "Brier",
    "ClasswiseECE",
    "FPRAtTPR",
    "Reliability",
]
