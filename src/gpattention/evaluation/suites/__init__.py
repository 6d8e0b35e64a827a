"""What is measured of predictions, one suite per file: pure functions from predictions to records.

A `Predicted` is a predictor's prediction of one set; every function takes some, with the predictor's name,
and returns `Findings` or records.  `gpattention.experiments.evaluate_run` brings the predictions of a run and
writes the results.
"""

from dataclasses import dataclass

from gpattention.evaluation.suites.clean import clean_findings
from gpattention.evaluation.suites.corrupted import corrupted_records, corruption_means
from gpattention.evaluation.suites.efficiency import EfficiencyPlan, efficiency_findings
from gpattention.evaluation.suites.findings import Findings
from gpattention.evaluation.suites.gallery import gallery, health_table
from gpattention.evaluation.suites.ood import ood_findings
from gpattention.evaluation.suites.oversmoothing import oversmoothing_findings
from gpattention.evaluation.suites.selective import selective_findings


@dataclass(frozen=True)
class Suite:
    """One suite of an evaluation."""

    what: str  # it is, where a run does not have it yet
    predictions: bool = True  # it judges predictions, those of an ensemble too; else the model
    images: bool = False  # it makes sense for images alone


SUITES = {
    "clean": Suite("evaluation of the test set"),
    "corrupted": Suite("evaluation of corrupted images", images=True),
    "ood": Suite("evaluation of unknown data"),
    "selective": Suite("evaluation of selective prediction"),
    "oversmoothing": Suite("measurement of oversmoothing", predictions=False),
    "efficiency": Suite("measurement of time and memory", predictions=False),
}

__all__ = [
    "SUITES",
    "EfficiencyPlan",
    "Findings",
    "Suite",
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
