"""KEP-SVGP: posterior, divergence and singular-value loss of one sequence and head."""

from __future__ import annotations

import numpy as np

from .gaussians import kl
from .kernels import Array
from .tokens import real_tokens, rows, square


def features(q, k, x, W_e, W_r, *, mask=None) -> tuple[Array, Array, Array]:
    """e and r [n, s] of the real tokens, and which these are (eq. 26)."""
    real, _ = real_tokens(len(q), len(q), mask, None)
    n, P = len(real), len(W_e)
    chosen = [real[i] if n <= P else real[i * (n - 1) // (P - 1)] for i in range(min(n, P))]
    e, r = np.zeros((n, W_e.shape[1])), np.zeros((n, W_e.shape[1]))
    for found, tokens, W in ((e, q, W_e), (r, k, W_r)):
        for row, i in enumerate(real):
            direction = tokens[i] / np.sqrt(tokens[i] @ tokens[i])
            for p, j in enumerate(chosen):
                found[row] += (direction @ x[j]) * W[p]
    return e, r, real


def kep_svgp_posterior(
    q, k, x, W_e, W_r, log_scale, inducing_mean, scale_tril, *, combine=None, mask=None
) -> tuple[Array, Array]:
    """Mean [N,D] and covariance per channel [D,N,N], by mapping q(u_d) = N(m_d, S_d) to tokens (eq. 27)."""
    e, r, real = features(q, k, x, W_e, W_r, mask=mask)
    merged = e + r
    if combine is not None:
        both = np.concatenate([real, len(q) + real])
        merged = combine[np.ix_(real, both)] @ np.concatenate([e, r])
    to_tokens = merged @ np.diag(np.exp(2 * log_scale))  # [n, s]
    cov = np.stack([square(to_tokens @ s @ s.T @ to_tokens.T, real, len(q)) for s in scale_tril])
    return rows(to_tokens @ inducing_mean, real, len(q)), cov


def kep_svgp_kl(*args, mask=None, combine=None) -> float:
    """KL from the prior u_d ~ N(0, Lambda^2) of dense Gaussians (eq. 28)."""
    log_scale, inducing_mean, scale_tril = args[5:]
    prior, zero = np.diag(np.exp(-4 * log_scale)), np.zeros((len(log_scale), 1))
    return sum(kl(inducing_mean[:, [d]], s @ s.T, zero, prior) for d, s in enumerate(scale_tril))


def kep_svgp_ksvd(cases) -> float:
    """Of all sequences and heads, each (arguments, mask): averages over tokens, then a square (eq. 29)."""
    energies, traces = [], []
    for args, mask in cases:
        e, r, _ = features(*args[:5], mask=mask)
        root = np.diag(np.exp(args[5]))  # Lambda^-1/2
        energies += [
            0.5 * (np.sum((a @ root) ** 2) + np.sum((b @ root) ** 2)) for a, b in zip(e, r, strict=True)
        ]
        traces.append(np.trace(args[3].T @ args[4]))
    return float((np.mean(energies) - np.mean(traces)) ** 2)
