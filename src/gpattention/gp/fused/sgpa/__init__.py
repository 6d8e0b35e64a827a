"""Kernels of SGPA.

posterior            mean, variance per channel and KL as one autograd function (eq. 19-20)
inducing             what there is once per head: inducing inputs and variational covariances
forward, backward    what there is once per sequence
triangle*            triangular factors with a positive diagonal
"""
