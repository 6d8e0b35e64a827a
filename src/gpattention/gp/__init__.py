"""The mathematics of GP attention: pure, batched, differentiable functions on tensors.

Shapes lead with any batch axes: tokens [..., N, C], values [..., N, D], usually [B, H, N, C].
`noise` is sigma^2; masks are bool with True = real token.  Equation numbers refer to
docs/derivations.
"""

from gpattention.gp.amplitude import row_log_amplitude, sparse_row_log_amplitude
from gpattention.gp.causal import CausalCGPState, CausalRow, causal_cgp_posterior
from gpattention.gp.cholesky import check_health, health
from gpattention.gp.correlated import cgp_posterior
from gpattention.gp.correlated_density import cgp_log_density
from gpattention.gp.density import LogDensity, noise_floor
from gpattention.gp.direct import direct_posterior
from gpattention.gp.direct_density import direct_log_density
from gpattention.gp.divergence import cgp_kl, direct_kl, scgp_kl
from gpattention.gp.errors import (
    NonFiniteError,
    NotPositiveDefiniteError,
    NumericalError,
    TooFarApartError,
    UndefinedCovarianceError,
)
from gpattention.gp.fused.switch import fused_kernels, why_not_fused
from gpattention.gp.kernels import ard_rbf, exp_dot, rbf
from gpattention.gp.noise import ItemNoise, NoiseSource
from gpattention.gp.posterior import Posterior
from gpattention.gp.precision import deferred_checks
from gpattention.gp.softmax import softmax_posterior
from gpattention.gp.sparse import scgp_posterior
from gpattention.gp.sparse_density import scgp_log_density
from gpattention.gp.variational import sgpa_kl, sgpa_posterior

__all__ = [
    "CausalCGPState",
    "CausalRow",
    "ItemNoise",
    "LogDensity",
    "NoiseSource",
    "NonFiniteError",
    "NotPositiveDefiniteError",
    "NumericalError",
    "Posterior",
    "TooFarApartError",
    "UndefinedCovarianceError",
    "ard_rbf",
    "causal_cgp_posterior",
    "cgp_kl",
    "cgp_log_density",
    "cgp_posterior",
    "check_health",
    "deferred_checks",
    "direct_kl",
    "direct_log_density",
    "direct_posterior",
    "exp_dot",
    "fused_kernels",
    "health",
    "noise_floor",
    "rbf",
    "row_log_amplitude",
    "scgp_kl",
    "scgp_log_density",
    "scgp_posterior",
    "sgpa_kl",
    "sgpa_posterior",
    "softmax_posterior",
    "sparse_row_log_amplitude",
    "why_not_fused",
]
