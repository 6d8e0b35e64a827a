"""What goes into a run and what comes out of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gpattention.models import Transformer
from gpattention.models.rows import Inputs
from gpattention.training.schedule import PhaseName


class TrainingStoppedError(RuntimeError):
    """The run was asked to stop; its state is saved."""


class TrainingFailedError(RuntimeError):
    """The run cannot go on; the message says why and what is saved."""


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on and chooses by; `facts` go into the model's config."""

    train: Inputs
    train_labels: Tensor  # [n]
    validation: Inputs
    validation_labels: Tensor  # [m]
    facts: Mapping[str, Any]
    # training inputs as stored, items and epoch -> inputs of the model; on the device, one batch at a time
    prepare: Callable[[Inputs, Tensor, int], Inputs] | None = None


@dataclass(frozen=True)
class Progress:
    """One step, for a progress bar; a captured step tells its loss only from time to time."""

    step: int
    total: int
    epoch: int
    phase: PhaseName
    loss: float
    accuracy: float | None  # of the last validation
    alpha: float
    regularizer: float | None
    examples_per_second: float


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    folder: Path
    model: Transformer
    rows: tuple[dict[str, Any], ...]
