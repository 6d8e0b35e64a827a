"""Training: recipes, the two phases of the paper, checkpoints that survive a kill.

>>> from gpattention.training import TrainingData, fit, load_recipe
>>> result = fit(load_recipe("recipes/digits-cgp.toml"), data, "runs/digits")
"""

from gpattention.training.build import build_kernel_model, build_model
from gpattention.training.checkpoint import CheckpointError
from gpattention.training.devices import choose_device
from gpattention.training.first_phase import take_first_phase
from gpattention.training.hardware import PRECISIONS, Hardware
from gpattention.training.launch import launch
from gpattention.training.lock import RunInUseError
from gpattention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PhaseRecipe,
    Recipe,
    RegularizerRecipe,
    load_recipe,
    recipe_from_dict,
    with_seed,
)
from gpattention.training.results import (
    Progress,
    TrainingData,
    TrainingFailedError,
    TrainingResult,
    TrainingStoppedError,
)
from gpattention.training.schedule import Schedule
from gpattention.training.trainer import fit

__all__ = [
    "PRECISIONS",
    "CheckpointError",
    "CheckpointRecipe",
    "DataRecipe",
    "Hardware",
    "ModelRecipe",
    "OptimizerRecipe",
    "PhaseRecipe",
    "Progress",
    "Recipe",
    "RegularizerRecipe",
    "RunInUseError",
    "Schedule",
    "TrainingData",
    "TrainingFailedError",
    "TrainingResult",
    "TrainingStoppedError",
    "build_kernel_model",
    "build_model",
    "choose_device",
    "fit",
    "launch",
    "load_recipe",
    "recipe_from_dict",
    "take_first_phase",
    "with_seed",
]
