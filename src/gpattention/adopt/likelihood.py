"""How well drawn answers foretell labels: the log-likelihood of every item."""

import math

import torch
from torch import Tensor

from gpattention.adopt.labels import IGNORED, check_token_labels
from gpattention.adopt.reading import Task
from gpattention.models.temperature import Curve, label_log_likelihoods


def log_likelihood(
    answers: Tensor,  # [S, B, C], [S, B, N, C] or [S, B, D]
    labels: Tensor,  # [B], [B, N] or [B, D]
    task: Task,
    *,
    log_temperature: Tensor,
    log_residual: Tensor,
) -> Tensor:
    """log of the sample-averaged probability of every labelled item or token, or of the values.  [M]"""
    if task == "regression":
        targets = labels.to(answers.dtype).reshape(answers.shape[1:])  # [B, D]
        spread = answers.var(0) if len(answers) > 1 else torch.zeros_like(answers[0])
        variance = spread + log_residual.exp()
        error = (targets - answers.mean(0)).square()
        return -0.5 * (error / variance + variance.log() + math.log(2 * math.pi)).sum(-1)
    return label_log_likelihoods(*labelled(answers, labels, task), log_temperature)


def labelled(answers: Tensor, labels: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Logits [S, M, C] and classes [M] of the items or tokens that have a label."""
    if task == "tokens":
        check_token_labels(labels, answers.shape[2])
        answers, labels = answers.flatten(1, 2), labels.flatten()
    labels = labels.long()  # gather takes no other
    known = labels != IGNORED
    return answers[:, known], labels[known]


def residual_curve(answers: Tensor, targets: Tensor) -> Curve:
    """Mean negative log-likelihood of values, and its slope, over the logarithm of the residual variance."""
    spread = answers.var(0) if len(answers) > 1 else torch.zeros_like(answers[0])  # [B, D]
    error = (targets.to(answers.dtype).reshape(answers.shape[1:]) - answers.mean(0)).square()

    def curve(log_residual: float) -> tuple[float, float]:
        residual = math.exp(log_residual)
        variance = spread + residual
        each = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi))  # [B, D]
        slope = 0.5 * (1 - error / variance) * residual / variance  # [B, D]
        return float(each.sum(-1).mean()), float(slope.sum(-1).mean())

    return curve
