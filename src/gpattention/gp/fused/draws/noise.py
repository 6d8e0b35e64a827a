"""Item-keyed numbers in one launch; the references are `ItemNoise.normal` and `ItemNoise.uniform`."""

import math

import torch
from torch import Tensor

_SIZE = 1024


def fused_normal(keys: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of the streams from `stream` on, of every key.  [draws, batch, ...]"""
    return _numbers(keys, stream, shape, normal=True)


def fused_uniform(keys: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in (0, 1) of the one stream of every key.  [batch, ...]"""
    return _numbers(keys, stream, (1, *shape), normal=False)[0]


def _numbers(keys: Tensor, stream: int, shape: tuple[int, ...], *, normal: bool) -> Tensor:
    from gpattention.gp.fused.draws.noise_kernels import noise_kernel

    draws, batch, *rest = shape
    count = math.prod(rest)
    out = torch.empty(shape, dtype=torch.float32, device=keys.device)
    if out.numel():
        noise_kernel[(draws * batch * -(-count // _SIZE),)](
            keys, out, stream, batch, count, NORMAL=normal, SIZE=_SIZE, num_warps=4
        )
    return out
