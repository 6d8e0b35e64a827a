"""Sets of items to be predicted: as they are stored, and what turns them into a model's inputs.

A test set under 19 corruptions of 5 severities is a million images: they stay 8-bit, and only the chunk
that is predicted next is normalised.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpattention.models.rows import Inputs, count_items, device_of, take


def as_they_are(stored: Inputs) -> Inputs:
    """Of items that are a model's inputs already."""
    return stored


@dataclass(frozen=True, eq=False)
class ItemSet:
    """n items of one kind under the name that their records will have."""

    name: str  # validation, test, ood/NAME, corrupted/TYPE/SEVERITY
    stored: Inputs  # such as 8-bit images [n, C, H, W], or the tensors of encoded sentences, [n, ...] each
    labels: Tensor | None = None  # [n] int64; None where items belong to no class
    prepare: Callable[[Inputs], Inputs] = as_they_are  # some stored items to inputs, on their device
    words: tuple[tuple[str, ...], ...] | None = None  # of sentences, for people and other encoders

    def __post_init__(self) -> None:
        count = count_items(self.stored)
        for what, many in (("labels", self.labels), ("words", self.words)):
            if many is not None and len(many) != count:
                raise ValueError(f"expected {what} of {count} items in {self.name}, got {len(many)}")

    def __len__(self) -> int:
        return count_items(self.stored)

    def chunks(self, size: int, device: torch.device) -> Iterator[tuple[int, Inputs]]:
        """Number of the first item, and model inputs on `device`, of at most `size` items in a row."""
        for start in range(0, len(self), size):
            yield start, self.inputs(start, start + size, device)

    def inputs(self, start: int, end: int, device: torch.device) -> Inputs:
        """Model inputs of the items from `start` up to `end`."""
        if isinstance(self.stored, Tensor):
            return self.prepare(self.stored[start:end].to(device))
        return self.prepare({name: x[start:end].to(device) for name, x in self.stored.items()})

    def select(self, items: Tensor) -> "ItemSet":
        """These items of it, in that order."""
        return replace(
            self,
            stored=take(self.stored, items, device_of(self.stored)),
            labels=None if self.labels is None else self.labels[items.to(self.labels.device)],
            words=None if self.words is None else tuple(self.words[i] for i in items.tolist()),
        )

    def first(self, count: int | None) -> "ItemSet":
        """The first so many, or all."""
        if count is None or count >= len(self):
            return self
        return self.select(torch.arange(count))

    def spread(self, count: int | None) -> "ItemSet":
        """So many, evenly spread over all of them, or all: item i n / count, rounded down, for i = 0, 1, ...

        For sets in some order, such as a folder that holds one class after the other.
        """
        if count is None or count >= len(self):
            return self
        return self.select(torch.arange(count) * len(self) // count)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything a prediction depends on but the model: items, labels, preparation."""
        total = hashlib.sha256()
        named = {"items": self.stored} if isinstance(self.stored, Tensor) else dict(self.stored)
        if self.labels is not None:
            named["labels"] = self.labels
        prepared = self.inputs(0, 1, torch.device("cpu"))  # tells other moments of normalisation
        first = {"first": prepared} if isinstance(prepared, Tensor) else dict(prepared)
        for name, x in (*sorted(named.items()), *sorted(first.items())):
            total.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
            total.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


def row_digests(stored: Inputs) -> list[bytes]:
    """A fingerprint of every item by itself, to find it in another set.  n of 16 bytes"""
    tensors = [stored] if isinstance(stored, Tensor) else [x for _, x in sorted(stored.items())]
    rows = [x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() for x in tensors]
    return [
        hashlib.blake2b(b"".join(part[i].tobytes() for part in rows), digest_size=16).digest()
        for i in range(len(rows[0]))
    ]
