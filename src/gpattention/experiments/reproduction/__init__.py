"""Many runs from one file: a plan names recipes, changes and seeds; everything else follows.

>>> from gpattention.experiments.reproduction import load_plan, train_plan
>>> train_plan(load_plan("recipes/plans/cifar10-60.toml"), "runs", at_once=8, device="cuda")
"""

from gpattention.experiments.reproduction.plan import Plan, PlannedTraining, load_plan
from gpattention.experiments.reproduction.working import Outcome, evaluate_plan, train_plan

__all__ = ["Outcome", "Plan", "PlannedTraining", "evaluate_plan", "load_plan", "train_plan"]
