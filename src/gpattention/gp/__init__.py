"""The mathematics of GP attention: pure, batched, differentiable functions on tensors.

Shapes lead with any batch axes: tokens [..., N, C], values [..., N, D], usually [B, H, N, C].
`noise` is sigma^2; masks are bool with True = real token.  Equation numbers refer to
docs/derivations.
"""

from gpattention.gp.amplitude import row_log_amplitude, sparse_row_log_amplitude
from gpattention.gp.causal import (
    CausalCGPState,
    CausalRow,
    CausalVariance,
    CausalVarianceState,
    Sight,
    causal_cgp_posterior,
    causal_unit_variance,
)
from gpattention.gp.correlated import (
    CGPPosterior,
    cgp_density_of,
    cgp_kl,
    cgp_kl_of,
    cgp_log_density,
    cgp_posterior,
)
from gpattention.gp.density import LogDensity, noise_floor
from gpattention.gp.direct import (
    DirectPosterior,
    UnitProcess,
    direct_density_of,
    direct_kl,
    direct_kl_of,
    direct_log_density,
    direct_posterior,
    unit_variance,
)
from gpattention.gp.entropy import attention_entropy
from gpattention.gp.inputs import fill_rows, keep_rows, real_mean
from gpattention.gp.kernels import ArdRbf, ard_rbf, exp_dot, rbf
from gpattention.gp.means import (
    kernel_attention,
    kernel_weights,
    softmax_attention,
    without_padding,
)
from gpattention.gp.posterior import Posterior
from gpattention.gp.softmax import (
    distance_log_amplitude,
    key_log_amplitude,
    query_exponent,
    query_log_amplitude,
    softmax_posterior,
)
from gpattention.gp.sparse import (
    SCGPPosterior,
    scgp_density_of,
    scgp_kl,
    scgp_kl_of,
    scgp_log_density,
    scgp_posterior,
)
from gpattention.gp.variational import SGPAPosterior, sgpa_kl, sgpa_posterior
from gpattention.numerics import (
    NonFiniteError,
    NotPositiveDefiniteError,
    NumericalError,
    TooFarApartError,
    UndefinedCovarianceError,
    check_health,
    deferred_checks,
    health,
)
from gpattention.ops import ItemNoise, NoiseSource, ShardNoise, fused_kernels, why_not_fused

__all__ = [
    "ArdRbf",
    "CGPPosterior",
    "CausalCGPState",
    "CausalRow",
    "CausalVariance",
    "CausalVarianceState",
    "DirectPosterior",
    "ItemNoise",
    "LogDensity",
    "NoiseSource",
    "NonFiniteError",
    "NotPositiveDefiniteError",
    "NumericalError",
    "Posterior",
    "SCGPPosterior",
    "SGPAPosterior",
    "ShardNoise",
    "Sight",
    "TooFarApartError",
    "UndefinedCovarianceError",
    "UnitProcess",
    "ard_rbf",
    "attention_entropy",
    "causal_cgp_posterior",
    "causal_unit_variance",
    "cgp_density_of",
    "cgp_kl",
    "cgp_kl_of",
    "cgp_log_density",
    "cgp_posterior",
    "check_health",
    "deferred_checks",
    "direct_density_of",
    "direct_kl",
    "direct_kl_of",
    "direct_log_density",
    "direct_posterior",
    "distance_log_amplitude",
    "exp_dot",
    "fill_rows",
    "fused_kernels",
    "health",
    "keep_rows",
    "kernel_attention",
    "kernel_weights",
    "key_log_amplitude",
    "noise_floor",
    "query_exponent",
    "query_log_amplitude",
    "rbf",
    "real_mean",
    "row_log_amplitude",
    "scgp_density_of",
    "scgp_kl",
    "scgp_kl_of",
    "scgp_log_density",
    "scgp_posterior",
    "sgpa_kl",
    "sgpa_posterior",
    "softmax_attention",
    "softmax_posterior",
    "sparse_row_log_amplitude",
    "unit_variance",
    "why_not_fused",
    "without_padding",
]
