"""Item-keyed standard normal numbers in one launch; the reference is `ItemNoise.normal`."""

import math

import torch
from torch import Tensor

_SIZE = 1024


def fused_normal(keys: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers of the streams `stream`, `stream` + 1, ... of every key.  [draws, batch, ...]"""
    from gpattention.gp.fused.draws.noise_kernels import normal_kernel

    draws, batch, *rest = shape
    count = math.prod(rest)
    out = torch.empty(shape, dtype=torch.float32, device=keys.device)
    if out.numel():
        normal_kernel[(draws * batch * -(-count // _SIZE),)](
            keys, out, stream, batch, count, SIZE=_SIZE, num_warps=4
        )
    return out
