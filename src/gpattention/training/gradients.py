"""The norm of all gradients together, and clipping."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """The norm before clipping, which is done only where there is a limit.  []"""
    owners = [p for p in parameters if p.grad is not None]
    if limit is not None:
        return nn.utils.clip_grad_norm_(owners, limit)
    return nn.utils.get_total_norm([p.grad for p in owners if p.grad is not None])


def is_finite(*values: Tensor) -> Tensor:
    """Whether all of these single numbers are finite.  []"""
    return torch.stack([value.detach().float().isfinite() for value in values]).all()
