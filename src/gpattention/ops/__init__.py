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

from gpattention.ops.noise import NOISE_LAYOUT, ItemNoise, NoiseSource, ShardNoise, standard_normal
from gpattention.ops.sharding import (
    Traffic,
    check_group,
    count_traffic,
    counted_once,
    sum_gradients,
    sum_over_shards,
)
from gpattention.ops.switch import (
    MOST_CHANNELS,
    MOST_TOKENS,
    SHOWN_TOKENS,
    Mode,
    fused_kernels,
    fused_mode,
    is_plain,
    is_watched,
    why_not_fused,
    why_not_fused_on,
)

__all__ = [
    "MOST_CHANNELS",
    "MOST_TOKENS",
    "NOISE_LAYOUT",
    "SHOWN_TOKENS",
    "ItemNoise",
    "Mode",
    "NoiseSource",
    "ShardNoise",
    "Traffic",
    "check_group",
    "count_traffic",
    "counted_once",
    "fused_kernels",
    "fused_mode",
    "is_plain",
    "is_watched",
    "standard_normal",
    "sum_gradients",
    "sum_over_shards",
    "why_not_fused",
    "why_not_fused_on",
]
