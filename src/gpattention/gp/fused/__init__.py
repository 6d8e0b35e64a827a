"""Fused Triton kernels for small matrices, each beside a slow reference in plain torch operations.

    switch           when they run, and why not
    blocks           products, kernel values and Cholesky roots on chip
    layout           strides, padding, launch options
    cgp*             mean, variance, key density and regularisers of the exact model (eq. 4, 6, 10, 23)
    direct*          the same of the direct model (eq. 2)
    amplitude*       amplitudes that normalise the rows of attention (eq. 25)
    density*         log density under an amplified GP prior (eq. 10)
    divergence*      KL divergence of a posterior from its prior (eq. 23)
    sparse*          mean, variance, DTC density, KL and row sums of the sparse model, of any length
    draw*            independent draws from mean and variance
    noise*           item-keyed standard normal numbers

Modules with kernels import Triton and are imported when a fused path is taken, never before.
"""

from gpattention.gp.fused.switch import fused_kernels, why_not_fused

__all__ = ["fused_kernels", "why_not_fused"]
