"""The suites of evaluations, one in each file, and their registry.

The functions `..._findings` are pure and turn predictions (`Predicted`) or a model into `Findings`.  The
function `evaluate_...` beside each brings the predictions or the model of a run.  To add a suite, write such
a file and one line in `SUITES`; `gpattention.evaluation.evaluate_run` runs it and writes its findings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpattention.evaluation.suites.clean import clean_findings, evaluate_clean, health_table
from gpattention.evaluation.suites.corrupted import corruption_means, evaluate_corrupted
from gpattention.evaluation.suites.criterion import evaluate_criterion
from gpattention.evaluation.suites.efficiency import EfficiencyPlan, efficiency_findings, evaluate_efficiency
from gpattention.evaluation.suites.examples import gallery
from gpattention.evaluation.suites.findings import Findings, Subject
from gpattention.evaluation.suites.ood import evaluate_ood, ood_findings
from gpattention.evaluation.suites.oversmoothing import evaluate_oversmoothing, oversmoothing_findings
from gpattention.evaluation.suites.selective import evaluate_selective, selective_findings


@dataclass(frozen=True)
class Suite:
    """One suite of an evaluation.

    Attributes:
        label: a description, for runs that do not have it yet.
        evaluate: runs it.
        predictions: whether it evaluates predictions, of ensembles too, or else the model.
        images: whether it is for images only.
        items: whether it depends on the items of the data.
        validation: whether it depends on validation items.
        usual: whether it is one of "all", or else is evaluated only by its name.
    """

    label: str
    evaluate: Callable[[Subject], Findings]
    predictions: bool = True
    images: bool = False
    items: bool = True
    validation: bool = True
    usual: bool = True


SUITES = {
    "clean": Suite("evaluation of the test set", evaluate_clean),
    "corrupted": Suite(
        "evaluation of corrupted images", evaluate_corrupted, images=True, validation=False
    ),
    "ood": Suite("evaluation of unknown data", evaluate_ood),
    "selective": Suite("evaluation of selective prediction", evaluate_selective),
    "oversmoothing": Suite("measurement of oversmoothing", evaluate_oversmoothing, predictions=False),
    "efficiency": Suite(
        "measurement of time and memory", evaluate_efficiency, predictions=False, items=False
    ),
    "criterion": Suite("what a plan chooses by", evaluate_criterion, usual=False),
}  # fmt: skip

__all__ = [
    "SUITES", "EfficiencyPlan", "Findings", "Suite", "clean_findings", "corruption_means",
    "efficiency_findings", "gallery", "health_table", "ood_findings", "oversmoothing_findings",
    "selective_findings",
]  # fmt: skip
