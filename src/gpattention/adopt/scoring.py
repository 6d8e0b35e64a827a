"""How settings do on labelled data, with the same noise for all of them."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from gpattention.adopt.batches import Batch
from gpattention.adopt.likelihood import labelled, log_likelihood, residual_curve
from gpattention.adopt.running import Runner
from gpattention.adopt.settings import Settings
from gpattention.models.rows import iterate_rows
from gpattention.models.temperature import TemperatureProfile, least_of, profile_temperature

SOME = 96  # items that coarse comparisons look at
RESIDUALS = (math.exp(-20), math.exp(20))  # least and most residual variance


class Scorer:
    """Draws answers and weighs them against labels."""

    def __init__(self, runner: Runner, samples: int, rows: int, seed: int, temperature: bool) -> None:
        self._runner, self._samples, self._rows, self._seed = runner, samples, rows, seed
        self.tempers = temperature

    @property
    def is_regression(self) -> bool:
        """Whether the model answers with numbers."""
        return self._runner.task == "regression"

    def score(self, settings: Settings, batches: list[Batch]) -> Tensor:
        """log-likelihood of every labelled item or token.  [M]"""
        return self._weigh(self._answers(settings, batches), settings)

    def finish(
        self, settings: Settings, batches: list[Batch], *, tempers: bool = True
    ) -> tuple[Settings, float]:
        """Fit the number that acts on the drawn answers: their temperature, or the residual variance.

        Returns the settings with it and their mean negative log-likelihood.
        """
        answers = self._answers(settings, batches)
        if self.is_regression:
            settings = replace(settings, residual=_residual(answers))
        elif self.tempers and tempers:
            settings = replace(settings, temperature=self._profile(answers).temperature)
        return settings, -float(self._weigh(answers, settings).mean())

    def profile(self, settings: Settings, batches: list[Batch]) -> TemperatureProfile:
        """What the labels say about the temperature of the drawn logits."""
        return self._profile(self._answers(settings, batches))

    def _profile(self, answers: list[tuple[Tensor, Tensor]]) -> TemperatureProfile:
        assert self._runner.task is not None
        logits, labels = zip(*(labelled(a, y, self._runner.task) for a, y in answers), strict=True)
        return profile_temperature(torch.cat(logits, 1), torch.cat(labels))

    def some(self, batches: list[Batch]) -> list[Batch]:
        """The first of them, enough for a coarse look."""
        chosen: list[Batch] = []
        for batch in batches:
            left = SOME - sum(map(len, chosen))
            if left <= 0:
                break
            chosen.append(batch if len(batch) <= left else batch.select(torch.arange(left)))
        return chosen

    def _answers(self, settings: Settings, batches: list[Batch]) -> list[tuple[Tensor, Tensor]]:
        """Answers [S, B, ...] in float64 and labels of every batch."""
        samples = self._samples if settings.any_drawn else 1
        told = []
        with torch.no_grad():
            for batch in batches:
                parts = [
                    self._runner.draw(rows, settings, seed=self._seed)[0]
                    for rows in iterate_rows(
                        batch.inputs, samples=samples, seed=self._seed, batch_size=self._rows,
                        device=self._runner.device(batch.inputs), first_item=batch.first_item,
                    )
                ]  # fmt: skip
                answers = torch.cat(parts).unflatten(0, (-1, samples)).transpose(0, 1).double()
                told.append((answers, batch.labels.to(answers.device)))
        return told

    def _weigh(self, answers: list[tuple[Tensor, Tensor]], settings: Settings) -> Tensor:
        number = settings.residual if self.is_regression else settings.temperature
        log_number = torch.tensor(max(number, 1e-12), dtype=torch.float64).log()
        return _log_likelihoods(answers, self._runner, log_number, regression=self.is_regression)


def _residual(answers: list[tuple[Tensor, Tensor]]) -> float:
    """The residual variance that all batches together ask for."""
    curve = residual_curve(
        torch.cat([a for a, _ in answers], 1), torch.cat([y.reshape(len(y), -1) for _, y in answers])
    )
    grid = torch.linspace(math.log(RESIDUALS[0]), math.log(RESIDUALS[1]), 81, dtype=torch.float64)
    return math.exp(least_of(curve, grid.tolist()))


def _log_likelihoods(
    answers: list[tuple[Tensor, Tensor]], runner: Runner, log_number: Tensor, *, regression: bool
) -> Tensor:
    assert runner.task is not None
    zero = torch.zeros((), dtype=torch.float64)
    options = {
        "log_temperature": zero if regression else log_number,
        "log_residual": log_number if regression else zero,
    }
    return torch.cat([log_likelihood(a, labels, runner.task, **options) for a, labels in answers])
