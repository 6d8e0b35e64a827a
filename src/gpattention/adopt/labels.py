"""Labels to fit to, held against what the model answers before anything is fitted."""

import torch
from torch import Tensor

from gpattention.adopt.reading import Task

IGNORED = -100  # label of tokens that count for nothing, as transformers has it


def check_labels(labels: Tensor, answer: tuple[int, ...], task: Task) -> None:
    """Of one batch; `answer` is the shape of what the model says to one item: [C], [N, C] or [D]."""
    if task == "regression":
        _check_targets(labels, answer[-1])
        return
    axes = "[B, N], a class for every token" if task == "tokens" else "[B], a class for every item"
    if labels.ndim != (2 if task == "tokens" else 1):
        raise ValueError(
            f"expected labels of shape {axes}, for a model that answers {list(answer)} to an item, "
            f"got shape {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"expected labels to be whole numbers, the index of a class each, got {labels.dtype}"
        )
    labels = labels.long()  # IGNORED is no number of an unsigned type
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= answer[-1]))]
    if len(wrong) > 0:
        raise ValueError(
            f"expected labels from 0 to {answer[-1] - 1}, or {IGNORED} for what does not count, "
            f"got {int(wrong[0])}"
        )


def check_token_labels(labels: Tensor, tokens: int) -> None:
    """As many per item as the model has answers, which batches of other lengths may not share."""
    if labels.shape[1] != tokens:
        raise ValueError(f"expected labels of {tokens} tokens like the answers, got {labels.shape[1]}")


def _check_targets(labels: Tensor, width: int) -> None:
    fits = labels.shape[1:] == (width,) or (labels.ndim == 1 and width == 1)
    if not fits:
        one = "[B] or [B, 1]" if width == 1 else f"[B, {width}]"
        raise ValueError(
            f"expected labels of shape {one}, the values of every item, got {tuple(labels.shape)}"
        )
    if not bool(labels.isfinite().all()):
        bad = int((~labels.isfinite()).sum())
        raise ValueError(f"expected labels to be finite numbers, got {bad} that are not")
