"""Every public function beside its NumPy oracle: torch result and oracle result as flat lists."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.samples import Sample
from tests.oracles import amplitude, densities, divergences, exact, sgpa, softmax, sparse

SCALES = {"scale_q": 1.3, "scale_k": 0.7}
OPTIONAL = ("mask", "query_mask", "log_amplitude")

Torch = Callable[[Sample, dict[str, Any], float], list[Tensor]]
Numpy = Callable[[dict[str, np.ndarray], dict[str, Any], float], list[np.ndarray]]


@dataclass(frozen=True)
class Pair:
    """`torch(sample, optional, noise)` must equal `numpy(arrays, optional, noise)`."""

    torch: Torch
    numpy: Numpy
    optional: tuple[str, ...] = OPTIONAL  # which of mask, query_mask, log_amplitude it takes


def _posterior(p: gp.Posterior, *, covariance: bool = True) -> list[Tensor]:
    return [p.mean, p.variance, p.covariance()] if covariance else [p.mean, p.variance]


def _with_diagonal(mean_cov: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    mean, cov = mean_cov
    return [mean, np.diagonal(cov, axis1=-2, axis2=-1), cov]


def _density(d: gp.LogDensity) -> list[Tensor]:
    return [d.query, d.key]


def _scale_tril(channels: int, m: int, like: Tensor) -> Tensor:
    """A fixed variational factor with positive diagonal.  [D, m, m]"""
    g = torch.Generator().manual_seed(5)
    raw = torch.randn(channels, m, m, generator=g, dtype=torch.float64)
    return (0.3 * raw.tril(-1) + torch.diag_embed(0.5 + raw.diagonal(dim1=-2, dim2=-1).abs())).to(like)


def _inducing_values(channels: int, m: int, like: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(6)
    return torch.randn(m, channels, generator=g, dtype=torch.float64).to(like)


def _sgpa_arguments(s: Sample) -> tuple[Tensor, ...]:
    m, D = s.inducing_q.shape[-2], s.v.shape[-1]
    return s.k, s.v, s.inducing_q, _inducing_values(D, m, s.v), _scale_tril(D, m, s.v)


def _sgpa_arrays(a: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    m, D = a["inducing_q"].shape[0], a["v"].shape[1]
    like = torch.zeros((), dtype=torch.float64)
    return (
        a["k"], a["v"], a["inducing_q"],
        _inducing_values(D, m, like).numpy(), _scale_tril(D, m, like).numpy(),
    )  # fmt: skip


def _sgpa_oracle(a: dict[str, np.ndarray], opt: dict[str, Any], noise: float) -> list[np.ndarray]:
    mean, cov = sgpa.sgpa_posterior(*_sgpa_arrays(a), **opt)  # [N, D], [D, N, N]
    return [mean, np.diagonal(cov, axis1=-2, axis2=-1).T, cov]


def _sparse_softmax_inputs(a: dict[str, np.ndarray], opt: dict[str, Any]) -> np.ndarray:
    """The oracle wants inducing inputs scaled and centred like the keys."""
    real = opt.get("mask", np.ones(len(a["k"]), bool))
    return (a["inducing_k"] - a["k"][real].mean(0)) * a["k"].shape[1] ** -0.25


def _four(a: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    return a["q"], a["k"], a["o"], a["v"]


def _six(a: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    return (*_four(a), a["inducing_q"], a["inducing_k"])


def _t6(s: Sample) -> tuple[Tensor, ...]:
    return s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_k


PAIRS: dict[str, Pair] = {
    "direct": Pair(
        lambda s, opt, n: _posterior(gp.direct_posterior(s.q, s.k, s.v, noise=n, **SCALES, **opt)),
        lambda a, opt, n: _with_diagonal(
            exact.direct_posterior(a["q"], a["k"], a["v"], noise=n, **SCALES, **opt)
        ),
    ),
    "direct causal": Pair(
        lambda s, opt, n: _posterior(
            gp.direct_posterior(s.q, s.k, s.v, noise=n, causal=True, **SCALES, **opt), covariance=False
        ),
        lambda a, opt, n: list(
            exact.causal_direct_posterior(a["q"], a["k"], a["v"], noise=n, **SCALES, **opt)
        ),
        ("mask", "log_amplitude"),
    ),
    "softmax": Pair(
        lambda s, opt, n: _posterior(gp.softmax_posterior(s.q, s.k, s.v, noise=n, prior_scale=1.7, **opt)),
        lambda a, opt, n: _with_diagonal(
            softmax.softmax_posterior(a["q"], a["k"], a["v"], noise=n, prior_scale=1.7, **opt)
        ),
        ("mask", "query_mask"),
    ),
    "softmax causal": Pair(
        lambda s, opt, n: _posterior(
            gp.softmax_posterior(s.q, s.k, s.v, noise=n, prior_scale=1.7, causal=True, **opt),
            covariance=False,
        ),
        lambda a, opt, n: list(
            softmax.causal_softmax_posterior(a["q"], a["k"], a["v"], noise=n, prior_scale=1.7, **opt)
        ),
        ("mask",),
    ),
    "softmax sparse": Pair(
        lambda s, opt, n: [
            gp.softmax_posterior(
                s.q, s.k, s.v, noise=n, prior_scale=1.7, inducing=s.inducing_k, **opt
            ).variance
        ],
        lambda a, opt, n: [
            softmax.sparse_softmax_variance(
                a["q"], a["k"], _sparse_softmax_inputs(a, opt), noise=n, prior_scale=1.7,
                delta=1e-6, **opt,
            )
        ],
        ("mask", "query_mask"),
    ),
    "cgp": Pair(
        lambda s, opt, n: _posterior(gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=n, **SCALES, **opt)),
        lambda a, opt, n: _with_diagonal(exact.cgp_posterior(*_four(a), noise=n, **SCALES, **opt)),
    ),
    "cgp causal": Pair(
        lambda s, opt, n: _posterior(
            gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, noise=n, **SCALES, **opt), covariance=False
        ),
        lambda a, opt, n: list(exact.causal_cgp_posterior(*_four(a), noise=n, **SCALES, **opt)),
        ("mask", "log_amplitude"),
    ),
    "sgpa": Pair(
        lambda s, opt, n: _posterior(gp.sgpa_posterior(*_sgpa_arguments(s), **opt)),
        _sgpa_oracle,
        ("mask",),
    ),
    "sgpa kl": Pair(
        lambda s, opt, n: [gp.sgpa_kl(*_sgpa_arguments(s), **opt)],
        lambda a, opt, n: [np.asarray(sgpa.sgpa_kl(*_sgpa_arrays(a), **opt))],
        ("mask",),
    ),
    "row amplitude": Pair(
        lambda s, opt, n: [gp.row_log_amplitude(s.q, s.k, scale=1.7, **opt)],
        lambda a, opt, n: [amplitude.row_log_amplitude(a["q"], a["k"], scale=1.7, **opt)],
        ("mask", "query_mask"),
    ),
    "row amplitude causal": Pair(
        lambda s, opt, n: [gp.row_log_amplitude(s.q, s.k, causal=True, **opt)],
        lambda a, opt, n: [amplitude.row_log_amplitude(a["q"], a["k"], scale=1.0, causal=True, **opt)],
        ("mask",),
    ),
    "row amplitude sparse": Pair(
        lambda s, opt, n: [gp.sparse_row_log_amplitude(s.q, s.k, s.inducing_k, scale=1.7, **opt)],
        lambda a, opt, n: [
            amplitude.sparse_row_log_amplitude(
                a["q"], a["k"], a["inducing_k"], scale=1.7, delta=1e-6, floor=1e-3, **opt
            )
        ],
        ("mask", "query_mask"),
    ),
    "cgp kl": Pair(
        lambda s, opt, n: [gp.cgp_kl(s.q, s.k, s.o, s.v, noise=n, **SCALES, **opt)],
        lambda a, opt, n: [np.asarray(divergences.cgp_kl(*_four(a), noise=n, **SCALES, **opt))],
    ),
    "cgp kl tau": Pair(
        lambda s, opt, n: [
            gp.cgp_kl(s.q, s.k, s.o, s.v, noise=n, observation_noise=0.3, **SCALES, **opt)
        ],
        lambda a, opt, n: [
            np.asarray(divergences.cgp_kl(*_four(a), noise=n, observation_noise=0.3, **SCALES, **opt))
        ],
    ),
    "direct kl": Pair(
        lambda s, opt, n: [gp.direct_kl(s.q, s.k, s.v, noise=n, **SCALES, **opt)],
        lambda a, opt, n: [
            np.asarray(divergences.direct_kl(a["q"], a["k"], a["v"], noise=n, **SCALES, **opt))
        ],
    ),
}  # fmt: skip


def _add_families() -> None:
    """The functions that come in several named variants."""
    for values in ("paper", "dual"):
        for include, conditional in product((True, False), ("deterministic", "independent")):
            choice = {"values": values, "include_noise": include, "conditional": conditional}
            told = ("" if include else " noiseless") + (
                f" {conditional}" if conditional != "deterministic" else ""
            )
            PAIRS[f"scgp {values}{told}"] = Pair(
                lambda s, opt, n, c=choice: _posterior(
                    gp.scgp_posterior(*_t6(s), noise=n, **SCALES, **c, **opt)
                ),
                lambda a, opt, n, c=choice: _with_diagonal(
                    sparse.scgp_posterior(*_six(a), noise=n, delta=1e-6, **SCALES, **c, **opt)
                ),
            )
        PAIRS[f"scgp kl {values}"] = Pair(
            lambda s, opt, n, c=values: [gp.scgp_kl(*_t6(s), noise=n, values=c, **SCALES, **opt)],
            lambda a, opt, n, c=values: [
                np.asarray(divergences.scgp_kl(*_six(a), noise=n, values=c, delta=1e-6, **SCALES, **opt))
            ],
        )
        for objective in ("dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed"):
            choice = {"values": values, "objective": objective}
            PAIRS[f"scgp {objective} {values}"] = Pair(
                lambda s, opt, n, c=choice: _density(
                    gp.scgp_log_density(*_t6(s), noise=n, **SCALES, **c, **opt)
                ),
                lambda a, opt, n, c=choice: [
                    np.asarray(x)
                    for x in densities.scgp_log_density(*_six(a), noise=n, delta=1e-6, **SCALES, **c, **opt)
                ],
            )
    for objective in ("marginal", "jensen", "joint"):
        for prior in ("noisy", "latent"):
            for tau in (None, 0.3, 0.0):
                choice = {"objective": objective, "latent_prior": prior, "observation_noise": tau}
                PAIRS[f"cgp {objective} {prior} {tau}"] = Pair(
                    lambda s, opt, n, c=choice: _density(
                        gp.cgp_log_density(s.q, s.k, s.o, s.v, noise=n, **SCALES, **c, **opt)
                    ),
                    lambda a, opt, n, c=choice: [
                        np.asarray(x)
                        for x in densities.cgp_log_density(*_four(a), noise=n, **SCALES, **c, **opt)
                    ],
                )
    for objective in ("marginal", "joint"):
        for tau in (None, 0.3):
            choice = {"objective": objective, "observation_noise": tau}
            PAIRS[f"direct {objective} {tau}"] = Pair(
                lambda s, opt, n, c=choice: _density(
                    gp.direct_log_density(s.q, s.k, s.v, noise=n, **SCALES, **c, **opt)
                ),
                lambda a, opt, n, c=choice: [
                    np.asarray(x)
                    for x in densities.direct_log_density(
                        a["q"], a["k"], a["v"], noise=n, **SCALES, **c, **opt
                    )
                ],
            )


_add_families()
