"""Kernels of the exact models, each with its autograd function: one program per sequence and head.

cgp*             mean, variance, key density and regularisers of the exact CGP (eq. 4, 6, 10, 23)
direct*          the same of the direct model (eq. 2)
density*         log density under an amplified GP prior (eq. 10)
divergence*      KL divergence of a posterior from its prior (eq. 23)
amplitude*       amplitudes that normalise the rows of attention (eq. 25)
"""
