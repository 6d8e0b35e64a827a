"""How settings do on labelled data, with the same noise for all of them."""

from dataclasses import replace

import torch
from torch import Tensor

from gpattention.adopt.batches import Batch
from gpattention.adopt.likelihood import log_likelihood
from gpattention.adopt.running import Runner
from gpattention.adopt.settings import Settings
from gpattention.models.rows import iterate_rows

SOME = 96  # items that coarse comparisons look at
_LIMIT = 5.0  # of |log temperature|


class Scorer:
    """Draws answers and weighs them against labels."""

    def __init__(self, runner: Runner, samples: int, rows: int, seed: int, temperature: bool) -> None:
        self._runner, self._samples, self._rows, self._seed = runner, samples, rows, seed
        self._tempers = temperature

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
        if not self.is_regression and not (self._tempers and tempers):
            return settings, -float(self._weigh(answers, settings).mean())
        log_number = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([log_number], max_iter=60, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = -_log_likelihoods(answers, self._runner, log_number, regression=self.is_regression).mean()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        number = float(log_number.detach().clamp(-4 * _LIMIT, 4 * _LIMIT).exp())
        if self.is_regression:
            settings = replace(settings, residual=number)
        else:
            settings = replace(settings, temperature=min(max(number, 1e-2), 1e2))
        return settings, -float(self._weigh(answers, settings).mean())

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
