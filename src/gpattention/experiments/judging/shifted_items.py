"""Validation images under shifts that are no corruptions, to fit a temperature on."""

import torch
from torch import Tensor

from gpattention.data.shifts import SEVERITIES, shift, shifts_of
from gpattention.evaluation.items import ItemSet

NAME = "shifted"
ITEMS = 250  # of the validation set, each under every shift at every severity


def shifted_items(validation: ItemSet) -> ItemSet:
    """The first validation images under every shift at every severity, in one set."""
    kept = validation.first(ITEMS)
    images = kept.stored
    if not isinstance(images, Tensor) or kept.labels is None:
        raise ValueError(f"expected images with labels to shift, got {validation.name}")
    shifted = [
        shift(images, name, severity) for name in shifts_of(images.shape[1]) for severity in SEVERITIES
    ]
    return ItemSet(NAME, torch.cat(shifted), kept.labels.repeat(len(shifted)), kept.prepare)
