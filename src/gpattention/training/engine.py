"""One optimiser update, as plain calls: the engine that runs anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import optim

from gpattention.data import Batch
from gpattention.gp import NumericalError
from gpattention.training.gradients import clip_gradients
from gpattention.training.objective import Objective
from gpattention.training.recipe import Recipe
from gpattention.training.schedule import Controls


@dataclass(frozen=True)
class Sums:
    """Of losses and regularisers over steps, of this process."""

    loss: float = 0.0
    regularizer: float = 0.0
    steps: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loss + other.loss, self.regularizer + other.regularizer, self.steps + other.steps)

    def over_processes(self, fabric: Any) -> "Sums":
        """The mean over all processes, which make this call together."""
        if fabric.world_size == 1:
            return self
        sums = torch.tensor([self.loss, self.regularizer], dtype=torch.float64, device=fabric.device)
        loss, regularizer = fabric.all_reduce(sums, reduce_op="mean").tolist()
        return Sums(loss, regularizer, self.steps)

    def means(self, fabric: Any) -> tuple[float, float]:
        """Loss and regulariser of a step, over all processes."""
        sums = self.over_processes(fabric)
        return sums.loss / self.steps, sums.regularizer / self.steps


class StepFailedError(RuntimeError):
    """A step whose numbers broke; the weights are those before it."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


class CaptureFailedError(RuntimeError):
    """A step that cannot be captured as a graph; nothing of it was run."""


class Engine(Protocol):
    """Runs updates; reading what they gave may wait for the device, so it is asked for rarely."""

    optimizer: optim.Optimizer

    def step(self, batches: Sequence[Batch], controls: Controls) -> None:
        """One update; its values are added up until `read`."""
        ...

    def read(self) -> Sums:
        """What was added up since the last reading; raises `StepFailedError` if a step broke."""
        ...

    @property
    def last(self) -> tuple[float, float | None]:
        """Loss and regulariser of the last step that is known."""
        ...


class EagerEngine:
    """Plain calls, under Fabric's precision and in as many processes as it has."""

    def __init__(self, fabric: Any, objective: Objective, optimizer: optim.Optimizer, recipe: Recipe) -> None:
        self._fabric, self._recipe, self._objective = fabric, recipe, objective
        self._module, self.optimizer = fabric.setup(objective, optimizer)
        self._module.train()
        self._sums = Sums()
        self.last: tuple[float, float | None] = (math.nan, None)

    def step(self, batches: Sequence[Batch], controls: Controls) -> None:
        """One update."""
        for group in self.optimizer.param_groups:
            group["lr"] = controls.learning_rate
        if not self._objective.model.training:  # to tell every module in every step takes half a millisecond
            self._module.train()
        self.optimizer.zero_grad()
        seed = torch.tensor(controls.seed, device=self._fabric.device)
        alpha = torch.tensor(controls.alpha, device=self._fabric.device)
        losses, regularizers = [], []
        try:
            shares = self._objective.token_shares([batch.inputs for batch in batches])
            for index, (batch, share) in enumerate(zip(batches, shares, strict=True)):
                waiting = index + 1 < len(batches) and self._fabric.world_size > 1
                with self._fabric.no_backward_sync(self._module, enabled=waiting):
                    total, regularizer = self._module(
                        batch.inputs, batch.labels, batch.items, seed, alpha, share
                    )
                    self._fabric.backward(total / len(batches))
                losses.append(float(total.detach()))
                if regularizer is not None:
                    regularizers.append(float(regularizer))
        except NumericalError as error:
            raise StepFailedError(
                controls.step, " ".join([str(error), *getattr(error, "__notes__", [])])
            ) from error
        self._update(controls, sum(losses) / len(losses))
        mean = sum(regularizers) / len(regularizers) if regularizers else None
        self.last = (sum(losses) / len(losses), mean)
        self._sums = self._sums + Sums(self.last[0], mean or 0.0, 1)

    def read(self) -> Sums:
        """Sums since the last reading."""
        sums, self._sums = self._sums, Sums()
        return sums

    def _update(self, controls: Controls, loss: float) -> None:
        if not math.isfinite(loss):
            raise StepFailedError(controls.step, f"the loss is {loss}")
        norm = clip_gradients(self._objective.parameters(), self._recipe.optimizer.clip)
        if not math.isfinite(float(norm)):
            raise StepFailedError(controls.step, f"the norm of the gradient is {float(norm)}")
        self.optimizer.step()


def repeat_step(
    fabric: Any, objective: Objective, recipe: Recipe, batches: Sequence[Batch], controls: Controls
) -> str | None:
    """Run a step without moving the weights, and say how it fails; None if it does not."""
    still = optim.SGD(objective.parameters(), lr=0.0)
    try:
        EagerEngine(fabric, objective, still, recipe).step(batches, replace(controls, learning_rate=0.0))
    except StepFailedError as failure:
        return failure.reason
    return None
