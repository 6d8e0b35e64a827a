"""One normalisation for every regulariser: per head, real token and head dimension.

sum over batch and heads of (negative log density or KL) / (heads * real tokens in the batch * width)

Under data parallelism gradients are averaged over processes, so the local sum is divided by the *mean*
number of real tokens per process: the average of the processes' values is then the value of the whole
batch, however unevenly the tokens are spread.

Where the processes share the tokens of each sequence (`SCGPAttention.shard_tokens`) they stand for one: sum
and count are those of all tokens already, and every process has the value of the whole batch.
"""

import torch
from torch import Tensor
from torch import distributed as dist


def real_tokens(padding: Tensor | None, tokens: Tensor) -> Tensor:
    """How many tokens [B, N, E] are real under a padding mask [B, N] (True = ignore).  []"""
    if padding is None:
        count = float(tokens.shape[0] * tokens.shape[1])
        return torch.full((), count, device=tokens.device)  # made there: CUDA graphs allow no copies
    return (~padding).sum().float()


def normalised(total: Tensor, tokens: Tensor, *, head_dim: int, training: bool) -> Tensor:
    """`total` [B, H] per sequence and head, as one number.  []"""
    if training:
        tokens = mean_over_processes(tokens)
    return total.sum() / (total.shape[-1] * tokens.clamp_min(1) * head_dim)


def mean_over_processes(count: Tensor) -> Tensor:
    """The mean of a count over the processes of a run; itself in a single one.  []"""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return count
    count = count.clone()
    dist.all_reduce(count)
    return count / dist.get_world_size()
