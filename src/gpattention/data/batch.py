"""What a training step gets: items, their inputs and their labels."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Some items of a part of a dataset."""

    items: Tensor  # [B] int64, each item's index in its part: keys noise and augmentation
    inputs: Tensor | Mapping[str, Tensor]  # [B, ...]
    labels: Tensor  # [B] int64

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same on another device."""
        if isinstance(self.inputs, Tensor):
            inputs: Tensor | Mapping[str, Tensor] = self.inputs.to(device, non_blocking=non_blocking)
        else:
            inputs = {name: x.to(device, non_blocking=non_blocking) for name, x in self.inputs.items()}
        return Batch(
            self.items.to(device, non_blocking=non_blocking),
            inputs,
            self.labels.to(device, non_blocking=non_blocking),
        )


class Part(Protocol):
    """Items that can be taken by batches: `Images` and `Texts`."""

    def __len__(self) -> int: ...

    def batch(self, items: Tensor) -> Batch:
        """Those items, on the device where the part lies."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        ...


def check_labels(labels: Tensor, n: int) -> None:
    """One int64 label for each of n items."""
    if labels.dtype != torch.int64 or labels.shape != (n,):
        raise ValueError(
            f"expected labels to be int64 of shape [{n}], one per item, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that the tensors take."""
    return sum(x.numel() * x.element_size() for x in tensors.values())
