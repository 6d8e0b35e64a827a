"""Finished runs judged: the sets they are judged on, every suite, ensembles over seeds, and means."""

from gpattention.experiments.judging.corrupting import corrupt_test_set
from gpattention.experiments.judging.evaluating import evaluate_run, evaluate_runs

__all__ = ["corrupt_test_set", "evaluate_run", "evaluate_runs"]
