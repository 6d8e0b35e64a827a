"""How well drawn answers foretell labels: the log-likelihood of every item."""

import math

import torch
from torch import Tensor

from gpattention.adopt.labels import IGNORED, check_token_labels
from gpattention.adopt.reading import Task


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
    if task == "tokens":
        check_token_labels(labels, answers.shape[2])
        answers, labels = answers.flatten(1, 2), labels.flatten()
    labels = labels.long()  # gather takes no other
    known = labels != IGNORED
    log_each = (answers[:, known] / log_temperature.exp()).log_softmax(-1)  # [S, M, C]
    right = labels[known].expand(len(answers), -1)[..., None]  # [S, M, 1]
    return log_each.gather(-1, right)[..., 0].logsumexp(0) - math.log(len(answers))
