"""The mathematics of GP attention: pure, batched, differentiable functions on tensors.

Shapes lead with any batch axes: tokens [..., N, C], values [..., N, D], usually [B, H, N, C].
`noise` is sigma^2; masks are bool with True = real token.  Equation numbers refer to
docs/derivations.
"""

import inspect as _inspect

from gpattention.gp.amplitude import row_log_amplitude as row_log_amplitude
from gpattention.gp.amplitude import sparse_row_log_amplitude as sparse_row_log_amplitude
from gpattention.gp.causal import CausalCGPState as CausalCGPState
from gpattention.gp.causal import CausalRow as CausalRow
from gpattention.gp.causal import causal_cgp_posterior as causal_cgp_posterior
from gpattention.gp.correlated import CGPPosterior as CGPPosterior
from gpattention.gp.correlated import cgp_density_of as cgp_density_of
from gpattention.gp.correlated import cgp_kl as cgp_kl
from gpattention.gp.correlated import cgp_kl_of as cgp_kl_of
from gpattention.gp.correlated import cgp_log_density as cgp_log_density
from gpattention.gp.correlated import cgp_posterior as cgp_posterior
from gpattention.gp.density import LogDensity as LogDensity
from gpattention.gp.density import noise_floor as noise_floor
from gpattention.gp.direct import DirectPosterior as DirectPosterior
from gpattention.gp.direct import UnitProcess as UnitProcess
from gpattention.gp.direct import direct_density_of as direct_density_of
from gpattention.gp.direct import direct_kl as direct_kl
from gpattention.gp.direct import direct_kl_of as direct_kl_of
from gpattention.gp.direct import direct_log_density as direct_log_density
from gpattention.gp.direct import direct_posterior as direct_posterior
from gpattention.gp.direct import unit_variance as unit_variance
from gpattention.gp.entropy import attention_entropy as attention_entropy
from gpattention.gp.inputs import fill_rows as fill_rows
from gpattention.gp.inputs import keep_rows as keep_rows
from gpattention.gp.inputs import real_mean as real_mean
from gpattention.gp.kernels import ArdRbf as ArdRbf
from gpattention.gp.kernels import ard_rbf as ard_rbf
from gpattention.gp.kernels import exp_dot as exp_dot
from gpattention.gp.kernels import rbf as rbf
from gpattention.gp.means import kernel_attention as kernel_attention
from gpattention.gp.means import kernel_weights as kernel_weights
from gpattention.gp.means import softmax_attention as softmax_attention
from gpattention.gp.means import without_padding as without_padding
from gpattention.gp.posterior import Posterior as Posterior
from gpattention.gp.softmax import distance_log_amplitude as distance_log_amplitude
from gpattention.gp.softmax import key_log_amplitude as key_log_amplitude
from gpattention.gp.softmax import query_exponent as query_exponent
from gpattention.gp.softmax import query_log_amplitude as query_log_amplitude
from gpattention.gp.softmax import softmax_posterior as softmax_posterior
from gpattention.gp.sparse import SCGPPosterior as SCGPPosterior
from gpattention.gp.sparse import scgp_density_of as scgp_density_of
from gpattention.gp.sparse import scgp_kl as scgp_kl
from gpattention.gp.sparse import scgp_kl_of as scgp_kl_of
from gpattention.gp.sparse import scgp_log_density as scgp_log_density
from gpattention.gp.sparse import scgp_posterior as scgp_posterior
from gpattention.gp.variational import SGPAPosterior as SGPAPosterior
from gpattention.gp.variational import sgpa_kl as sgpa_kl
from gpattention.gp.variational import sgpa_posterior as sgpa_posterior
from gpattention.numerics import NonFiniteError as NonFiniteError
from gpattention.numerics import NotPositiveDefiniteError as NotPositiveDefiniteError
from gpattention.numerics import NumericalError as NumericalError
from gpattention.numerics import TooFarApartError as TooFarApartError
from gpattention.numerics import UndefinedCovarianceError as UndefinedCovarianceError
from gpattention.numerics import check_health as check_health
from gpattention.numerics import deferred_checks as deferred_checks
from gpattention.numerics import health as health
from gpattention.ops import ItemNoise as ItemNoise
from gpattention.ops import NoiseSource as NoiseSource
from gpattention.ops import ShardNoise as ShardNoise
from gpattention.ops import fused_kernels as fused_kernels
from gpattention.ops import why_not_fused as why_not_fused

__all__ = [_name for _name, _x in vars().items() if _name[0] != "_" and not _inspect.ismodule(_x)]
