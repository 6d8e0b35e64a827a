"""Log density of the sparse model's own outputs: the SCGP regularisers (section 4, eq. 16).

    G = L_B^-1 Phi_o^T,  H = L_B^-1 Phi_q^T,  J = G K_o G^T,  observation noise sigma^2
    dtc            log N(N; 0, sigma^2 I + Phi_q Phi_q^T)                       exact under DTC's prior
    dtc_bound      -[|N|^2 + s |Phi_q|^2] / (2 sigma^2) - (n s / 2) log 2 pi sigma^2
    marginal       log N(N; 0, sigma^2 I + H^T (I + J / sigma^4) H)             z_o ~ N(0, K_o)
    jensen         E over z_o of log N(N; A z_o, sigma^2 I + H^T H)
    double_jensen  eq. 16, the corrected bound of the paper
    printed        the paper's formula as printed, wrong P and constants

The key term is the same with q -> k, the inducing set l, and N -> z_k.
"""

import math
from typing import TYPE_CHECKING, Literal, assert_never, get_args

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_choice
from gpattention.gp.cholesky import cholesky, solve
from gpattention.gp.density import (
    LogDensity,
    as_log_density,
    lowrank_log_density,
    lowrank_root,
)
from gpattention.gp.inputs import Scalar, keep_rows, with_diagonal
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.latent_trace import latent_trace, latent_trace_estimate
from gpattention.gp.precision import full_precision
from gpattention.gp.sharding import counted_once
from gpattention.gp.sparse import SCGPPosterior, scgp_posterior
from gpattention.gp.sparse_evidence import bound, density_from_sums
from gpattention.gp.sparse_kind import Values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCGPObjective = Literal["dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed"]
SCGP_OBJECTIVES: tuple[SCGPObjective, ...] = get_args(SCGPObjective)


@full_precision
def scgp_log_density(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    inducing_q: Tensor,  # [..., m, C]
    inducing_k: Tensor | None = None,  # [..., l, C]
    *,
    noise: Scalar,
    objective: SCGPObjective = "dtc",
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
    values: Values = "paper",
    delta: float = 1e-6,
    chunk: int = 1024,
    features: int | None = None,
    generator: Generator | None = None,
    group: "ProcessGroup | None" = None,
) -> LogDensity:
    """log p of the sparse mean and observed values (section 4); negate it for a regulariser.

    "dtc" (the default) and "dtc_bound" are O(N m^2).  The others hold the trace with the N x N
    kernel of the latent inputs: exactly in chunks of `chunk` rows, O(N m) memory; or, for those
    linear in it ("jensen", "double_jensen", "printed"), without bias from `features` random
    features.

    With a `group` (see `scgp_posterior`), which "dtc" and "dtc_bound" take, it is that of all tokens, the
    same on every process, and its gradient counts once in the sum of their losses.
    """
    p = scgp_posterior(
        q, k, o, v, inducing_q, inducing_k, noise=noise, scale_q=scale_q, scale_k=scale_k,
        mask=mask, query_mask=query_mask, log_amplitude=log_amplitude, values=values, delta=delta,
        group=group, objectives=[objective] if objective == "dtc" else [],
    )  # fmt: skip
    return scgp_density_of(p, objective, chunk=chunk, features=features, generator=generator)


@full_precision
def scgp_density_of(
    p: SCGPPosterior,
    objective: SCGPObjective = "dtc",
    *,
    chunk: int = 1024,
    features: int | None = None,
    generator: Generator | None = None,
) -> LogDensity:
    """`scgp_log_density` of a posterior that is there already."""
    check_choice("objective", objective, SCGP_OBJECTIVES)
    if features is not None and objective in ("dtc", "dtc_bound", "marginal"):
        raise ValueError(
            f"features={features} estimates a trace that {objective!r} does not hold linearly: "
            "use it with jensen, double_jensen or printed"
        )
    fused = p.fused("dtc") if objective == "dtc" else None
    if fused is not None and fused.query is not None and fused.key is not None:
        query, key = (counted_once(x, p.kind.group) for x in torch.broadcast_tensors(fused.query, fused.key))
        return LogDensity(query, key, *p.real_counts(), p.t.v.shape[-1])
    p = p.plain()
    if objective == "dtc" or objective == "dtc_bound":
        return density_from_sums(p, bound=objective == "dtc_bound")
    if p.kind.group is not None:
        raise ValueError(
            "expected objective to be dtc or dtc_bound under a group, whose processes share sums over "
            f"tokens and no pairs of them, got {objective!r}"
        )
    t, values, delta = p.t, p.kind.values, p.kind.delta
    z_k = t.v if values == "paper" else p.Psi_k @ (p.Psi_k.mT @ t.v) + t.noise * t.v  # [..., K, D]
    trace = _Trace(t.latent, chunk, features, generator)
    if objective == "printed":
        m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
        K_mq = t.amplify(keep_rows(cross_gram(t.q, m), t.query_mask)).mT
        K_lk = t.scale_k * keep_rows(cross_gram(t.k, l), t.mask).mT
        K_mo, K_lo = (keep_rows(cross_gram(t.latent, x), t.mask).mT for x in (m, l))
        query = _printed(p._mean, m, K_mq, K_mo, delta, t.noise, t.real_queries(), trace)
        key = _printed(z_k, l, K_lk, K_lo, delta, t.noise, t.real_keys(), trace)
        return as_log_density(t, query, key)
    query = _term(objective, p._mean, p.Phi_q, p.Phi_o, t.noise, t.real_queries(), trace)
    key = _term(objective, z_k, p.Psi_k, p.Psi_o, t.noise, t.real_keys(), trace)
    return as_log_density(t, query, key)


class _Trace:
    """G -> G K_o G^T, exactly or estimated."""

    def __init__(self, o: Tensor, chunk: int, features: int | None, generator: Generator | None) -> None:
        self._o = o - o.detach().mean(-2, keepdim=True)
        self._chunk, self._features, self._generator = chunk, features, generator

    def __call__(self, G: Tensor) -> Tensor:
        if self._features is None:
            return latent_trace(self._o, G, chunk=self._chunk)
        return latent_trace_estimate(self._o, G, features=self._features, generator=self._generator)


def _term(
    objective: Literal["marginal", "jensen", "double_jensen"],
    X: Tensor,  # [..., N, D]
    Phi: Tensor,  # [..., N, m]
    Phi_o: Tensor,  # [..., K, m]
    noise: Tensor,  # [..., 1, 1]
    real: Tensor,  # [...]
    trace: _Trace,
) -> Tensor:
    """One side's log density under `objective`.  [...]"""
    L_B = lowrank_root(Phi_o, noise)  # [..., m, m]
    H_t = solve_triangular(L_B.mT, Phi, upper=True, left=False)  # [..., N, m]
    G = solve_triangular(L_B.mT, Phi_o, upper=True, left=False).mT  # [..., m, K]
    J = trace(G) / noise.square()  # [..., m, m]
    if objective == "marginal":
        R = cholesky(with_diagonal(J, 1.0), name="I + G K_o G^T / noise^2", noise=noise)
        return lowrank_log_density(X, H_t @ R, noise, real)
    HH = H_t.mT @ H_t  # [..., m, m]
    if objective == "double_jensen":
        t_1, t_2 = (HH * J).sum((-2, -1)), H_t.square().sum((-2, -1))
        return bound(X.square().sum((-2, -1)), t_1 + t_2, X.shape[-1], noise, real)
    if objective == "jensen":
        L_H = lowrank_root(H_t, noise)  # [..., m, m]
        shrink = solve(HH / noise, L_H)  # [..., m, m]
        trace_term = (J * shrink.mT).sum((-2, -1))  # tr(S^-1 A K_o A^T) = <J, HH^T (sigma^2 I + HH^T)^-1>
        return lowrank_log_density(X, H_t, noise, real) - 0.5 * X.shape[-1] * trace_term
    assert_never(objective)


def _printed(
    X: Tensor,  # [..., N, D]
    m: Tensor,  # [..., m, C]
    K_mx: Tensor,  # [..., m, N]
    K_mo: Tensor,  # [..., m, K]
    delta: float,
    noise: Tensor,  # [..., 1, 1]
    real: Tensor,  # [...]
    trace: _Trace,
) -> Tensor:
    """Appendix E of the paper to the letter: P = (K_mm + I / sigma^2)^-1.  [...]"""
    P_root = cholesky(with_diagonal(gram(m), delta + 1 / noise), name="K_mm + I / noise", noise=noise)
    H = solve_triangular(P_root, K_mx, upper=False)  # [..., m, N]
    G = solve_triangular(P_root, K_mo, upper=False)  # [..., m, K]
    t_1 = (H @ H.mT * trace(G)).sum((-2, -1)) / noise[..., 0, 0].square()
    t_2 = H.square().sum((-2, -1))
    scalar, D = noise[..., 0, 0], X.shape[-1]
    error = X.square().sum((-2, -1)) + D * (t_1 + t_2)
    return -0.5 * error / scalar - D * (real * math.log(2 * math.pi) + 0.5 / scalar.sqrt())
