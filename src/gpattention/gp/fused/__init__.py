"""Fused Triton kernels for small matrices, each beside a slow reference in plain torch operations.

    switch           when they run, and why not
    blocks           products, kernel values and Cholesky roots on chip
    layout           strides, padding, launch options
    cgp*             mean, variance and key density of the exact model (eq. 4, 6, 10)
    amplitude*       row sums of kernel attention (eq. 25)
    density*         log density under an amplified GP prior (eq. 10)
    sparse*          mean, variance, DTC density, KL and row sums of the sparse model, of any length
    draw*            independent draws from mean and variance
    noise*           item-keyed standard normal numbers

Modules with kernels import Triton and are imported when a fused path is taken, never before.
"""

from gpattention.gp.fused.switch import fused_kernels, why_not_fused

__all__ = ["fused_kernels", "why_not_fused"]
