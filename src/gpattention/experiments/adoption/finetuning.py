"""Fine-tune all weights of a classifier of sentences: AdamW, a short warm-up, then down to 0 in a line."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gpattention.adopt.convert import conversion_of
from gpattention.adopt.regularizer import regularizer
from gpattention.checks import check_count
from gpattention.evaluation.predicted import Predicted
from gpattention.experiments.adoption.predictors import Answering, predict_sentences
from gpattention.experiments.adoption.sentences import Sentences
from gpattention.gp import NumericalError
from gpattention.metrics import mcc, nll


@dataclass(frozen=True)
class Finetuning:
    """How long and how fast.

    Args:
        epochs: passes over the training part.
        learning_rate: the highest, after the warm-up.
        batch_size: sentences of a step.
        weight_decay: of matrices; vectors have none.
        warmup: fraction of the steps in which the learning rate rises.
        clip: largest norm of a gradient.
        regularizer: weight of the regulariser of a converted model.
    """

    epochs: int = 3
    learning_rate: float = 2e-4
    batch_size: int = 32
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 1.0
    regularizer: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", check_count("epochs", self.epochs, least=1))
        object.__setattr__(self, "batch_size", check_count("batch_size", self.batch_size, least=1))
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("weight_decay", "regularizer"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected warmup in [0, 1), got {self.warmup}")


@dataclass(frozen=True)
class EpochRow:
    """What an epoch came to; validation without draws."""

    epoch: int
    loss: float
    validation_mcc: float
    validation_nll: float


def finetune(
    model: nn.Module,
    train: Sentences,
    validation: Sentences,
    settings: Finetuning,
    *,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
    epochs_before: int = 0,
) -> list[EpochRow]:
    """In place; the weights are those after the last step, whatever validation says on the way.

    The seed decides the order of sentences, dropout and the draws of a converted model.  What has seen
    `epochs_before` already goes on with the orders that come after those.
    """
    optimiser = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.learning_rate, fused=True)
    total = settings.epochs * math.ceil(len(train) / settings.batch_size)
    rows, step = [], 0
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for epoch in range(epochs_before, epochs_before + settings.epochs):
            model.train()
            losses = []
            for inputs, labels in train.shuffled(settings.batch_size, seed=seed, epoch=epoch, device=device):
                step += 1
                rate = settings.learning_rate * rate_share(step, total, settings.warmup)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                optimiser.zero_grad()
                loss = cross_entropy(Answering.logits_of(model(**inputs)), labels)
                losses.append(loss.detach())
                if conversion_of(model) is not None and settings.regularizer > 0:
                    loss = loss + settings.regularizer * regularizer(model)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimiser.step()
                if progress is not None:
                    progress(step, total)
            mean = float(torch.stack(losses).mean())
            if not math.isfinite(mean):
                raise NumericalError(f"the loss of epoch {epoch + 1} is {mean}: try a lower learning rate")
            rows.append(_validated(model, validation, epoch + 1, mean, device))
    model.eval()
    return rows


def parameter_groups(model: nn.Module, settings: Finetuning) -> list[dict[str, object]]:
    """For an optimiser: vectors do not decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def rate_share(step: int, total: int, warmup: float) -> float:
    """Of the highest learning rate: up in a line, then down to 0 after the last step."""
    rising = warmup * total
    return step / rising if step < rising else (total + 1 - step) / (total + 1 - rising)


def _validated(
    model: nn.Module, validation: Sentences, epoch: int, loss: float, device: torch.device
) -> EpochRow:
    logits = predict_sentences(Answering.predictor(model), validation, samples=0, seed=0, device=device)
    told = Predicted.from_logits(logits, validation.labels)
    probs = told.prediction.probs
    return EpochRow(epoch, loss, mcc(probs, told.known_labels), nll(probs, told.known_labels))
