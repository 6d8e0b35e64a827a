"""Which items come together: batches that (seed, epoch) decide, whatever the number of ranks."""

import torch
from torch import Tensor

from gpattention.data.keyed import BATCHES, permutation


def batches(
    n: int,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    *,
    shuffle: bool = True,
) -> list[Tensor]:
    """The item indices of every batch of one epoch, each [size] int64, for one rank.

    `batch_size` counts the whole batch of all ranks together; every rank gets the same number of batches
    and a consecutive share of each.  The shares of a batch in the order of ranks make up the same batch for
    every `world_size`.  Shares differ by at most one item; a last batch of fewer items than ranks leaves some
    ranks an empty share, so ranks that average gradients weight by size or set `drop_last`.
    A run is continued in the middle of an epoch with `batches(...)[done:]`.
    """
    if n < 0:
        raise ValueError(f"expected n >= 0, got {n}")
    if world_size < 1:
        raise ValueError(f"expected world_size >= 1, got {world_size}")
    if batch_size < world_size:
        raise ValueError(f"expected batch_size >= world_size, {world_size}, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected rank from 0 to {world_size - 1}, got {rank}")
    order = permutation(n, BATCHES, seed, epoch) if shuffle else torch.arange(n)
    whole = [order[start : start + batch_size] for start in range(0, n, batch_size)]
    if drop_last and whole and len(whole[-1]) < batch_size:
        whole.pop()
    return [batch.tensor_split(world_size)[rank] for batch in whole]
