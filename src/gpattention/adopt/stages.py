"""Gradient descent on what is drawn with, shared by all heads, by those of a site, or not at all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gpattention.adopt.batches import Batch
from gpattention.adopt.likelihood import log_likelihood
from gpattention.adopt.running import Runner
from gpattention.adopt.scoring import Scorer
from gpattention.adopt.settings import Settings
from gpattention.models.rows import iterate_rows

if TYPE_CHECKING:
    from gpattention.adopt.fitting import FitOptions

SCALES = (0.03, 0.1, 0.3, 1.0)  # where to start
START_POWERS = (0.05, 0.5)
NOISES = (1e-3, 10.0)  # least and most noise variance
LARGEST_SCALE = 30.0
# a scale of 0 is no bound: there a head draws nothing
BOUNDS = {"scale": (None, LARGEST_SCALE), "noise": NOISES, "power": (0.0, 1.0)}


@dataclass(frozen=True)
class Stage:
    """What is shared: "global" one of each, "sites" one of each per site, "heads" a scale per head too."""

    level: Literal["global", "sites", "heads"]
    title: str | None = None

    def share(self, x: Tensor, *, scale: bool = False) -> Tensor:
        """The free numbers behind [sites, heads], which broadcast back."""
        if self.level == "global":
            return x.mean().reshape(1, 1)
        return x.clone() if self.level == "heads" and scale else x.mean(1, keepdim=True)


class _Parameters:
    """Unconstrained numbers and the settings they make."""

    def __init__(self, settings: Settings, stage: Stage) -> None:
        self._settings = settings
        power = settings.power.clamp(0.02, 0.98)
        self._log_scale = stage.share(settings.scale.clamp_min(1e-4).log(), scale=True).requires_grad_()
        self._log_noise = stage.share(settings.noise.log()).requires_grad_()
        self._logit = stage.share(power.logit()).requires_grad_()
        number = max(settings.residual, 1e-3)
        self.log_temperature = torch.tensor(settings.temperature).log().requires_grad_()
        self.log_residual = torch.tensor(number).log().requires_grad_()

    def all(self) -> list[Tensor]:
        return [self._log_scale, self._log_noise, self._logit, self.log_temperature, self.log_residual]

    def settings(self) -> Settings:
        like = self._settings.scale
        return replace(
            self._settings,
            scale=self._log_scale.exp().clamp_max(LARGEST_SCALE).expand_as(like),
            noise=self._log_noise.exp().clamp(*NOISES).expand_as(like),
            power=self._logit.sigmoid().expand_as(like),
            temperature=float(self.log_temperature.detach().exp()),
            residual=float(self.log_residual.detach().exp()),
        )


def descend(
    runner: Runner,
    settings: Settings,
    batches: list[Batch],
    stage: Stage,
    scorer: Scorer,
    options: "FitOptions",
    tell: Callable[[str, int, int], object],
) -> Settings:
    """Adam on small batches with fresh draws; the numbers of the last half of the steps are averaged."""
    parameters = _Parameters(scorer.finish(settings, scorer.some(batches))[0], stage)
    optimiser = torch.optim.Adam(parameters.all(), lr=options.learning_rate, betas=(0.8, 0.95))
    # a temperature that was not shown to be below 1 is not learnt below 1 either
    coldest = min(0.0, float(parameters.log_temperature.detach()))
    kept: list[list[Tensor]] = []
    for step, batch in enumerate(_endless(batches, options.batch_size, options.seed, options.steps)):
        with torch.enable_grad():
            loss = _loss(runner, parameters, batch, step, options)
            # not backward(), which would leave gradients on the host's weights
            gradients = torch.autograd.grad(loss, parameters.all(), allow_unused=True)
        for own, gradient in zip(parameters.all(), gradients, strict=True):
            own.grad = gradient
        if not options.temperature:
            parameters.log_temperature.grad = None
        optimiser.step()
        parameters.log_temperature.data.clamp_(min=coldest)
        if step >= options.steps // 2:
            kept.append([x.detach().clone() for x in parameters.all()])
        tell(stage.title or stage.level, step + 1, options.steps)
    for own, values in zip(parameters.all(), zip(*kept, strict=True), strict=True):
        own.data = torch.stack(values).mean(0)
    found = parameters.settings()
    return replace(
        found,
        **{name: getattr(found, name).detach().clone() for name in ("scale", "noise", "power")},
        residual=found.residual if scorer.is_regression else 0.0,
    )


def _loss(runner: Runner, parameters: _Parameters, batch: Batch, step: int, options: "FitOptions") -> Tensor:
    device = runner.device(batch.inputs)
    samples = max(2, options.samples // 2)  # gradients need fewer than comparisons
    seed = options.seed + 1 + step  # apart from the seed that candidates are compared with
    (rows,) = iterate_rows(
        batch.inputs,
        samples=samples,
        seed=seed,
        batch_size=len(batch) * samples,
        device=device,
        first_item=batch.first_item,
    )
    answers, _ = runner.draw(rows, parameters.settings(), seed=seed)
    answers = answers.unflatten(0, (-1, samples)).transpose(0, 1)
    assert runner.task is not None
    return -log_likelihood(
        answers,
        batch.labels.to(device),
        runner.task,
        log_temperature=parameters.log_temperature.to(device),
        log_residual=parameters.log_residual.to(device),
    ).mean()


def _endless(batches: list[Batch], size: int, seed: int, steps: int) -> Iterator[Batch]:
    """Small batches in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for place in torch.randperm(len(batches), generator=generator).tolist():
            order = torch.randperm(len(batches[place]), generator=generator)
            for items in order.split(size):
                yield batches[place].select(items)
                done += 1
                if done == steps:
                    return
