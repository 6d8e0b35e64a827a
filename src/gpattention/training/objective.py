"""What a step minimises, cross-entropy and alpha times the regulariser, and how alpha and the rate change.

Batches of an update are of one size, so the mean of their cross-entropies is that of all their items.  Their
numbers of real tokens differ where texts are padded: `token_shares` weighs each regulariser by its own.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpattention.attention.base import mean_over_processes
from gpattention.gp import ItemNoise
from gpattention.models import Transformer
from gpattention.models.dropout import calls_of_items, find_dropouts, hooked, item_masks
from gpattention.models.predict import Inputs, evaluating
from gpattention.runs import Recipe

PhaseName = Literal["kernel", "gp"]
DROPOUT_SEED = 0x5EED  # another stream than the draws of the same step
MASK_STRIDE = 0x5DEECE66D  # between the seeds of neighbouring items; larger than any number of steps


@dataclass(frozen=True)
class Controls:
    """What the schedule says about a step."""

    step: int
    seed: int  # of the step's draws
    learning_rate: float
    alpha: float


@dataclass(frozen=True)
class Schedule:
    """Learning rate, regulariser's weight and phase of every step: optimiser updates, counted from 0.

    Attributes:
        recipe: of the run.
        steps_per_epoch: that its data give.
    """

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


class Objective(nn.Module):
    """A module with one forward pass, so that processes, precision and capture see nothing else."""

    def __init__(self, model: Transformer, recipe: Recipe, phase: PhaseName) -> None:
        super().__init__()
        self.model = model
        self.draw = recipe.phases.draw if phase == "gp" and model.draws else "none"
        self.need = ("logits", "regularizer") if phase == "gp" else ("logits",)
        self.normalised = recipe.regularizer.normalised
        self._dropouts = find_dropouts(model) if recipe.optimizer.keyed_dropout else {}
        self._own: list[bool] | None = None  # which calls of dropout lead with the batch
        self.seeded_dropout: bool | None = None  # whether the step's seed says what drops; None: on a GPU

    def forward(
        self,
        inputs: Inputs,
        labels: Tensor,  # [B]
        items: Tensor,  # [B] numbers of the items, which key their noise
        seed: Tensor,  # [] of the step
        alpha: Tensor,  # []
        share: Tensor | None = None,  # [] of the batch in the update's regulariser; 1 without it
    ) -> tuple[Tensor, Tensor | None]:
        """What is minimised, and the regulariser alone where there is one.  [], []"""
        noise = ItemNoise(seed, items, torch.zeros_like(items)) if self.draw != "none" else None
        own = {"dropout_seed": _mask_seed(seed, items)} if self._seeds_dropout(items.device) else {}
        with self._dropping(inputs, items, seed):
            out = self.model(inputs, draw=self.draw, generator=noise, need=self.need, **own)
        loss = cross_entropy(out.logits.float() if out.logits.dtype.itemsize < 4 else out.logits, labels)
        if out.regularizer is None:
            return loss, None
        regularizer = out.regularizer if self.normalised else self._per_sequence(out.regularizer, inputs)
        if share is not None:
            regularizer = regularizer * share.to(regularizer.dtype)
        return loss + alpha.to(loss.dtype) * regularizer, regularizer.detach()

    def token_shares(self, batches: Sequence[Inputs]) -> Sequence[Tensor | None]:
        """Real tokens of each batch of an update over their mean: what its regulariser counts for.  [] each

        A normalised regulariser is per real token of its batch; weighed so, the mean over the batches is per
        real token of them all, in all processes.  A sequence's sum needs no weight, nor does one batch.
        """
        if len(batches) == 1 or not self.normalised or "regularizer" not in self.need:
            return [None] * len(batches)
        tokens = torch.stack([self.model.real_tokens(inputs).sum() for inputs in batches]).double()
        tokens = mean_over_processes(tokens)
        return (tokens / tokens.mean().clamp_min(1e-9)).unbind()  # no token at all: nothing to weigh

    def train(self, mode: bool = True) -> Self:
        """Dropouts whose masks are keyed to items are done by hooks, not by themselves."""
        super().train(mode)
        for dropout in self._dropouts.values():
            dropout.module.training = False
        return self

    def _seeds_dropout(self, device: torch.device) -> bool:
        """Whether masks come from the seed: a captured step then drops anew at every replay, the same again
        when a run is resumed, and the same whether kernels are fused or not.  The plain reference of such
        masks is slow, so other precisions, which never run fused, keep torch's own.
        """
        if self._dropouts or not self.training:
            return False
        if self.seeded_dropout is not None:
            return self.seeded_dropout
        single = self.model.head.weight.dtype == torch.float32
        return device.type == "cuda" and single and not torch.is_autocast_enabled("cuda")

    def _dropping(self, inputs: Inputs, items: Tensor, seed: Tensor) -> "hooked | nullcontext[None]":  # type: ignore[valid-type]
        if not self._dropouts or not self.training:
            return nullcontext()
        if self._own is None:
            with evaluating(self.model):
                self._own = calls_of_items(self.model, self.model, self._dropouts, inputs)
        noise = ItemNoise(seed, items, torch.full_like(items, DROPOUT_SEED))
        return hooked(self.model, self._dropouts, item_masks(noise, self._own))

    def _per_sequence(self, regularizer: Tensor, inputs: Inputs) -> Tensor:
        """The sum over heads, tokens and dimensions, mean over the batch: the paper's own scale."""
        tokens = self.model.real_tokens(inputs)  # [B]
        whole = mean_over_processes(tokens.sum().float())
        return regularizer * (self.model.config.width * whole / len(tokens))


def _mask_seed(seed: Tensor, items: Tensor) -> Tensor:
    """Another one for every step, and for every batch and process of a step: their items differ.  []"""
    return torch.add(seed, items[0], alpha=MASK_STRIDE)
