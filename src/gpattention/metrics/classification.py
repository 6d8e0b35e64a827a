"""How often, and how much better than by chance, the most probable class is right."""

import math

import torch
from torch import Tensor

from gpattention.metrics.checks import read_items


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The fraction of items whose most probable class is right; of equally probable ones the first counts.

    `probs` are [B, C] and `labels` [B].
    """
    return float(hits(*read_items(probs, labels)).double().mean())


def mcc(probs: Tensor, labels: Tensor) -> float:
    """Matthews' correlation coefficient of labels and most probable classes, for any number of classes.

    Gorodkin's R_K (2004), in [-1, 1]; 0 if all labels, or all predictions, are of one class.  `probs` are
    [B, C] and `labels` [B].
    """
    return mcc_from_confusion(confusion_matrix(*read_items(probs, labels)))


def hits(probs: Tensor, labels: Tensor) -> Tensor:
    """True where the most probable class is right.  [B]"""
    return probs.argmax(-1) == labels


def confusion_matrix(probs: Tensor, labels: Tensor) -> Tensor:
    """How many items of each class (rows) are taken for each (columns).  [C, C] of int64"""
    classes = probs.shape[1]
    pairs = labels * classes + probs.argmax(-1)  # [B]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def mcc_from_confusion(confusion: Tensor) -> float:
    """Gorodkin's R_K of counts [C, C], whose squares are whole numbers and stay exact."""
    real, predicted = confusion.sum(1), confusion.sum(0)  # [C], [C]
    total, right = int(confusion.sum()), int(confusion.trace())
    together = right * total - int((real * predicted).sum())
    spread = (total**2 - int((real * real).sum())) * (total**2 - int((predicted * predicted).sum()))
    return together / math.sqrt(spread) if spread else 0.0
