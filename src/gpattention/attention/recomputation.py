"""Projections that are computed a second time in the backward pass instead of being kept for it.

Queries, keys, latent inputs and values are four times as large as the tokens they come from, which are kept
anyway, and one product makes them all.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gpattention.attention.projections import project_again, was_projected_together

_View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset


@contextmanager
def recomputed(made: Mapping[str, Tensor]) -> Iterator[None]:
    """Operations in this block keep, of projections made together, only how to make them again.

    `made` is what `projections.projected_together` gave; of anything else nothing changes.
    """
    first = next(iter(made.values()), None)
    if first is None or not was_projected_together(first):
        yield
        return
    again = _Again(first)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        yield


class _Again:
    """Makes the projections once for all views of them that one backward pass asks for."""

    def __init__(self, made: Tensor) -> None:
        self._node, self._place = made.grad_fn, made.untyped_storage().data_ptr()
        self._kept, self._asked = 0, 0
        self._made: Tensor | None = None

    def pack(self, x: Tensor) -> "Tensor | tuple[_Again, _View]":
        if x.untyped_storage().data_ptr() != self._place:
            return x
        self._kept += 1
        return self, (x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: "Tensor | tuple[_Again, _View]") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._made is None:
            self._made = project_again(self._node)
        view = self._made.as_strided(*packed[1])
        self._asked += 1
        if self._asked == self._kept:  # the last of them: nothing is held beyond
            self._asked, self._made = 0, None
        return view
