"""Fused Triton kernels, each op beside its slow reference in plain torch operations.

    switch           when kernels run, and why not
    layout           strides, padding, launch options
    tiles            Triton functions that several ops share
    noise            item-keyed random numbers
    sharding         sums over tokens that are spread over processes
    exact            the exact CGP and the direct model: moments, densities, divergences, amplitudes
    sparse           the sparse model, of any length
    sgpa             SGPA
    attention        kernel and softmax attention, keys streamed
    draws            draws from mean and spread
    layers           what surrounds the attention: dropout, LayerNorm, GELU

An op is a folder: its front door holds the autograd functions, `kernels` the Triton code.  Modules with
kernels import Triton and are imported when a fused path is taken, never before.
"""

import inspect as _inspect

from gpattention.ops.noise import NOISE_LAYOUT as NOISE_LAYOUT
from gpattention.ops.noise import ItemNoise as ItemNoise
from gpattention.ops.noise import NoiseSource as NoiseSource
from gpattention.ops.noise import ShardNoise as ShardNoise
from gpattention.ops.noise import standard_normal as standard_normal
from gpattention.ops.sharding import Traffic as Traffic
from gpattention.ops.sharding import check_group as check_group
from gpattention.ops.sharding import count_traffic as count_traffic
from gpattention.ops.sharding import counted_once as counted_once
from gpattention.ops.sharding import sum_gradients as sum_gradients
from gpattention.ops.sharding import sum_over_shards as sum_over_shards
from gpattention.ops.switch import MOST_CHANNELS as MOST_CHANNELS
from gpattention.ops.switch import MOST_TOKENS as MOST_TOKENS
from gpattention.ops.switch import SHOWN_TOKENS as SHOWN_TOKENS
from gpattention.ops.switch import Mode as Mode
from gpattention.ops.switch import fused_kernels as fused_kernels
from gpattention.ops.switch import fused_mode as fused_mode
from gpattention.ops.switch import is_plain as is_plain
from gpattention.ops.switch import is_watched as is_watched
from gpattention.ops.switch import why_not_fused as why_not_fused
from gpattention.ops.switch import why_not_fused_on as why_not_fused_on

__all__ = [_name for _name, _x in vars().items() if _name[0] != "_" and not _inspect.ismodule(_x)]
