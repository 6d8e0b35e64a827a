"""Argument checks of the metrics: every error names the argument, its value and what was expected."""

import torch
from torch import Tensor


def read_items(probs: Tensor, labels: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    """The probabilities [B, C] and the labels [B] as int64 beside them, once both are found good."""
    check_probs(probs, least=least)
    check_labels(labels, *probs.shape)
    return probs.detach(), labels.to(probs.device, torch.int64)


def check_probs(probs: Tensor, *, least: int = 1) -> None:
    """Probabilities of classes that add up to 1, for at least so many items.  [B, C]"""
    _check_tensor("probs", probs)
    if probs.ndim != 2 or not probs.is_floating_point() or probs.shape[1] == 0:
        raise ValueError(
            f"expected probs to be floating-point [items, classes], "
            f"got shape {tuple(probs.shape)} and {probs.dtype}"
        )
    if len(probs) < least:
        raise ValueError(f"expected probs of at least {least} items, got {len(probs)}")
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps)  # bfloat16 rounds more coarsely
    sums = probs.detach().sum(-1, dtype=torch.float64)  # [B]
    good = (probs >= 0).all(-1) & ((sums - 1).abs() < tolerance)  # NaN is not good
    if not bool(good.all()):
        worst = int((~good).nonzero()[0])
        told = [round(p, 4) for p in probs[worst].tolist()[:8]]
        raise ValueError(f"expected probs >= 0 that add up to 1, got {told} for item {worst}")


def check_labels(labels: Tensor, items: int, classes: int) -> None:
    """One class number for every item.  [B]"""
    _check_tensor("labels", labels)
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != (items,) or not whole:
        raise ValueError(
            f"expected labels to be whole numbers of shape [{items}], one per item, "
            f"got shape {tuple(labels.shape)} and {labels.dtype}"
        )
    wrong = (labels < 0) | (labels >= classes)
    if bool(wrong.any()):
        raise ValueError(f"expected labels from 0 to {classes - 1}, got {int(labels[wrong][0])}")


def read_scores(name: str, scores: Tensor, *, least: int = 1) -> Tensor:
    """Scores in float64, without NaN; infinite ones have a rank like any other.  [B]"""
    _check_tensor(name, scores)
    if scores.ndim != 1 or not scores.is_floating_point():
        raise ValueError(
            f"expected {name} to be floating-point [items], "
            f"got shape {tuple(scores.shape)} and {scores.dtype}"
        )
    if len(scores) < least:
        raise ValueError(f"expected {name} of at least {least} items, got {len(scores)}")
    lost = int(scores.isnan().sum())
    if lost:
        raise ValueError(f"expected {name} that can be ranked, got {lost} NaN of {len(scores)}")
    return scores.detach().double()


def check_fraction(name: str, value: float, *, one: bool = False) -> None:
    """Inside (0, 1), or in (0, 1] if `one`."""
    if not 0 < value < 1 and not (one and value == 1):
        raise ValueError(f"expected {name} in (0, 1{']' if one else ')'}, got {value}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of the names."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")


def _check_tensor(name: str, value: object) -> None:
    """Arrays of NumPy and lists are what predictions of other tools come in."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"expected {name} to be a tensor, got {type(value).__name__}: torch.as_tensor makes one of it"
        )
