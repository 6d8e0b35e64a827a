"""What is measured of predictions, one suite per file: pure functions from predictions to records.

A `Predicted` is a predictor's prediction of one set; every function takes some, with the predictor's name,
and returns `Findings` or records.  `gpattention.experiments.evaluate_run` brings the predictions of a run and
writes the results.
"""

from gpattention.evaluation.suites.clean import clean_findings
from gpattention.evaluation.suites.corrupted import corrupted_records, corruption_means
from gpattention.evaluation.suites.efficiency import EfficiencyPlan, efficiency_findings
from gpattention.evaluation.suites.findings import Findings
from gpattention.evaluation.suites.gallery import gallery, health_table
from gpattention.evaluation.suites.ood import ood_findings
from gpattention.evaluation.suites.oversmoothing import oversmoothing_findings
from gpattention.evaluation.suites.selective import selective_findings

SUITES = ("clean", "corrupted", "ood", "selective", "oversmoothing", "efficiency")

__all__ = [
    "SUITES",
    "EfficiencyPlan",
    "Findings",
    "clean_findings",
    "corrupted_records",
    "corruption_means",
    "efficiency_findings",
    "gallery",
    "health_table",
    "ood_findings",
    "oversmoothing_findings",
    "selective_findings",
]
