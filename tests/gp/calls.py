"""Every public posterior, density, divergence and amplitude behind one signature: call(sample, **options)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.samples import SHARED, Sample, sample

ASKED = ("objective", "latent_prior", "observation_noise", "samples", "generator", "chunk", "features")


def asking(posterior: Callable[..., gp.Posterior], what: str) -> Callable[..., Any]:
    """Density or divergence of tokens: `posterior(...).what()`, each with the options it takes."""

    def answer(*tensors: Tensor, **options: Any) -> Any:
        asked = {name: options.pop(name) for name in ASKED if name in options}
        return getattr(posterior(*tensors, **options), what)(**asked)

    return answer


cgp_log_density, direct_log_density, scgp_log_density = (
    asking(p, "log_density") for p in (gp.cgp_posterior, gp.direct_posterior, gp.scgp_posterior)
)
cgp_kl, direct_kl, scgp_kl, sgpa_kl = (
    asking(p, "kl") for p in (gp.cgp_posterior, gp.direct_posterior, gp.scgp_posterior, gp.sgpa_posterior)
)

NOISE, SCALE_Q, SCALE_K, PRIOR_SCALE = 0.2, 1.3, 0.7, 1.7
SCALES = {"scale_q": SCALE_Q, "scale_k": SCALE_K}
MODEL = {"noise": NOISE, **SCALES}
SOFTMAX = {"noise": NOISE, "prior_scale": PRIOR_SCALE}
KEY_FIELDS = ("k", "o", "v", "mask")
EXTRAS = ("mask", "query_mask", "log_amplitude")

# float64 rounding of matrices of condition number up to about 1e4, far below any modelling error
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


padding = pytest.mark.parametrize("padded", [False, True], ids=["all real", "padded"])


@dataclass(frozen=True)
class Call:
    """One function with the sample fields it takes, its numbers and the optional fields it knows."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    parameters: Mapping[str, float]  # each may be a tensor, one number per head
    options: Mapping[str, Any]
    extras: tuple[str, ...] = EXTRAS
    square: bool = False  # as many queries as keys

    def __call__(self, s: Sample, **options: Any) -> Any:
        found = [getattr(s, name) for name in self.arguments]
        return self.function(*found, **{**self.parameters, **self.options, **options})

    def outputs(self, s: Sample, **options: Any) -> dict[str, Tensor]:
        """Everything the call defines, by name."""
        return tensors(self(s, **options))

    def extra(self, s: Sample) -> dict[str, Tensor]:
        """The sample's masks and log amplitudes, as far as the function takes them."""
        return {name: getattr(s, name) for name in self.extras}

    def problem(self, *lead: int, seed: int = 0) -> Sample:
        """A sample of the shape the function takes, queries and keys of different number where allowed."""
        return sample(*lead, queries=7 if self.square else 5, keys=7, seed=seed)


def tensors(result: Any) -> dict[str, Tensor]:
    """Mean, variances and covariance of a posterior; both terms of a density; a bare tensor as "value"."""
    if isinstance(result, Tensor):
        return {"value": result}
    if isinstance(result, gp.LogDensity):
        return {"query": result.query, "key": result.key}
    found = {name: getattr(result, name) for name in ("mean", "variance", "log_variance", "stddev")}
    try:
        found["covariance"] = result.covariance()
    except gp.UndefinedCovarianceError:
        return found
    return found


def _softmax_inducing(q: Tensor, k: Tensor, v: Tensor, inducing: Tensor, **options: Any) -> gp.Posterior:
    return gp.softmax_posterior(q, k, v, inducing=inducing, **options)


def kep_arguments(q: Any, k: Any, o: Any, a: Any, b: Any, v: Any, scale_tril: Any) -> tuple[Any, ...]:
    """A sample's tensors or arrays as those of `kep_svgp_posterior`: 5 rows, as many features as o has."""
    s, rows = o.shape[-1], a.shape[-2]
    own = (a, b[..., :rows, :], 0.25 * b[..., 0, :], v[..., :s, :], scale_tril[..., :s, :s])
    return (q, k, o, *own)


def kep_svgp(*tensors: Tensor, cat: bool = False, **options: Any) -> gp.KEPPosterior:
    n = tensors[0].shape[-2]
    combine = kep_combine(n).to(tensors[0]) if cat else None
    return gp.kep_svgp_posterior(*kep_arguments(*tensors), combine=combine, **options)


def kep_combine(n: int) -> Tensor:
    """[N, 2 N]"""
    return torch.arange(2.0 * n * n, dtype=torch.float64).view(n, 2 * n).sin() / n**0.5


kep_svgp_kl = asking(kep_svgp, "kl")
DIRECT, CGP = ("q", "k", "v"), ("q", "k", "o", "v")
KEP = ("q", "k", "o", "inducing_q", "inducing_k", "inducing_v", "scale_tril")
SCGP = (*CGP, "inducing_q", "inducing_k")
SGPA = ("q", "v", "inducing_k", "inducing_v", "scale_tril")
_direct = partial(Call, arguments=DIRECT, parameters=MODEL)
_softmax = partial(Call, arguments=DIRECT, parameters=SOFTMAX, extras=("mask", "query_mask"))
_cgp = partial(Call, arguments=CGP, parameters=MODEL)
_scgp = partial(Call, arguments=SCGP, parameters=MODEL)
_sgpa = partial(Call, arguments=SGPA, parameters={}, extras=("mask",), square=True)

JOINT_POSTERIORS = {
    "direct": _direct(gp.direct_posterior, options={}),
    "softmax": _softmax(gp.softmax_posterior, options={}),
    "softmax-inducing": _softmax(_softmax_inducing, arguments=(*DIRECT, "inducing_k"), options={}),
    "cgp": _cgp(gp.cgp_posterior, options={}),
    "scgp": _scgp(gp.scgp_posterior, options={}),
    "scgp-dual": _scgp(gp.scgp_posterior, options={"values": "dual"}),
    "scgp-noise-free": _scgp(gp.scgp_posterior, options={"include_noise": False}),
    "scgp-independent": _scgp(gp.scgp_posterior, options={"conditional": "independent"}),
    "scgp-shared": _scgp(gp.scgp_posterior, arguments=(*CGP, "inducing_q"), options={}),
    "sgpa": _sgpa(gp.sgpa_posterior, options={}),
    "kep-svgp": _sgpa(kep_svgp, arguments=KEP, options={}),
}
CAUSAL_POSTERIORS = {
    "direct-causal": _direct(gp.direct_posterior, options={"causal": True}, square=True),
    "softmax-causal": _softmax(gp.softmax_posterior, options={"causal": True}, square=True),
    "cgp-causal": _cgp(gp.causal_cgp_posterior, options={}, extras=("mask", "log_amplitude"), square=True),
}
POSTERIORS = JOINT_POSTERIORS | CAUSAL_POSTERIORS

SCGP_OBJECTIVES = ("dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed")
EXACT_DENSITIES = {
    f"density-direct-{objective}": _direct(direct_log_density, options={"objective": objective})
    for objective in ("marginal", "joint")
} | {
    f"density-cgp-{objective}-{prior}": _cgp(
        cgp_log_density, options={"objective": objective, "latent_prior": prior}
    )
    for objective in ("marginal", "jensen", "joint")
    for prior in ("noisy", "latent")
}
SPARSE_DENSITIES = {
    f"density-scgp-{objective}": _scgp(scgp_log_density, options={"objective": objective})
    for objective in SCGP_OBJECTIVES
} | {"density-scgp-dual": _scgp(scgp_log_density, options={"objective": "marginal", "values": "dual"})}
DENSITIES = EXACT_DENSITIES | SPARSE_DENSITIES

EXACT_KLS = {"kl-direct": _direct(direct_kl, options={}), "kl-cgp": _cgp(cgp_kl, options={})}
SCGP_KLS = {
    "kl-scgp": _scgp(scgp_kl, options={}),
    "kl-scgp-dual": _scgp(scgp_kl, options={"values": "dual"}),
    "kl-scgp-shared": _scgp(scgp_kl, arguments=(*CGP, "inducing_q"), options={}),
}
KLS = EXACT_KLS | SCGP_KLS | {"kl-sgpa": _sgpa(sgpa_kl, options={})}

_rows = partial(Call, arguments=("q", "k"), parameters={"scale": SCALE_Q}, extras=("mask", "query_mask"))
CAUSAL_AMPLITUDE = {"amplitude-causal": _rows(gp.row_log_amplitude, options={"causal": True}, square=True)}
JOINT_AMPLITUDES = {
    "amplitude": _rows(gp.row_log_amplitude, options={}),
    "amplitude-capped": _rows(gp.row_log_amplitude, options={"max_log_amplitude": -0.5}),
    "amplitude-sparse": _rows(
        gp.sparse_row_log_amplitude, arguments=("q", "k", "inducing_k"), options={"floor": 0.1}
    ),
}
AMPLITUDES = JOINT_AMPLITUDES | CAUSAL_AMPLITUDE
CAUSAL = CAUSAL_POSTERIORS | CAUSAL_AMPLITUDE
EVERY = POSTERIORS | DENSITIES | KLS | AMPLITUDES


def over(*names: str, table: Mapping[str, Call] = EVERY, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrise `call` over the named calls of a table (all when none is named) but some."""
    chosen = {name: table[name] for name in (names or table) if name not in but}
    return pytest.mark.parametrize("call", chosen.values(), ids=chosen.keys())


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name in before:
        close(after[name], before[name], msg=lambda message, name=name: f"{name}: {message}")


def kappa(x: Tensor, y: Tensor) -> Tensor:
    """The canonical kernel by explicit differences.  [N, M]"""
    return torch.exp(-0.5 * (x[:, None, :] - y[None, :, :]).square().sum(-1))


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def log_normal(X: Tensor, cov: Tensor) -> Tensor:
    """sum over the columns x of X [N, D] of log N(x; 0, cov)."""
    quadratic = (X * torch.linalg.solve(cov, X)).sum()
    return -0.5 * (quadratic + X.shape[-1] * torch.logdet(2 * math.pi * cov))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def change(s: Sample, names: tuple[str, ...], how: Callable[[Tensor], Tensor]) -> Sample:
    """The sample with `how` applied to the named fields."""
    return replace(s, **{name: how(getattr(s, name)) for name in names})


def head(s: Sample, b: int, h: int) -> Sample:
    """One sequence and head of a [B, H] sample; inducing inputs [m, C] are shared, [H, m, C] per head."""

    def of(name: str, x: Tensor) -> Tensor:
        if name not in SHARED:
            return x[b, h]
        return x if x.ndim == 2 + (name == "scale_tril") else x[h]

    return replace(s, **{f.name: of(f.name, getattr(s, f.name)) for f in fields(s)})
