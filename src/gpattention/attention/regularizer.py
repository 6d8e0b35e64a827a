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


def real_tokens(padding: Tensor | None, tokens: Tensor) -> Tensor | int:
    """How many of [B, N, E] are real under a padding mask [B, N] (True = ignore); a number without one."""
    if padding is None:
        return tokens.shape[0] * tokens.shape[1]
    return (~padding).sum().float()


def normalised(total: Tensor, tokens: Tensor | int, *, head_dim: int, training: bool) -> Tensor:
    """`total` [B, H] per sequence and head, as one number.  []"""
    if training and _processes() > 1:
        if not isinstance(tokens, Tensor):  # other processes may have another number
            tokens = torch.full((), float(tokens), device=total.device)  # made there: graphs allow no copies
        tokens = mean_over_processes(tokens)
    count = tokens.clamp_min(1) if isinstance(tokens, Tensor) else max(tokens, 1)
    return total.sum() / (total.shape[-1] * head_dim * count)


def mean_over_processes(count: Tensor) -> Tensor:
    """The mean of a count over the processes of a run; itself in a single one.  []"""
    if _processes() == 1:
        return count
    count = count.clone()
    dist.all_reduce(count)
    return count / dist.get_world_size()


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
