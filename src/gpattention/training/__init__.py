"""Training: the two phases of the paper, checkpoints that survive a kill, and a loop for anything else.

>>> from gpattention.runs import load_recipe
>>> from gpattention.training import train_recipe
>>> result = train_recipe(load_recipe("recipes/digits-cgp.toml"), "runs/digits")
"""

from gpattention.training.engine import PRECISIONS, Hardware, Schedule, launch, train_steps
from gpattention.training.fit import (
    StopRequest,
    TrainingResult,
    TrainingStep,
    build_kernel_model,
    build_model,
    first_phase,
    fit,
    needs_warm_start,
    take_first_phase,
    train_recipe,
)
from gpattention.training.folder import (
    CheckpointError,
    RunInUseError,
    TrainingFailedError,
    TrainingStoppedError,
    check_new,
)
from gpattention.training.status import RunStatus, read_statuses

__all__ = [
    "PRECISIONS", "CheckpointError", "Hardware", "RunInUseError", "RunStatus", "Schedule", "StopRequest",
    "TrainingFailedError", "TrainingResult", "TrainingStep", "TrainingStoppedError", "build_kernel_model",
    "build_model", "check_new", "first_phase", "fit", "launch", "needs_warm_start", "read_statuses",
    "take_first_phase", "train_recipe", "train_steps",
]  # fmt: skip
