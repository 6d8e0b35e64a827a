"""The norm of all gradients together, and clipping."""

from collections.abc import Iterable

from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """The norm before clipping, which is done only where there is a limit.  []"""
    owners = [p for p in parameters if p.grad is not None]
    if limit is not None:
        return nn.utils.clip_grad_norm_(owners, limit)
    return nn.utils.get_total_norm([p.grad for p in owners if p.grad is not None])


def is_broken(*values: Tensor) -> Tensor:
    """1 where any of these single numbers, or their sum, is not finite, else 0.  []

    In few launches: 0 times a number is 0 unless it is infinite or NaN.
    """
    total = values[0].detach().float()
    for value in values[1:]:
        total = total + value.detach()
    return (total * 0 != 0).float()
