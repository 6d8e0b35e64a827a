"""Fused Triton kernels for small matrices, each beside a slow reference in plain torch operations.

    switch           when they run, and why not
    blocks           products, kernel values and Cholesky roots on chip
    tiles            some rows of a sequence, read and written where they exist
    layout           strides, padding, launch options
    exact            the exact CGP and the direct model: moments, densities, divergences, amplitudes
    sparse           the sparse model, of any length
    sgpa             SGPA
    attention        kernel and softmax attention, keys streamed
    draws            draws from mean and variance, and item-keyed noise

Modules with kernels import Triton and are imported when a fused path is taken, never before.
"""

from gpattention.gp.fused.switch import fused_kernels, why_not_fused

__all__ = ["fused_kernels", "why_not_fused"]
