"""Every public function beside its NumPy oracle: torch result and oracle result as flat lists."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from gpattention import gp
from tests.gp.calls import (
    cgp_kl,
    cgp_log_density,
    direct_kl,
    direct_log_density,
    kep_arguments,
    kep_combine,
    kep_svgp,
    kep_svgp_kl,
    scgp_kl,
    scgp_log_density,
    sgpa_kl,
)
from tests.gp.samples import Sample
from tests.oracles import amplitude, densities, divergences, exact, kernels, sgpa, singular, softmax, sparse

OPTIONAL = ("mask", "query_mask", "log_amplitude")
MASKS = ("mask", "query_mask")

Torch = Callable[[Sample, dict[str, Any], float], list[Tensor]]
Numpy = Callable[[dict[str, np.ndarray], dict[str, Any], float], list[np.ndarray]]


@dataclass(frozen=True)
class Pair:
    """`torch(sample, optional, noise)` must equal `numpy(arrays, optional, noise)`."""

    torch: Torch
    numpy: Numpy
    optional: tuple[str, ...] = OPTIONAL  # which of mask, query_mask, log_amplitude it takes


def _tensors(found: Any, covariance: bool) -> list[Tensor]:
    if isinstance(found, gp.LogDensity):
        return [found.query, found.key]
    if isinstance(found, Tensor):
        return [found]
    return [found.mean, found.variance, *([found.covariance()] if covariance else [])]


def _arrays(found: Any, covariance: bool) -> list[np.ndarray]:
    if not isinstance(found, tuple):
        return [np.asarray(found)]
    if not covariance or np.ndim(found[1]) < 2:  # a density, or a mean with its variance
        return [np.asarray(x) for x in found]
    return [found[0], np.diagonal(found[1], axis1=-2, axis2=-1).T, found[1]]


def _pair(
    ours: Callable[..., Any], theirs: Callable[..., Any], fields: str, optional: tuple[str, ...] = OPTIONAL,
    *, covariance: bool = True, noisy: bool = True, only_ours: dict[str, Any] | None = None, **options: Any,
) -> Pair:  # fmt: skip
    names = fields.split()

    def noise(n: float) -> dict[str, float]:
        return {"noise": n} if noisy else {}

    def found(s: Sample, opt: dict[str, Any], n: float) -> list[Tensor]:
        given = [getattr(s, name) for name in names]
        return _tensors(ours(*given, **noise(n), **options, **(only_ours or {}), **opt), covariance)

    def wanted(a: dict[str, np.ndarray], opt: dict[str, Any], n: float) -> list[np.ndarray]:
        return _arrays(theirs(*(a[name] for name in names), **noise(n), **options, **opt), covariance)

    return Pair(found, wanted, optional)


def _softmax_variance(q: Tensor, k: Tensor, v: Tensor, inducing: Tensor, **options: Any) -> Tensor:
    return gp.softmax_posterior(q, k, v, inducing=inducing, **options).variance


def _sparse_softmax(q, k, v, inducing, **options: Any) -> np.ndarray:
    """The oracle wants inducing inputs scaled and centred like the keys."""
    real = options.get("mask", np.ones(len(k), bool))
    inducing = (inducing - k[real].mean(0)) * k.shape[1] ** -0.25
    return softmax.sparse_softmax_variance(q, k, inducing, delta=1e-6, **options)


def _kep(theirs: Callable[..., Any], *args: np.ndarray, cat: bool = False, **options: Any) -> Any:
    combine = kep_combine(len(args[0])).numpy() if cat else None
    return theirs(*kep_arguments(*args), combine=combine, **options)


SCALES = {"scale_q": 1.3, "scale_k": 0.7}
DIRECT, CGP = "q k v", "q k o v"
SCGP = f"{CGP} inducing_q inducing_k"
_direct, _cgp = partial(_pair, fields=DIRECT, **SCALES), partial(_pair, fields=CGP, **SCALES)
_scgp, _soft = partial(_pair, fields=SCGP, **SCALES), partial(_pair, fields=DIRECT, prior_scale=1.7)
_sgpa = partial(_pair, fields="k v inducing_k inducing_v scale_tril", optional=("mask",), noisy=False)
_kep_svgp = partial(_sgpa, fields="k o o inducing_q inducing_k inducing_v scale_tril")
_rows = partial(_pair, fields="q k", optional=MASKS, noisy=False)
ROWS, PREFIX = ("mask", "log_amplitude"), {"covariance": False, "only_ours": {"causal": True}}
PAIRS: dict[str, Pair] = {
    "direct": _direct(gp.direct_posterior, exact.direct_posterior),
    "direct causal": _direct(
        gp.direct_posterior, exact.causal_direct_posterior, optional=ROWS, **PREFIX
    ),
    "softmax": _soft(gp.softmax_posterior, softmax.softmax_posterior, optional=MASKS),
    "softmax causal": _soft(
        gp.softmax_posterior, softmax.causal_softmax_posterior, optional=("mask",), **PREFIX
    ),
    "softmax sparse": _soft(
        _softmax_variance, _sparse_softmax, fields=f"{DIRECT} inducing_k", optional=MASKS
    ),
    "cgp": _cgp(gp.cgp_posterior, exact.cgp_posterior),
    "cgp causal": _cgp(
        gp.causal_cgp_posterior, exact.causal_cgp_posterior, optional=ROWS, covariance=False
    ),
    "sgpa": _sgpa(gp.sgpa_posterior, sgpa.sgpa_posterior),
    "sgpa kl": _sgpa(sgpa_kl, sgpa.sgpa_kl),
    "kep-svgp": _kep_svgp(kep_svgp, partial(_kep, singular.kep_svgp_posterior)),
    "kep-svgp cat": _kep_svgp(kep_svgp, partial(_kep, singular.kep_svgp_posterior), cat=True),
    "kep-svgp kl": _kep_svgp(kep_svgp_kl, partial(_kep, singular.kep_svgp_kl)),
    "row amplitude": _rows(gp.row_log_amplitude, amplitude.row_log_amplitude, scale=1.7),
    "row amplitude causal": _rows(
        gp.row_log_amplitude, amplitude.row_log_amplitude, optional=("mask",), causal=True
    ),
    "row amplitude sparse": _rows(
        gp.sparse_row_log_amplitude, amplitude.sparse_row_log_amplitude, fields="q k inducing_k", scale=1.7
    ),
    "cgp kl": _cgp(cgp_kl, divergences.cgp_kl),
    "cgp kl tau": _cgp(cgp_kl, divergences.cgp_kl, observation_noise=0.3),
    "direct kl": _direct(direct_kl, divergences.direct_kl),
    "scgp shared": _scgp(gp.scgp_posterior, sparse.scgp_posterior, fields=f"{CGP} inducing_q"),
}  # fmt: skip
for values in ("paper", "dual"):
    for include, conditional in product((True, False), ("deterministic", "independent")):
        name = f"scgp {values}" + ("" if include else " noiseless")
        PAIRS[name + (f" {conditional}" if conditional != "deterministic" else "")] = _scgp(
            gp.scgp_posterior, sparse.scgp_posterior, values=values, include_noise=include,
            conditional=conditional,
        )  # fmt: skip
    PAIRS[f"scgp kl {values}"] = _scgp(scgp_kl, divergences.scgp_kl, values=values)
    for objective in ("dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed"):
        PAIRS[f"scgp {objective} {values}"] = _scgp(
            scgp_log_density, densities.scgp_log_density, values=values, objective=objective
        )
for objective, prior, tau in product(("marginal", "jensen", "joint"), ("noisy", "latent"), (None, 0.3, 0.0)):
    PAIRS[f"cgp {objective} {prior} {tau}"] = _cgp(
        cgp_log_density, densities.cgp_log_density, objective=objective, latent_prior=prior,
        observation_noise=tau,
    )  # fmt: skip
for objective, tau in product(("marginal", "joint"), (None, 0.3)):
    PAIRS[f"direct {objective} {tau}"] = _direct(
        direct_log_density, densities.direct_log_density, objective=objective, observation_noise=tau
    )
for kind in ("ard_rbf", "exp_dot"):
    ours, theirs = (partial(getattr(by, kind), lengthscale=0.8, variance=1.4) for by in (gp, kernels))
    PAIRS[f"sgpa {kind}"] = _sgpa(
        partial(gp.sgpa_posterior, kernel=ours), partial(sgpa.sgpa_posterior, kernel=theirs)
    )
