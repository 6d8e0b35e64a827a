"""The figures of a report as functions of plain data that return matplotlib figures."""

from gpattention.reports.figures.bars import bars_figure
from gpattention.reports.figures.calibration import corruption_figure, reliability_figure
from gpattention.reports.figures.curves import (
    cost_figure,
    layers_figure,
    risk_coverage_figure,
    roc_figure,
    severity_figure,
    training_figure,
)
from gpattention.reports.figures.lines import lines_figure
from gpattention.reports.figures.outliers import outlier_figure

__all__ = [
    "bars_figure",
    "corruption_figure",
    "cost_figure",
    "layers_figure",
    "lines_figure",
    "outlier_figure",
    "reliability_figure",
    "risk_coverage_figure",
    "roc_figure",
    "severity_figure",
    "training_figure",
]
