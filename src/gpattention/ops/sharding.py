"""Sums over tokens that are spread over processes (section 12): what travels, and how gradients count.

Each process holds some tokens of every sequence; parameters are the same everywhere.  The loss of a run
is the sum of the processes' losses.  `sum_over_shards` adds small matrices up in one all-reduce, and
their cotangents in one more on the way back, so the gradients of a process's own tokens are complete.
A number that all processes share (a log density, a KL) is the whole one everywhere; `counted_once` makes
it count once in that sum.  The gradients of parameters are then partial: `sum_gradients` adds them up.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Traffic:
    """What this process gave to all-reduces.

    Attributes:
        collectives: how many there were.
        payload: the bytes they carried.
    """

    collectives: int = 0
    payload: int = 0


_counting: list[Traffic] = []  # no context variable: backward passes run in threads of their own


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the all-reduces of sharded attention in a block, forward and backward.

    Returns:
        A context manager that gives the count.

    >>> with count_traffic() as traffic:
    ...     posterior = scgp_posterior(*tensors, noise=0.1, group=group)
    >>> traffic.payload
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def check_group(group: "ProcessGroup | None") -> None:
    """Refuse a group that this process does not belong to.

    Args:
        group: a process group; None is no group, which is fine.

    Raises:
        ValueError: it is something else.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"expected group to be a process group that this process is in, got {group!r}")


def sum_over_shards(tensors: Sequence[Tensor], group: "ProcessGroup") -> list[Tensor]:
    """The sums of each tensor over the processes, in one all-reduce; one more in the backward pass.

    Args:
        tensors: of the same shapes on every process; if one runs its backward pass, all must.
        group: the processes.

    Returns:
        The sums, in the shapes of the tensors.
    """
    total: Tensor = _Sum.apply(torch.cat([x.reshape(-1) for x in tensors]), group)  # type: ignore[no-untyped-call]
    parts = total.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


@torch.no_grad()
def sum_in_place(x: Tensor, group: "ProcessGroup | None") -> Tensor:
    """The sum over the processes, written into a contiguous tensor: for those who differentiate by hand."""
    return x if group is None else _all_reduce(x, group)


def counted_once(value: Tensor, group: "ProcessGroup | None") -> Tensor:
    """A value all processes share, whose gradient counts once in the sum of their losses.

    Args:
        value: the same on every process.
        group: the processes; None for one.

    Returns:
        The value.
    """
    if group is None:
        return value
    shared: Tensor = _Share.apply(value, dist.get_world_size(group))  # type: ignore[no-untyped-call]
    return shared


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], group: "ProcessGroup") -> None:
    """Add up the gradients of replicated parameters, in one all-reduce per floating-point type.

    Call it after the backward pass and before the optimiser's step.

    Args:
        parameters: the same on every process; one without a gradient here counts as 0, and gets the others'.
        group: the processes.

    Raises:
        ValueError: this process is not in the group.
    """
    check_group(group)
    learned = [p for p in parameters if p.requires_grad]
    for dtype in sorted({p.dtype for p in learned}, key=str):
        chosen = [p for p in learned if p.dtype == dtype]
        for p in chosen:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [p.grad for p in chosen if p.grad is not None]
        total = _all_reduce(torch.cat([g.reshape(-1) for g in gradients]), group)
        for g, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view(g.shape))


class _Sum(torch.autograd.Function):
    """Sum over processes.  Its adjoint is itself: the loss is the sum of the processes' losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.group = group
        return _all_reduce(x.detach().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0].contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class _Share(torch.autograd.Function):
    """The value itself forward, its gradient divided among the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: int) -> Tensor:
        ctx.shards = shards
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.shards, None


def _all_reduce(x: Tensor, group: "ProcessGroup") -> Tensor:
    """In place; the one door to the network."""
    for traffic in _counting:
        traffic.collectives += 1
        traffic.payload += x.numel() * x.element_size()
    dist.all_reduce(x, group=group)
    return x
