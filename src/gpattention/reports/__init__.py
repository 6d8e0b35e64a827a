"""Reports: runs as one self-contained HTML page, and its figures as matplotlib figures.

Run records in, text or figures out.
"""

from gpattention.reports.figures import (
    bars_figure,
    corruption_figure,
    cost_figure,
    layers_figure,
    outlier_figure,
    p_value_figure,
    reliability_figure,
    risk_coverage_figure,
    roc_figure,
    severity_figure,
    training_figure,
)
from gpattention.reports.page import build_report, write_report

__all__ = [
    "bars_figure", "build_report", "corruption_figure", "cost_figure", "layers_figure", "outlier_figure",
    "p_value_figure", "reliability_figure", "risk_coverage_figure", "roc_figure", "severity_figure",
    "training_figure", "write_report",
]  # fmt: skip
