"""How tensors reach the kernels: as [B, H, ...] with strides, nothing copied that need not be."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

View = tuple[Tensor | int, ...]  # [B, H, N, X] with unit stride along X, [B, H, N] or [B, H], and its strides
Optional = TypeVar("Optional", Tensor, None)

# how each kernel is launched for matrices up to 64 a side, by benchmark on an H200 for the first six, and
# up to 128, a guess
_SMALL = {"num_warps": 2, "num_stages": 1}
_FOUR = {"num_warps": 4, "num_stages": 1}
_EIGHT = {"num_warps": 8, "num_stages": 1}
_LARGE = {"num_warps": 8, "num_stages": 2}
LAUNCHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "roots": ({"num_warps": 4, "num_stages": 2, "maxnreg": 128}, _LARGE),
    "rows": (_SMALL, _LARGE),
    "rows_backward": (_SMALL, _LARGE),
    "inputs_backward": ({"num_warps": 4, "num_stages": 3}, _LARGE),
    "density": (_SMALL, _LARGE),
    "density_backward": (_SMALL, _LARGE),
    "divergence": ({"num_warps": 4, "num_stages": 2, "maxnreg": 128}, _LARGE),
    "divergence_backward": (_SMALL, _LARGE),
    "direct": (_SMALL, _LARGE),
    "direct_backward": ({"num_warps": 4, "num_stages": 3}, _LARGE),
    "attention": (_FOUR | {"BQ": 64, "BK": 32}, _FOUR | {"BQ": 64, "BK": 32}),  # and its tiles
    "keys_backward": (_FOUR | {"BQ": 32, "BK": 64}, _FOUR | {"BQ": 32, "BK": 64}),
    "queries_backward": (_FOUR | {"BQ": 64, "BK": 32}, _FOUR | {"BQ": 64, "BK": 32}),
    "inducing": (_FOUR, _EIGHT),  # of SGPA, as are those to `inducing_backward`; T rows in a tile
    "features": (_SMALL | {"T": 32}, _EIGHT | {"T": 32}),
    "mean": (_FOUR | {"T": 64}, _EIGHT | {"T": 32}),
    "features_backward": (_SMALL | {"T": 32, "num_stages": 2}, _EIGHT | {"T": 32, "num_stages": 2}),
    "turns": (_FOUR, _EIGHT),
    "tokens_backward": (_EIGHT | {"T": 32, "maxnreg": 128}, _EIGHT | {"T": 16}),
    "sums": (_FOUR | {"PLACES": 64}, _FOUR | {"PLACES": 32}),  # packed places of a program
    "inducing_backward": (_FOUR, _EIGHT),
    "amplitude": (_SMALL, _LARGE),
    "amplitude_backward": (_SMALL, _LARGE),
}

SMALLEST = 16  # side of a padded matrix; the kernels' block


def padded(n: int) -> int:
    """The power of two a side of n is padded to."""
    side = SMALLEST
    while side < n:  # sizes without a value are compared: one graph serves all that are padded alike
        side *= 2
    return side


def as_two(lead: Sequence[int]) -> tuple[int, int]:
    """Leading axes as batch and heads: the last one is the heads."""
    return (math.prod(lead[:-1]), lead[-1]) if lead else (1, 1)


def matrices(x: Tensor, lead: Sequence[int]) -> Tensor:
    """[..., N, X] as [B, H, N, X], a view wherever strides allow; as it is where there is nothing to do."""
    if len(lead) == 2 and x.ndim == 4 and x.shape[:-2] == tuple(lead):
        return x
    B, H = as_two(lead)
    return x.expand(*lead, *x.shape[-2:]).reshape(B, H, *x.shape[-2:])


def vectors(x: Tensor | None, lead: Sequence[int]) -> Tensor | None:
    """[..., N] as [B, H, N]; nothing of what is not there."""
    if x is None or (len(lead) == 2 and x.ndim == 3 and x.shape[:-1] == tuple(lead)):
        return x
    return matrices(x[..., None], lead).squeeze(-1)  # whose gradient is a view, a selection's is not


def with_lead(x: Optional, lead: Sequence[int]) -> Optional:
    """[B, H, ...] with the leading axes again that became B and H; nothing of what is not there."""
    return x if x is None or len(lead) == 2 else x.reshape((*lead, *x.shape[2:]))


def scalars(x: Tensor, lead: Sequence[int]) -> View:
    """[..., 1, 1] as [B, H], with its strides; numbers per head, the usual ones, are read as they are."""
    if x.ndim == 3 and x.shape[0] == (lead[-1] if lead else 1):
        return x, 0, x.stride(0)
    found = matrices(x, lead).squeeze(-1).squeeze(-1)
    return found, *found.stride()


def view(x: Tensor | None) -> View | None:
    """A tensor and its strides as kernels take it, without the last one of rows [B, H, N, X], which is 1."""
    if x is None:
        return None
    strides = x.stride()
    if len(strides) < 4:
        return x, *strides
    if strides[3] != 1:
        x = x.contiguous()
        strides = x.stride()
    return x, *strides[:3]


def views(*tensors: Tensor | None) -> list[View | None]:
    """`view` of each, None where there is none."""
    return [view(x) for x in tensors]


def token_major(B: int, H: int, N: int, X: int, like: Tensor) -> Tensor:
    """An empty [B, H, N, X] whose memory is [B, N, H, X], as projections read and write it."""
    strides = N * H * X, X, H * X, 1
    return torch.empty_strided((B, H, N, X), strides, dtype=torch.float32, device=like.device)


def allocator(like: Tensor) -> Callable[..., Tensor]:
    """Makes empty float32 tensors of a shape where `like` lives."""
    return partial(torch.empty, dtype=torch.float32, device=like.device)


_ALIGNED = 32  # numbers; each array begins at a multiple

Room = dict[str, Tensor]  # arrays by name, flat, one behind the other in one tensor


class Arrays:
    """Flat float32 arrays by name, one behind the other.

    Args:
        sizes: of each, in numbers.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.names = tuple(sizes)
        self.sizes = [n + -n % _ALIGNED for n in sizes.values()]
        self.whole = sum(self.sizes)


def room(like: Tensor, arrays: Arrays) -> tuple[Tensor, Room]:
    """Memory for arrays: all of it, and each of them.

    One allocation takes the time of one, and a compiler that hands it on handles one tensor.
    """
    whole = torch.empty(arrays.whole, dtype=torch.float32, device=like.device)
    return whole, rooms(whole, arrays)


def rooms(whole: Tensor, arrays: Arrays) -> Room:
    """The arrays in what `room` made."""
    return dict(zip(arrays.names, whole.split_with_sizes(arrays.sizes), strict=True))


def launch(kernel: str, side: int) -> dict[str, int]:
    """Launch options of a kernel for padded matrices of that side."""
    return LAUNCHES[kernel][side > 64]
