"""Held-out data in whatever shape it comes: pairs, mappings with labels, or a loader of either."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpattention.models.rows import Inputs, count_items, device_of, take

Data: TypeAlias = Any  # Inputs, (inputs, labels), a mapping with "labels", or an iterable of the last two


@dataclass(frozen=True, eq=False)
class Batch:
    """Items with their labels; `first_item` numbers them through all batches."""

    inputs: Inputs
    labels: Tensor  # [B], [B, N] or [B, D]
    first_item: int

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, items: Tensor) -> "Batch":
        """Some of its items; their numbers start where its own do."""
        device = device_of(self.inputs)
        return Batch(take(self.inputs, items, device), self.labels[items], self.first_item + int(items[0]))


def collect_batches(data: Data, labels: Tensor | None, most: int | None) -> list[Batch]:
    """All batches, at most `most` items of them."""
    pairs: Iterable[Any]
    if labels is not None:
        _check_tensor(labels)
        pairs = [(data, labels)]
    elif _is_pair(data) or (isinstance(data, Mapping) and "labels" in data):
        pairs = [data]
    elif isinstance(data, Mapping | Tensor):
        raise ValueError("expected data with labels to fit to, got inputs alone")
    else:
        pairs = data
    batches: list[Batch] = []
    seen = 0
    for pair in pairs:
        inputs, own = _split(pair)
        _check_tensor(own)
        if len(own) != count_items(inputs):
            raise ValueError(f"expected a label for each of {count_items(inputs)} inputs, got {len(own)}")
        batch = Batch(inputs, own, seen)
        if most is not None and seen + len(batch) > most:
            batch = batch.select(torch.arange(most - seen))
        batches.append(batch)
        seen += len(batch)
        if seen == most:
            break
    if not batches:
        raise ValueError("expected data with at least one batch, got none")
    return batches


def _check_tensor(labels: Any) -> None:
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        found = (
            f"a tensor of shape {tuple(labels.shape)}"
            if isinstance(labels, Tensor)
            else type(labels).__name__
        )
        raise ValueError(f"expected labels to be a tensor with one entry per item, got {found}")


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)


def _split(pair: Any) -> tuple[Inputs, Tensor]:
    if isinstance(pair, Mapping):
        if "labels" not in pair:
            raise ValueError(f"expected mappings with 'labels', got keys {', '.join(map(str, pair))}")
        return {name: x for name, x in pair.items() if name != "labels"}, pair["labels"]
    if not _is_pair(pair):
        raise ValueError(f"expected batches of (inputs, labels), got {type(pair).__name__}")
    return pair[0], pair[1]
