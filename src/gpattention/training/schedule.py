"""Where in a run a step lies, and what the learning rate and alpha are there."""

from dataclasses import dataclass
from typing import Literal

from gpattention.training.recipe import Recipe

PhaseName = Literal["kernel", "gp"]


@dataclass(frozen=True)
class Controls:
    """What the schedule says about a step."""

    step: int
    seed: int  # of the step's draws
    learning_rate: float
    alpha: float


@dataclass(frozen=True)
class Schedule:
    """Steps are optimiser updates, counted from 0 over both phases."""

    recipe: Recipe
    steps_per_epoch: int

    @property
    def kernel_steps(self) -> int:
        """Steps of phase 1."""
        return self.recipe.phases.kernel_epochs * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of both phases."""
        return self.recipe.epochs * self.steps_per_epoch

    def phase(self, step: int) -> PhaseName:
        """Phase 1 is kernel attention, phase 2 the model of the recipe."""
        return "kernel" if step < self.kernel_steps else "gp"

    def controls(self, step: int) -> Controls:
        """Everything about a step."""
        seed = self.recipe.seed * 1_000_003 + step
        return Controls(step, seed, self.learning_rate(step), self.alpha(step))

    def learning_rate(self, step: int) -> float:
        """Linear from the first to the last step, over both phases or (restart) over each."""
        first, last = 0, self.total_steps
        if self.recipe.optimizer.restart and 0 < self.kernel_steps < self.total_steps:
            first, last = (0, self.kernel_steps) if step < self.kernel_steps else (self.kernel_steps, last)
        done = (step - first) / max(last - first - 1, 1)
        start, end = self.recipe.optimizer.learning_rate, self.recipe.optimizer.final_learning_rate
        return start + min(done, 1.0) * (end - start)

    def alpha(self, step: int) -> float:
        """The regulariser's weight: nothing in phase 1, then linear over phase 2."""
        if step < self.kernel_steps:
            return 0.0
        length = self.total_steps - self.kernel_steps
        done = (step - self.kernel_steps) / max(length - 1, 1)
        weights = self.recipe.regularizer
        return weights.start + min(done, 1.0) * (weights.end - weights.start)
