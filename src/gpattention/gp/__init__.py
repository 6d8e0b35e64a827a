"""The mathematics of GP attention: pure, batched, differentiable functions on tensors.

Shapes lead with any batch axes: tokens [..., N, C], values [..., N, D], usually [B, H, N, C].
`noise` is sigma^2; masks are bool with True = real token.  Equation numbers refer to
docs/derivations.
"""

from gpattention.gp.causal import (
    CausalCGPState,
    CausalRow,
    CausalVariance,
    CausalVarianceState,
    Sight,
    causal_cgp_posterior,
    causal_unit_variance,
)
from gpattention.gp.correlated import CGPPosterior, cgp_posterior
from gpattention.gp.direct import (
    DirectPosterior,
    ExactPosterior,
    UnitProcess,
    direct_posterior,
    unit_variance,
)
from gpattention.gp.entropy import attention_entropy
from gpattention.gp.inputs import fill_rows, keep_rows, real_mean
from gpattention.gp.kernels import (
    ArdRbf,
    ard_rbf,
    exp_dot,
    kernel_attention,
    kernel_weights,
    rbf,
    softmax_attention,
    without_padding,
)
from gpattention.gp.posterior import LogDensity, Posterior, noise_floor
from gpattention.gp.singular import KEPPosterior, kep_svgp_posterior
from gpattention.gp.softmax import (
    distance_log_amplitude,
    key_log_amplitude,
    query_exponent,
    query_log_amplitude,
    row_log_amplitude,
    softmax_posterior,
    sparse_row_log_amplitude,
)
from gpattention.gp.sparse import SCGPPosterior, scgp_posterior
from gpattention.gp.variational import SGPAPosterior, sgpa_posterior
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
    "ArdRbf", "CGPPosterior", "CausalCGPState", "CausalRow", "CausalVariance", "CausalVarianceState",
    "DirectPosterior", "ExactPosterior", "ItemNoise", "KEPPosterior", "LogDensity", "NoiseSource",
    "NonFiniteError", "NotPositiveDefiniteError", "NumericalError", "Posterior", "SCGPPosterior",
    "SGPAPosterior", "ShardNoise", "Sight", "TooFarApartError", "UndefinedCovarianceError", "UnitProcess",
    "ard_rbf", "attention_entropy", "causal_cgp_posterior", "causal_unit_variance", "cgp_posterior",
    "check_health", "deferred_checks", "direct_posterior", "distance_log_amplitude", "exp_dot",
    "fill_rows", "fused_kernels", "health", "keep_rows", "kep_svgp_posterior", "kernel_attention",
    "kernel_weights", "key_log_amplitude", "noise_floor", "query_exponent", "query_log_amplitude", "rbf",
    "real_mean", "row_log_amplitude", "scgp_posterior", "sgpa_posterior", "softmax_attention",
    "softmax_posterior", "sparse_row_log_amplitude", "unit_variance", "why_not_fused", "without_padding",
]  # fmt: skip
