"""Records of tensors that have a place for every item: taken apart and joined in one way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad


class Items:
    """Base of frozen dataclasses whose tensors, alone or in tuples, lead with the items.

    Indexing with a slice, a mask or item numbers gives the record of those items, a single number that of
    one item.
    """

    _axes: ClassVar[Mapping[str, int]] = {}  # of the items, in the fields that do not lead with them
    _padded: ClassVar[tuple[str, ...]] = ()  # fields with an axis of tokens, which follows that of the items

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Self:
        where = places_of(index, len(self))

        def part(x: Tensor, axis: int) -> Tensor:
            place = where.to(x.device) if isinstance(where, Tensor) else where
            return x[:, place] if axis else x[place]

        return self._changed(part)

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return self._changed(lambda x, _: x.to(device))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The items of all parts, in order; the parts agree in everything but their items.

        What is said of tokens is padded to the longest part.
        """
        if not parts:
            raise ValueError(f"expected at least one {cls.__name__}, got none")
        return cls(**{name: cls._joined(name, [vars(p)[name] for p in parts]) for name in vars(parts[0])})

    @classmethod
    def _joined(cls, name: str, found: Sequence[Any]) -> Any:
        """One field of all parts."""
        first, axis = found[0], cls._axes.get(name, 0)
        forms = {(type(x), len(x) if isinstance(x, tuple) else None) for x in found}
        plain = not isinstance(first, bool | tuple | Tensor)
        if len(forms) > 1 or (plain and any(x != first for x in found)):
            raise ValueError(f"expected parts with the same {name}, got {[str(x)[:40] for x in found]}")
        if isinstance(first, bool):  # of draws: all of them are
            return all(found)
        if isinstance(first, tuple):
            return tuple(cls._joined(name, each) for each in zip(*found, strict=True))
        if plain:
            return first
        if name in cls._padded:
            longest = max(x.shape[1] for x in found)
            found = [pad(x, (0,) * (2 * x.ndim - 3) + (longest - x.shape[1],)) for x in found]
        sizes = sorted({(*x.shape[:axis], *x.shape[axis + 1 :]) for x in found})
        if len(sizes) > 1:
            raise ValueError(f"expected parts of {name} of one size, but for the items, got {sizes}")
        return torch.cat(list(found), axis)

    def _changed(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """`change` of every tensor and the axis of its items."""

        def of(x: Any, axis: int) -> Any:
            if isinstance(x, tuple):
                return tuple(of(each, axis) for each in x)
            return change(x, axis) if isinstance(x, Tensor) else x

        return replace(self, **{n: of(x, self._axes.get(n, 0)) for n, x in vars(self).items()})  # type: ignore[type-var]


def places_of(index: int | slice | Tensor | Sequence[int], items: int) -> slice | Tensor:
    """Item numbers [n], a slice, or a mask [B], told from numbers by its type alone: True is no item 1."""
    if isinstance(index, slice):
        return index
    if isinstance(index, int):
        if not -items <= index < items:
            raise IndexError(f"expected an item below {items}, got {index}")
        return slice(index, index + 1 or None)
    where = torch.as_tensor(index)
    if where.ndim == 1 and len(where) == 0 and not isinstance(index, Tensor):
        where = where.long()  # an empty list has no type of its own
    mask = where.dtype == torch.bool
    if where.is_floating_point() or where.ndim > 1 or (mask and where.shape != (items,)):
        got = f"shape {tuple(where.shape)} and {where.dtype}"
        raise IndexError(f"expected item numbers or a mask of {items} items, got {got}")
    # a lone number gives a prediction of one item; torch would read bytes as a mask
    return where if mask else where.reshape(-1).long()
