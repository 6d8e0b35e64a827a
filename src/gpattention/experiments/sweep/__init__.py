"""A grid of values times seeds: planned, trained, and the best chosen on the validation split."""

from gpattention.experiments.sweep.plan import parse_over
from gpattention.experiments.sweep.result import CRITERIA, Criterion, SweepResult, SweepRow, SweepSetting
from gpattention.experiments.sweep.running import choose_setting, run_sweep

__all__ = [
    "CRITERIA",
    "Criterion",
    "SweepResult",
    "SweepRow",
    "SweepSetting",
    "choose_setting",
    "parse_over",
    "run_sweep",
]
