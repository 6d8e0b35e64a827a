"""Kernels of the sparse model, of any number of tokens.

posterior        mean, variance, DTC densities and KL as one autograd function
launch, layout   what it does beside launching; cuts of the long axis, packed small matrices
blocks           tiles of tokens, whitened features, small roots, sums of splits
inducing         inverse roots of the inducing inputs' Gram matrices
sums*            sums over tokens
small*           the small matrices between the sums and the rows
rows             mean and variance of the queries
amplitude*       Nystrom row sums that normalise attention
"""
