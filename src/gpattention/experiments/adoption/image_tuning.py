"""Tune a trained vision transformer on, as it is or converted: further epochs on its own training images."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch
from torch import nn

from gpattention.adopt.convert import conversion_of
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.predictor import ModelPredictor
from gpattention.experiments.adoption.finetuning import Finetuning, parameter_groups, rate_share
from gpattention.gp import NumericalError, check_health, deferred_checks
from gpattention.metrics import accuracy, nll
from gpattention.models import Transformer
from gpattention.training import Recipe, TrainingData
from gpattention.training.feeding import Feed
from gpattention.training.objective import Objective
from gpattention.training.schedule import Schedule


@dataclass(frozen=True)
class ImageEpoch:
    """What an epoch came to; validation without draws."""

    epoch: int
    loss: float
    validation_accuracy: float
    validation_nll: float


def tune_on(
    model: Transformer,
    recipe: Recipe,
    data: TrainingData,
    validation: ItemSet,
    settings: Finetuning,
    *,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> list[dict[str, float]]:
    """In place; the weights are those after the last step, whatever validation says on the way.

    Images come as in the run's own training, in the orders (and crops) of the epochs after its last.  The
    run's seed decides them, dropout and the draws of a converted model.
    """
    converted = conversion_of(model) is not None
    recipe = replace(
        recipe,
        optimizer=replace(recipe.optimizer, batch_size=settings.batch_size, accumulate=1),
        phases=replace(recipe.phases, draw="independent"),
        regularizer=replace(recipe.regularizer, normalised=True),
    )
    feed = Feed(recipe, data, device, torch.float32)
    objective = Objective(model, recipe, "gp" if converted else "kernel")
    optimiser = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.learning_rate, fused=True)
    schedule = Schedule(recipe, feed.steps_per_epoch)
    first, total = schedule.total_steps, settings.epochs * feed.steps_per_epoch
    alpha = torch.tensor(settings.regularizer, device=device)
    rows, losses = [], []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        for done, (batch,) in enumerate(islice(feed.updates(first), total), 1):
            objective.train()
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * rate_share(done, total, settings.warmup)
            optimiser.zero_grad()
            seed = torch.tensor(schedule.controls(first + done - 1).seed, device=device)
            with deferred_checks() if device.type == "cuda" else nullcontext():
                loss, _ = objective(batch.inputs, batch.labels, batch.items, seed, alpha)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimiser.step()
            losses.append(loss.detach())
            if progress is not None:
                progress(done, total)
            if done % feed.steps_per_epoch == 0:
                epoch = recipe.epochs + done // feed.steps_per_epoch
                rows.append(asdict(_validated(model, validation, epoch, losses, device)))
                losses = []
    model.eval()
    return rows


def _validated(
    model: Transformer, validation: ItemSet, epoch: int, losses: list[torch.Tensor], device: torch.device
) -> ImageEpoch:
    if device.type == "cuda":
        check_health()
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise NumericalError(f"the loss of epoch {epoch} is {mean}: try a lower learning rate")
    raw = predict_items(ModelPredictor(model, draw="none"), validation, samples=0, seed=0, device=device)
    told = Predicted.from_logits(raw.logits, raw.labels)
    probs = told.prediction.probs
    return ImageEpoch(epoch, mean, accuracy(probs, told.known_labels), nll(probs, told.known_labels))
