"""Many runs from one file: a plan names recipes, changes and seeds; everything else follows.

>>> from gpattention.studies.reproduction import evaluate_plan, load_plan, train_plan, write_results
>>> plan = load_plan("recipes/plans/cifar10-60.toml")
>>> train_plan(plan, "runs/cifar10-60", at_once=8, device="cuda")
>>> evaluate_plan(plan, "runs/cifar10-60", device="cuda")
>>> write_results(plan, "runs/cifar10-60", "results/cifar10-60")
"""

from gpattention.studies.reproduction.model_card import write_model_card, write_shared_run
from gpattention.studies.reproduction.plan import Candidate, Goal, Plan, PlannedTraining, load_plan
from gpattention.studies.reproduction.results import write_results
from gpattention.studies.reproduction.working import Outcome, evaluate_plan, train_plan

__all__ = [
    "Candidate",
    "Goal",
    "Outcome",
    "Plan",
    "PlannedTraining",
    "evaluate_plan",
    "load_plan",
    "train_plan",
    "write_model_card",
    "write_results",
    "write_shared_run",
]
