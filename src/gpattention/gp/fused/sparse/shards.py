"""The backward pass of the sparse model's kernels where other processes hold other tokens (section 12).

One all-reduce brings the sums over the queries of all processes.  The objectives' cotangents would have to be
summed before that, because gradients of queries need them: instead every process takes its own times the
number of processes, and squares that travel with the sums tell whether they were the same.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from gpattention.gp.fused.sparse.launch import Options
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.sharding import sum_in_place

TOLERANCE = 1e-4  # of the squares: cotangents a hundredth apart are told


@dataclass(frozen=True)
class Shards:
    """Of one backward pass."""

    options: Options
    count: int  # of processes
    own: Tensor  # [3, B, H] this process's cotangents of query, key and KL

    @classmethod
    def of(cls, options: Options, *grads: Tensor | None, like: Tensor) -> Self:
        """A process without a gradient counts as one with 0."""
        nothing = like.new_zeros(like.shape[:2])
        own = torch.stack([nothing if grad is None else grad.to(nothing) for grad in grads])
        return cls(options, dist.get_world_size(options.group), own)

    @property
    def cotangents(self) -> list[Tensor | None]:
        """Of the sum of all processes' losses, for the objectives that were computed.  [B, H] each"""
        asked = (self.options.density, self.options.density, self.options.kl)
        return [self.count * own if wanted else None for own, wanted in zip(self.own, asked, strict=True)]

    def summed(self, rows: Tensor) -> Tensor:
        """[S, X] over the processes, in one all-reduce with what tells whether all had the same cotangents.

        Where they had not, an error says so, or, with deferred checks, gradients of keys and parameters are
        NaN.
        """
        sent = torch.cat([rows.flatten(), self.own.flatten(), self.own.square().flatten()])
        total, ones, squares = sum_in_place(sent, self.options.group).split(
            [rows.numel(), self.own.numel(), self.own.numel()]
        )
        differ = (self.count * squares - ones.square() > TOLERANCE * self.count * squares).any()
        if checks_are_deferred():
            total = torch.where(differ, torch.nan, total)
        elif bool(differ):
            raise ValueError(
                "expected the gradient of a regulariser to be the same on every process of a group, got "
                "others: add it to every process's loss with the same weight, or switch the fused kernels off"
            )
        return total.view(rows.shape)
