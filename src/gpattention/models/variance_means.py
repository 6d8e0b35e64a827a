"""Variances of layers, averaged over the samples while they run."""

from collections.abc import Sequence

import torch
from torch import Tensor


class VarianceMeans:
    """Sums of what every layer tells about rows, each added to its item, kept on `device`."""

    def __init__(self, items: int, samples: int, device: torch.device) -> None:
        self._items, self._samples, self._device = items, samples, device
        self._sums: list[Tensor | None] = []

    def add(self, items: Tensor, variances: Sequence[Tensor | None]) -> None:
        """Rows [R, ...] of every layer, None for one without a variance, and the items they belong to."""
        if not self._sums:
            self._sums = [None] * len(variances)
        for place, (total, variance) in enumerate(zip(self._sums, variances, strict=True)):
            if variance is None:
                continue
            if len(variance) != len(items):
                raise ValueError(
                    f"expected the variances of {len(items)} rows, got shape {tuple(variance.shape)}: are "
                    "batches the first axis of the inputs?"
                )
            variance = variance.to(self._device, torch.promote_types(variance.dtype, torch.float32))
            if total is None:
                total = self._sums[place] = variance.new_zeros(self._items, *variance.shape[1:])
            total.index_add_(0, items, variance)

    def means(self) -> tuple[Tensor | None, ...]:
        """Per layer [B, ...], None where it never told a variance."""
        return tuple(total if total is None else total / self._samples for total in self._sums)
