"""Sparse correlated-GP attention (SCGP): inducing inputs, linear in the number of tokens (eq. 13-15).

    L_m = chol(K_mm + delta I),  L_l = chol(K_ll + delta I)
    Phi_q = K_qm L_m^-T,  Phi_o = K_om L_m^-T,  Psi_o = K_ol L_l^-T,  Psi_k = K_kl L_l^-T
    B_m = I + Phi_o^T Phi_o / sigma^2 = L_B L_B^T,   B_l = I + Psi_k^T Psi_k / sigma^2 = L_Bl L_Bl^T
    H = L_B^-1 Phi_q^T,   T = L_Bl^-1 Psi_o^T Phi_o L_B^-T / sigma^2
    mean = H^T T^T (L_Bl^-1 Psi_k^T V / sigma^2)
    cov  = sigma^2 I + H^T R R^T H,   R R^T = 2 I - L_B^-1 L_B^-T + T^T T >= I                    (15)

Time O(N m^2), memory O(N m); no N x N matrix forward or backward.  The long axis always is a row
axis: `solve_triangular` with a million columns is a trap.  Tokens of a sequence meet in a small set of sums
alone (section 12), which do not know how many tokens there were, nor which process held them.  Where
`ops.sparse` applies, its kernels do it all with nothing of the features in memory.

Log density of the sparse model's own outputs: the SCGP regularisers (section 4, eq. 16).

    G = L_B^-1 Phi_o^T,  H = L_B^-1 Phi_q^T,  J = G K_o G^T,  observation noise sigma^2
    dtc            log N(N; 0, sigma^2 I + Phi_q Phi_q^T)                       exact under DTC's prior
    dtc_bound      -[|N|^2 + s |Phi_q|^2] / (2 sigma^2) - (n s / 2) log 2 pi sigma^2
    marginal       log N(N; 0, sigma^2 I + H^T (I + J / sigma^4) H)             z_o ~ N(0, K_o)
    jensen         E over z_o of log N(N; A z_o, sigma^2 I + H^T H)
    double_jensen  eq. 16, the corrected bound of the paper
    printed        the paper's formula as printed, wrong P and constants

The key term is the same with q -> k, the inducing set l, and N -> z_k.  The first two are functions of sums
over tokens:

    G = Phi_q^T Phi_q,  B_0 = I + G / sigma^2,  y = B_0^-1 c,  mean N = Phi_q c
    N^T (sigma^2 I + Phi_q Phi_q^T)^-1 N = <y, G y> / sigma^2 + |G y|^2 / sigma^4
    log det(sigma^2 I + Phi_q Phi_q^T)   = n log sigma^2 + log det B_0

and the same for the keys, whose z_k need not lie in the span of their features.  J, the only O(N^2) quantity,
takes O(N m) memory: exactly, in chunks of rows that are recomputed in the backward pass; or without bias from
random Fourier features, in O(N r).
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, assert_never, get_args

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.checks import check_choice, check_count
from gpattention.gp.closed_sparse import SparseCost, closed_features, closed_sparse
from gpattention.gp.inputs import (
    Scalar,
    check_delta,
    expanded,
    fill_rows,
    keep_real,
    keep_rows,
    masked,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import about_centre, cross_gram, gram, pull
from gpattention.gp.posterior import (
    LogDensity,
    Posterior,
    Source,
    as_log_density,
    lowrank_log_density,
    lowrank_root,
)
from gpattention.gp.roots import InvertedRoot, Root, trains_on_cpu
from gpattention.numerics import (
    Tokens,
    broadcast,
    cholesky,
    compute_dtype,
    full_precision,
    kept,
    once_differentiable,
    solve,
    wants_plain_operations,
)
from gpattention.ops import ShardNoise, check_group, counted_once, sum_over_shards
from gpattention.ops.sparse import Options, SparseMoments, fused_scgp, why_not_fused_sparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Values = Literal["paper", "dual"]
Conditional = Literal["deterministic", "independent"]
VALUES: tuple[Values, ...] = get_args(Values)
CONDITIONALS: tuple[Conditional, ...] = get_args(Conditional)


@dataclass(frozen=True)
class SparseKind:
    """Which sparse model it is: the options of `scgp_posterior`."""

    values: Values
    conditional: Conditional
    include_noise: bool
    delta: float
    group: "ProcessGroup | None"


def inducing_root(m: Tensor, delta: float, kind: Callable[..., Root] = Root.of) -> Root:
    """The root of K_mm + delta I, of whichever kind.  [..., m, m]"""
    return kind(with_diagonal(gram(m), delta), name="K_mm + delta I", noise=delta)


def similarities(x: Tensor, m: Tensor) -> Tensor:
    """kappa(x, m).  [..., N, m]"""
    K = closed_features(m, None, x)
    return cross_gram(x, m) if K is None else K[0].transpose(0, 1)


def whitened_features(x: Tensor, m: Tensor, L: Root, mask: Tensor | None) -> Tensor:
    """Whitened inducing features kappa(x, m) L^-T, zero at padded tokens.  [..., N, m]"""
    phi = closed_features(m, L.inverse, x) if isinstance(L, InvertedRoot) else None
    return keep_rows(L.white_rows(cross_gram(x, m)) if phi is None else phi[0].transpose(0, 1), mask)


@dataclass(frozen=True, slots=True)
class UnitFeatures:
    """Whitened features of a CPU's training step, which row sums and posterior share; 0 at padded tokens."""

    q: Tensor  # [H, B, Q, m]
    k: Tensor  # [H, B, K, m]
    o: Tensor  # [H, B, K, m]

    @classmethod
    @full_precision
    def of(
        cls, q: Tensor, k: Tensor, o: Tensor, m: Tensor, mask: Tensor | None, query_mask: Tensor | None,
        delta: float = 1e-6,
    ) -> "UnitFeatures | None":  # fmt: skip
        """Features of tokens [B, H, N, C] for one set of inducing inputs [H, m, C]; None off that step."""
        dtype = compute_dtype(m.dtype)
        if not trains_on_cpu(q, k, o, m) or any(x.dtype != dtype for x in (q, k, o, m)):
            return None  # autocast may give tokens of another type
        L = inducing_root(m, delta)
        masks = (query_mask, mask, mask)
        about = m.detach().mean(-2, keepdim=True)  # padding may hold anything
        tokens = (fill_rows(x, about, own) for x, own in zip((q, k, o), masks, strict=True))
        found = closed_features(m, L.inverse, *tokens) if isinstance(L, InvertedRoot) else None
        if found is None:
            return None
        real = (None if own is None else own.transpose(0, 1) for own in masks)
        return cls(*(keep_rows(phi, own) for phi, own in zip(found, real, strict=True)))

    def row_sums(self) -> Tensor:
        """kappa(q, m) (K_mm + delta I)^-1 sum_j kappa(m, k_j).  [B, H, Q]"""
        return (self.q @ self.k.sum(-2)[..., None])[..., 0].transpose(0, 1)


def missed_variance(t: Tokens, Phi_q: Tensor) -> Tensor:
    """diag(K_q - Phi_q Phi_q^T), 0 at padded queries: what z_m leaves open of each query.  [..., Q]"""
    prior = t.amplify(Phi_q.new_ones(*Phi_q.shape[:-1], 1)).square()[..., 0]  # (s_q a_i)^2, as kappa = 1
    missed = prior - Phi_q.square().sum(-1)
    # never negative but for rounding, since K_mm + delta I >= K_mm: lifted in value, with its own gradient
    missed = missed + (-missed).clamp_min(0.0).detach()
    return keep_real(missed, t.query_mask)


def own_variance(t: Tokens, kind: SparseKind, Phi_q: Tensor) -> Tensor | None:
    """What is each query's alone: sigma^2 and what the inducing values miss.  [..., Q]"""
    noise = None
    if kind.include_noise:
        noise = keep_real(t.noise[..., 0].expand(*Phi_q.shape[:-1]), t.query_mask)
    if kind.conditional == "deterministic":
        return noise
    missed = missed_variance(t, Phi_q)
    return missed if noise is None else missed + noise


@dataclass(frozen=True, slots=True)
class TokenSums:
    """The sums of mean, variance and draws."""

    Phi_oo: Tensor  # [..., m, m] Phi_o^T Phi_o
    Psi_kk: Tensor  # [..., l, l] Psi_k^T Psi_k
    Psi_Phi_oo: Tensor  # [..., l, m] Psi_o^T Phi_o; Phi_oo itself for one inducing set
    Psi_kV: Tensor  # [..., l, D] Psi_k^T V


@dataclass(frozen=True, slots=True)
class DensitySums:
    """What log densities and the KL need beside `TokenSums`."""

    Phi_qq: Tensor  # [..., m, m] Phi_q^T Phi_q
    VV: Tensor  # [...] |V|^2
    real_queries: Tensor  # [...]
    real_keys: Tensor  # [...]


def over_shards(
    sums: TokenSums, densities: DensitySums, group: "ProcessGroup"
) -> tuple[TokenSums, DensitySums]:
    """Both over the tokens of all processes, in one all-reduce.

    Densities travel along because nobody knows yet whether they will be asked for, and a second round
    would cost more than their m^2 + 3 numbers per sequence and head.
    """
    matrices = (sums.Phi_oo, sums.Psi_kV, densities.Phi_qq)
    lead = broadcast(*(x.shape[:-2] for x in matrices))
    # one process may have a mask and another none: the counts take the same shape everywhere
    counts = [count.expand(lead) for count in (densities.real_queries, densities.real_keys)]
    one_set = sums.Psi_Phi_oo is sums.Phi_oo
    sent = [sums.Phi_oo, sums.Psi_kk, sums.Psi_kV, densities.Phi_qq, densities.VV, *counts]
    found = sum_over_shards(sent if one_set else [*sent, sums.Psi_Phi_oo], group)
    Phi_oo, Psi_kk, Psi_kV, Phi_qq, VV, real_queries, real_keys = found[:7]
    return (
        TokenSums(Phi_oo, Psi_kk, Phi_oo if one_set else found[7], Psi_kV),
        DensitySums(Phi_qq, VV, real_queries, real_keys),
    )


def latent_trace(o: Tensor, G: Tensor, *, chunk: int = 1024) -> Tensor:
    """G kappa(o, o) G^T by chunks of rows, forward and backward.  [..., m, m]

    o is [..., N, C], and G [..., m, N] is zero at padded tokens.
    """
    chunk = check_count("chunk", chunk)
    o, G = expanded(o, G)
    if wants_plain_operations():
        return G @ cross_gram(o, o) @ G.mT
    J: Tensor = _LatentTrace.apply(o, G, chunk)  # type: ignore[no-untyped-call]
    return J


def latent_trace_estimate(
    o: Tensor, G: Tensor, *, features: int, generator: Generator | None = None
) -> Tensor:
    """Unbiased estimate of the same from `features` random cosine and sine pairs.  [..., m, m]"""
    features = check_count("features", features)
    frequencies = torch.randn(o.shape[-1], features, dtype=o.dtype, device=o.device, generator=generator)
    (centred,) = about_centre(o)
    angle = centred @ frequencies  # [..., N, r]
    projected = G @ torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(features)
    return projected @ projected.mT


class _LatentTrace(torch.autograd.Function):
    """With E = K * (G^T S G), S the symmetric part of the incoming gradient:
    dG = 2 S G K,  do_i = -2 sum_j E_ij (o_i - o_j)."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, G: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(o, G)
        ctx.chunk = chunk
        J = G.new_zeros(*G.shape[:-1], G.shape[-2])  # [..., m, m]
        for rows in _chunks(o.shape[-2], chunk):
            J = J + G[..., rows] @ (cross_gram(o[..., rows, :], o) @ G.mT)
        return J

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        o, G = ctx.saved_tensors
        S = 0.5 * (grads[0] + grads[0].mT)  # [..., m, m]
        (centred,) = about_centre(o)
        SG = S @ G  # [..., m, N]
        grad_o, grad_G = [], []
        for rows in _chunks(o.shape[-2], ctx.chunk):
            K = cross_gram(o[..., rows, :], o)  # [..., b, N]
            grad_G.append(2 * SG @ K.mT)  # [..., m, b]
            E = K * (SG[..., rows].mT @ G)  # [..., b, N]
            grad_o.append(2 * pull(E, centred[..., rows, :], centred))  # [..., b, C]
        return torch.cat(grad_o, -2), torch.cat(grad_G, -1), None


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]


FusedObjective = Literal["dtc", "kl"]
FUSED_OBJECTIVES: tuple[FusedObjective, ...] = get_args(FusedObjective)
SCGPObjective = Literal["dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed"]
SCGP_OBJECTIVES: tuple[SCGPObjective, ...] = get_args(SCGPObjective)
Trace = Callable[[Tensor], Tensor]  # G -> G K_o G^T, exactly or estimated


@full_precision
def scgp_posterior(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    inducing_q: Tensor,  # [..., m, C]
    inducing_k: Tensor | None = None,  # [..., l, C]
    *,
    noise: Scalar,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    log_amplitude: Tensor | None = None,  # [..., Q]
    values: Values = "paper",
    include_noise: bool = True,
    conditional: Conditional = "deterministic",
    delta: float = 1e-6,
    group: "ProcessGroup | None" = None,
    objectives: Collection[FusedObjective] | None = None,
    features: UnitFeatures | None = None,
    with_draw: bool = False,
) -> "SCGPPosterior":
    """Sparse CGP prediction through inducing inputs m (z_q | z_o) and l (z_o | z_k) (eq. 15).

    Args:
        q: queries, which may be of another number than keys (cross-attention).
        k: keys.
        o: latent inputs, one per key.
        v: values.
        inducing_q: inducing inputs m.
        inducing_k: inducing inputs l; None takes one set for both stages.
        noise: sigma^2, one number or one per leading axis.
        scale_q: amplitude s_q of the queries.
        scale_k: amplitude s_k of the keys.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        log_amplitude: multiplies the query process per token.
        values: "paper" observes z_k = V; "dual" observes z_k = (Q_k + sigma^2 I) V, so that the mean
            approximates the exact model's.
        include_noise: the variance is of the noisy query process, as printed; False leaves sigma^2 out.
        conditional: z_q given the inducing values.  As printed it is "deterministic" but for the noise, so
            that the variance of a query *falls* to sigma^2 far from all inducing inputs; "independent"
            leaves each query what they do not tell, K_q - Q_q on the diagonal, so that it rises to the
            prior's there.
        delta: a fixed perturbation of the inducing Gram matrices: keep inducing inputs apart.
        group: the processes that share the tokens (section 12): q, k, o, v, their masks and amplitudes are
            this one's, and inducing inputs and parameters are the same on every process: one all-reduce here
            and one in the backward pass.  Each process then has the posterior of its own queries.
        objectives: which of "dtc" and "kl" will be asked of the posterior: fused kernels compute these with
            the mean, which is cheaper.  None announces both where gradients are recorded.
        features: those of the same tokens, where a CPU's training step has them already.
        with_draw: announces one independent draw with torch's own numbers, which fused kernels then make, but
            not under a group.

    Returns:
        The posterior of every query.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a matrix has no factor.
    """
    check_group(group)
    check_choice("values", values, VALUES)
    check_choice("conditional", conditional, CONDITIONALS)
    for objective in objectives or ():
        check_choice("objectives", objective, FUSED_OBJECTIVES)
    check_delta(delta)
    inducing = {"inducing_q": inducing_q} | ({} if inducing_k is None else {"inducing_k": inducing_k})
    t = prepare(
        q, k, v, o=o, inducing=inducing, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, mask_tokens=False,
    )  # fmt: skip
    kind = SparseKind(values, conditional, include_noise, delta, group)
    hidden = group is not None and torch.compiler.is_compiling()  # operators take no group
    if not hidden and why_not_fused_sparse(t) is None:
        both: tuple[FusedObjective, ...] = ("dtc", "kl") if torch.is_grad_enabled() else ()
        return FusedSCGPPosterior(t, kind, both if objectives is None else objectives, draw=with_draw)
    t = masked(t)
    if group is None and inducing_k is None and objectives is not None and len(objectives) < 2:
        if features is None:
            features = UnitFeatures.of(t.q, t.k, t.latent, t.inducing[0], t.mask, t.query_mask, delta)
        if features is not None:
            return ClosedSCGPPosterior(t, kind, objectives, features)
    return SCGPPosterior(t, kind)


class SCGPPosterior(Posterior):
    """Whitened sparse posterior; keeps the features for variance, draws, densities and KL.

    Args:
        t: checked and masked inputs.
        kind: which sparse model it is.
    """

    def __init__(self, t: Tokens, kind: SparseKind) -> None:
        self.t, self.kind = t, kind
        delta, group = kind.delta, kind.group
        m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
        self.L_m = inducing_root(m, delta)  # [..., m, m]
        self.L_l = self.L_m if l is m else inducing_root(l, delta)  # [..., l, l]
        o = t.latent
        self.Phi_q = t.amplify(whitened_features(t.q, m, self.L_m, t.query_mask))  # [..., Q, m]
        self.Phi_o = whitened_features(o, m, self.L_m, t.mask)  # [..., K, m]
        self.Psi_o = self.Phi_o if l is m else whitened_features(o, l, self.L_l, t.mask)  # [..., K, l]
        self.Psi_k = t.scale_k * whitened_features(t.k, l, self.L_l, t.mask)  # [..., K, l]
        Phi_oo = self.Phi_o.mT @ self.Phi_o  # [..., m, m]
        crossed = Phi_oo if l is m else self.Psi_o.mT @ self.Phi_o  # [..., l, m]
        self.sums = TokenSums(Phi_oo, self.Psi_k.mT @ self.Psi_k, crossed, self.Psi_k.mT @ t.v)
        if group is not None:
            self.sums, self._kept_density_sums = over_shards(self.sums, self.density_sums, group)
        # from here to the mean nothing knows how many tokens there are
        self.L_B = Root.of_one_plus(self.sums.Phi_oo, t.noise, "Phi_o^T Phi_o")  # [..., m, m]
        self.L_Bl = Root.of_one_plus(self.sums.Psi_kk, t.noise, "Psi_k^T Psi_k")  # [..., l, l]
        S = self.sums.Psi_Phi_oo / t.noise  # [..., l, m]
        self.T = self.L_Bl.white(self.L_B.white_rows(S))  # [..., l, m]
        c = self.T.mT @ self._whitened_values(kind.values)  # [..., m, D]
        # mean = Phi_q c: the N x m features touch one small matrix only
        self.c = self.L_B.back(c)  # [..., m, D]
        super().__init__(self.Phi_q @ self.c, t.query_mask, t.dtype)  # eq. 15

    @kept
    def density_sums(self) -> DensitySums:
        """The sums of log densities and KL; under a group they come with the others."""
        t, Phi_qq = self.t, self.Phi_q.mT @ self.Phi_q
        return DensitySums(Phi_qq, t.v.square().sum((-2, -1)), t.real_queries(), t.real_keys())

    def real_counts(self) -> tuple[Tensor, Tensor]:
        """Real queries and keys, of all processes under a group.  [...], [...]"""
        return self.density_sums.real_queries, self.density_sums.real_keys

    def _whitened_values(self, values: Values) -> Tensor:
        """L_Bl^-1 Psi_k^T z_k / sigma^2 for z_k = V or (Q_k + sigma^2 I) V.  [..., l, D]"""
        if values == "dual":
            return self.L_Bl.lower().mT @ self.sums.Psi_kV
        return self.L_Bl.white(self.sums.Psi_kV / self.t.noise)

    @kept
    def R_c(self) -> Tensor:
        """L_B^-T R, so that cov = sigma^2 I + Phi_q R_c R_c^T Phi_q^T.  [..., m, m]"""
        eye = torch.eye(self.T.shape[-1], dtype=self.T.dtype, device=self.T.device)
        inverse = self.L_B.white(eye)  # [..., m, m]
        inner = 2 * eye - inverse @ inverse.mT + self.T.mT @ self.T
        return inverse.mT @ Root.of(inner, name="2I - B^-1 + T^T T", noise=self.t.noise).lower()

    @full_precision
    def _raw_variance(self) -> Tensor:
        signal = (self.Phi_q @ self.R_c).square().sum(-1)  # [..., Q]
        own = self._own_variance()
        return signal if own is None else signal + own

    def _own_variance(self) -> Tensor | None:
        return own_variance(self.t, self.kind, self.Phi_q)

    def _prior_stddev(self) -> Tensor:
        """Of the prior Phi_q Phi_q^T of the sparse model, with what is each query's alone."""
        signal, own = self.Phi_q.square().sum(-1), self._own_variance()
        return (signal if own is None else signal + own).sqrt()

    def _full_covariance(self) -> Tensor:
        F = self.Phi_q @ self.R_c  # [..., Q, m]
        own = self._own_variance()
        return F @ F.mT if own is None else F @ F.mT + torch.diag_embed(own)

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        deviation = self.Phi_q @ (self.R_c @ self._shared_normal(n, self.R_c.shape[-1], generator))
        own = self._own_variance()
        if own is None:
            return deviation
        # sqrt has an infinite slope at 0
        stddev = torch.where(own > 0, torch.where(own > 0, own, 1.0).sqrt(), 0.0)
        return deviation + stddev[..., None] * self._normal(n, self.t.q.shape[-2], generator)

    def _normal(self, n: int, rows: int, generator: Source) -> Tensor:
        if self.kind.group is not None and not isinstance(generator, ShardNoise):
            raise ValueError(
                "expected generator to be a ShardNoise for draws under a group, whose processes must share "
                f"some numbers and not others, got {type(generator).__name__}"
            )
        return super()._normal(n, rows, generator)

    def _shared_normal(self, n: int, rows: int, generator: Source) -> Tensor:
        """epsilon_2, which correlates tokens: the same numbers on every process.  [n, ..., rows, D]"""
        if not isinstance(generator, ShardNoise):
            return self._normal(n, rows, generator)
        shape = (n, *self._mean.shape[:-2], rows, self._mean.shape[-1])
        return generator.shared_normal(shape, self._mean.dtype, self._mean.device)

    @full_precision
    def log_density(
        self,
        objective: SCGPObjective = "dtc",
        *,
        chunk: int = 1024,
        features: int | None = None,
        generator: Generator | None = None,
    ) -> LogDensity:
        """log p of the sparse mean and observed values (section 4, eq. 16); negate it for a regulariser.

        "dtc" (the default) and "dtc_bound" are O(N m^2).  The others hold the trace with the N x N
        kernel of the latent inputs.  Under a group, which takes the first two, the density is that of all
        tokens, the same on every process, and its gradient counts once in the sum of their losses.

        Args:
            objective: "dtc", "dtc_bound", "marginal", "jensen", "double_jensen" or "printed".
            chunk: rows in which the trace is taken exactly, in O(N m) memory.
            features: number of random features that estimate it instead, without bias, for the objectives
                linear in it ("jensen", "double_jensen", "printed").
            generator: of the random features.

        Returns:
            Both terms.

        Raises:
            ValueError: the objective is unknown, has no random features, or takes no group.
            NotPositiveDefiniteError: a matrix has no factor.
        """
        check_choice("objective", objective, SCGP_OBJECTIVES)
        if features is not None and objective in ("dtc", "dtc_bound", "marginal"):
            raise ValueError(
                f"features={features} estimates a trace that {objective!r} does not hold linearly: "
                "use it with jensen, double_jensen or printed"
            )
        if objective == "dtc":
            return self._dtc()
        if objective == "dtc_bound":
            return self._of_all_tokens(_query_bound(self), _key_bound(self))
        if self.kind.group is not None:
            raise ValueError(
                "expected objective to be dtc or dtc_bound under a group, whose processes share sums over "
                f"tokens and no pairs of them, got {objective!r}"
            )
        t, z_k = self.t, self.t.v
        if self.kind.values == "dual":
            z_k = self.Psi_k @ (self.Psi_k.mT @ t.v) + t.noise * t.v  # [..., K, D]
        o = t.latent - t.latent.detach().mean(-2, keepdim=True)
        trace: Trace = partial(latent_trace, o, chunk=chunk)
        if features is not None:
            trace = partial(latent_trace_estimate, o, features=features, generator=generator)
        if objective == "printed":
            return as_log_density(t, *_printed_terms(self, z_k, trace))
        query = _term(objective, self._mean, self.Phi_q, self.Phi_o, t.noise, t.real_queries(), trace)
        key = _term(objective, z_k, self.Psi_k, self.Psi_o, t.noise, t.real_keys(), trace)
        return as_log_density(t, query, key)

    def _dtc(self) -> LogDensity:
        """log N(N; 0, sigma^2 I + Phi_q Phi_q^T) and log N(z_k; 0, sigma^2 I + Psi_k Psi_k^T)."""
        sums, (quadratic, L_0) = self.density_sums, self._query_quadratic()
        query = self._evidence(quadratic, L_0, sums.real_queries)
        return self._of_all_tokens(query, self._evidence(_key_quadratic(self), self.L_Bl, sums.real_keys))

    def _evidence(self, quadratic: Tensor, L: Root, real: Tensor) -> Tensor:
        scalar, D = self.t.noise[..., 0, 0], self.t.v.shape[-1]
        return -0.5 * (quadratic + D * (L.log_det() + real * (2 * math.pi * scalar).log()))

    def _of_all_tokens(self, query: Tensor, key: Tensor) -> LogDensity:
        """Both terms, which the processes of a group share."""
        query, key = torch.broadcast_tensors(query, key)  # keys shared by a batch count in each sequence
        query, key = (counted_once(x, self.kind.group) for x in (query, key))
        return LogDensity(query, key, *self.real_counts(), self.t.v.shape[-1])

    def _query_quadratic(self) -> tuple[Tensor, Root]:
        """N^T (sigma^2 I + Phi_q Phi_q^T)^-1 N, summed over channels, and chol(B_0).  [...], [..., m, m]"""
        noise, scalar = self.t.noise, self.t.noise[..., 0, 0]
        G = self.density_sums.Phi_qq  # [..., m, m]
        L_0 = Root.of_one_plus(G, noise, "Phi_q^T Phi_q")
        y = L_0.solve(self.c)  # [..., m, D]
        Gy = G @ y  # [..., m, D]
        return (y * Gy).sum((-2, -1)) / scalar + Gy.square().sum((-2, -1)) / scalar.square(), L_0

    @full_precision
    def kl(self) -> Tensor:
        """KL from the DTC prior sigma^2 I + Phi_q Phi_q^T (eq. 24), in O(N m^2).

        Under a group it is that of all tokens, the same on every process, and its gradient counts once in
        the sum of their losses.

        Returns:
            At least 0, summed over tokens and channels.  [...]

        Raises:
            NotPositiveDefiniteError: a matrix has no factor.
        """
        noise, G, R_c = self.t.noise, self.density_sums.Phi_qq, self.R_c  # [..., m, m] each
        quadratic, L_0 = self._query_quadratic()  # [...], [..., m, m]
        shrink = L_0.solve(G / noise)  # [..., m, m]  I - B_0^-1
        excess = R_c @ R_c.mT - torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
        inner = Root.of_one_plus(R_c.mT @ G @ R_c, noise, "R_c^T G R_c")
        divergence = (excess * shrink.mT).sum((-2, -1)) + L_0.log_det() - inner.log_det()
        return counted_once(0.5 * (quadratic + self.t.v.shape[-1] * divergence), self.kind.group)


class FusedSCGPPosterior(SCGPPosterior):
    """Mean, variance, dtc and KL from fused kernels; the rest from a plain posterior, made when asked.

    Args:
        t: checked inputs, not masked.
        kind: which sparse model it is.
        objectives: what is computed with the mean.
        draw: whether one draw will be asked for.
    """

    def __init__(
        self, t: Tokens, kind: SparseKind, objectives: Collection[FusedObjective], *, draw: bool = False
    ) -> None:
        self.t, self.kind = t, kind
        self._moments = self._compute(objectives, draw=draw and kind.group is None)
        Posterior.__init__(self, self._moments.mean, None, t.dtype)
        self._query_mask = t.query_mask
        self._kept__variance = self._moments.variance
        self._announced_draw = self._moments.draw

    def _compute(self, objectives: Collection[FusedObjective], *, draw: bool = False) -> SparseMoments:
        asked = {"density": "dtc" in objectives, "kl": "kl" in objectives}
        kind = self.kind
        options = Options(
            kind.values == "dual", kind.include_noise, kind.delta, **asked,
            independent=kind.conditional == "independent", group=kind.group,
        )  # fmt: skip
        return fused_scgp(self.t, options, draw=draw)

    @kept
    @full_precision
    def plain(self) -> SCGPPosterior:
        """The same posterior by plain operations, with its features and factors."""
        return SCGPPosterior(masked(self.t), self.kind)

    @full_precision
    def fused(self, objective: FusedObjective) -> SparseMoments:
        """What the kernels gave; computed anew if the objective was not announced."""
        there = self._moments.kl if objective == "kl" else self._moments.query
        if there is None:
            self._moments = self._compute((objective,))
        return self._moments

    def log_density(self, objective: SCGPObjective = "dtc", **options: Any) -> LogDensity:
        """As `SCGPPosterior.log_density`; "dtc" comes from the kernels."""
        if objective != "dtc" or options.get("features") is not None:
            return self.plain.log_density(objective, **options)
        fused = self.fused("dtc")
        # asked for, so there: the types cannot say it
        assert fused.query is not None
        assert fused.key is not None
        return self._of_all_tokens(fused.query, fused.key)

    def kl(self) -> Tensor:
        """As `SCGPPosterior.kl`, from the kernels.  [...]"""
        divergence = self.fused("kl").kl
        assert divergence is not None
        return counted_once(divergence, self.kind.group)

    def real_counts(self) -> tuple[Tensor, Tensor]:
        """As the kernels counted them."""
        queries, keys = self._moments.real_queries, self._moments.real_keys
        if self.kind.group is None:
            return self.t.real_queries(), self.t.real_keys()
        return self.plain.real_counts() if queries is None or keys is None else (queries, keys)

    def _prior_stddev(self) -> Tensor:
        return self.plain._prior_stddev()

    def _full_covariance(self) -> Tensor:
        return self.plain._full_covariance()

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        return self.plain._joint_deviation(n, generator)


class ClosedSCGPPosterior(FusedSCGPPosterior):
    """The same from closed forms, in a CPU's training step.

    Args:
        t: checked and masked inputs.
        kind: which sparse model it is.
        objectives: what is computed with the mean, one at most.
        features: of the tokens.
    """

    def __init__(
        self, t: Tokens, kind: SparseKind, objectives: Collection[FusedObjective], features: UnitFeatures
    ) -> None:
        self._unit = features
        super().__init__(t, kind, objectives)
        del self._kept__variance  # whose share of each query alone is added when it is asked for

    @full_precision
    def _raw_variance(self) -> Tensor:
        Phi_q = self._unit.q.transpose(0, 1)
        if self.kind.conditional == "independent":
            Phi_q = self.t.amplify(Phi_q)
        own, signal = own_variance(self.t, self.kind, Phi_q), self._moments.variance
        return signal if own is None else signal + own

    def _compute(self, objectives: Collection[FusedObjective], *, draw: bool = False) -> SparseMoments:
        del draw  # made when it is asked for
        t, Phi, D = self.t, self._unit, self.t.v.shape[-1]
        cost: SparseCost = next(iter(objectives), "none")
        B, H = t.q.shape[:2]

        def by_heads(x: Tensor) -> Tensor:  # [..., N, X] as [H, B, N, X]
            return x.expand(B, H, *x.shape[-2:]).transpose(0, 1)

        a = t.amplify(t.q.new_ones(1, 1))  # [..., Q, 1]
        found = closed_sparse(
            Phi.q, Phi.o, by_heads(t.scale_k) * Phi.k, by_heads(t.v), by_heads(a)[..., 0], by_heads(t.noise),
            dual=self.kind.values == "dual", cost=cost,
        )  # fmt: skip
        assert found is not None  # as the features were
        mean, signal, query, key, kl = (None if x is None else x.transpose(0, 1) for x in found)
        if query is not None and key is not None:
            constant = (2 * math.pi * t.noise[..., 0, 0]).log()
            query, key = (
                -0.5 * (x + D * real * constant)
                for x, real in ((query, t.real_queries()), (key, t.real_keys()))
            )
        assert mean is not None
        assert signal is not None
        return SparseMoments(mean, signal, query, key, kl)


def bound(square: Tensor, traces: Tensor, D: int, noise: Tensor, real: Tensor) -> Tensor:
    """-[|X|^2 + s traces] / (2 sigma^2) - (n s / 2) log 2 pi sigma^2 (eq. 16).  [...]"""
    scalar = noise[..., 0, 0]
    return -0.5 * ((square + D * traces) / scalar + real * D * (2 * math.pi * scalar).log())


def _key_quadratic(p: SCGPPosterior) -> Tensor:
    """z_k^T (sigma^2 I + Psi_k Psi_k^T)^-1 z_k, summed over channels.  [...]

    For z_k = (sigma^2 I + Psi_k Psi_k^T) V it is a sum of squares; for z_k = V the minimum of a ridge
    regression, |V - Psi_k w|^2 / sigma^2 + |w|^2, whose residual is taken token by token where all tokens
    are here: from sums it loses its digits when V lies in the span of Psi_k.
    """
    scalar, P = p.t.noise[..., 0, 0], p.sums.Psi_kV
    if p.kind.values == "dual":
        return scalar * p.density_sums.VV + P.square().sum((-2, -1))
    w = p.L_Bl.solve(P / p.t.noise)  # [..., l, D]
    fit = (p.t.v - p.Psi_k @ w).square().sum((-2, -1)) if p.kind.group is None else _fit_from_sums(p, w)
    return fit / scalar + w.square().sum((-2, -1))


def _fit_from_sums(p: SCGPPosterior, w: Tensor) -> Tensor:
    """|V - Psi_k w|^2 = |V|^2 - 2 <P, w> + <w, S w>; a difference, so in float64.  [...]"""
    VV, P, S, wide = (x.double() for x in (p.density_sums.VV, p.sums.Psi_kV, p.sums.Psi_kk, w))
    return (VV + (wide * (S @ wide - 2 * P)).sum((-2, -1))).to(w.dtype)


def _query_bound(p: SCGPPosterior) -> Tensor:
    sums, D = p.density_sums, p.t.v.shape[-1]
    square = (p.c * (sums.Phi_qq @ p.c)).sum((-2, -1))  # |N|^2
    return bound(square, _trace(sums.Phi_qq), D, p.t.noise, sums.real_queries)


def _key_bound(p: SCGPPosterior) -> Tensor:
    sums, P, S, D = p.density_sums, p.sums.Psi_kV, p.sums.Psi_kk, p.t.v.shape[-1]
    square = sums.VV
    if p.kind.values == "dual":  # |Psi_k P + sigma^2 V|^2
        scalar = p.t.noise[..., 0, 0]
        cross = (P * (S @ P)).sum((-2, -1)) + 2 * scalar * P.square().sum((-2, -1))
        square = cross + scalar.square() * sums.VV
    return bound(square, _trace(S), D, p.t.noise, sums.real_keys)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(-1)


def _term(
    objective: Literal["marginal", "jensen", "double_jensen"],
    X: Tensor,  # [..., N, D]
    Phi: Tensor,  # [..., N, m]
    Phi_o: Tensor,  # [..., K, m]
    noise: Tensor,  # [..., 1, 1]
    real: Tensor,  # [...]
    trace: Trace,
) -> Tensor:
    """One side's log density under `objective`.  [...]"""
    L_B = lowrank_root(Phi_o.mT @ Phi_o, noise, "Phi_o^T Phi_o")  # [..., m, m]
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
        L_H = lowrank_root(HH, noise, "H H^T")  # [..., m, m]
        shrink = solve(HH / noise, L_H)  # [..., m, m]
        trace_term = (J * shrink.mT).sum((-2, -1))  # tr(S^-1 A K_o A^T) = <J, HH^T (sigma^2 I + HH^T)^-1>
        return lowrank_log_density(X, H_t, noise, real) - 0.5 * X.shape[-1] * trace_term
    assert_never(objective)


def _printed_terms(p: SCGPPosterior, z_k: Tensor, trace: Trace) -> tuple[Tensor, Tensor]:
    t, delta = p.t, p.kind.delta
    m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
    K_mq = t.amplify(keep_rows(cross_gram(t.q, m), t.query_mask)).mT
    K_lk = t.scale_k * keep_rows(cross_gram(t.k, l), t.mask).mT
    K_mo, K_lo = (keep_rows(cross_gram(t.latent, x), t.mask).mT for x in (m, l))
    return (
        _printed(p._mean, m, K_mq, K_mo, delta, t.noise, t.real_queries(), trace),
        _printed(z_k, l, K_lk, K_lo, delta, t.noise, t.real_keys(), trace),
    )


def _printed(
    X: Tensor, m: Tensor, K_mx: Tensor, K_mo: Tensor, delta: float, noise: Tensor, real: Tensor, trace: Trace
) -> Tensor:
    """Appendix E of the paper to the letter, P = (K_mm + I / sigma^2)^-1, for X [..., N, D].  [...]"""
    P_root = cholesky(with_diagonal(gram(m), delta + 1 / noise), name="K_mm + I / noise", noise=noise)
    H = solve_triangular(P_root, K_mx, upper=False)  # [..., m, N]
    G = solve_triangular(P_root, K_mo, upper=False)  # [..., m, K]
    t_1 = (H @ H.mT * trace(G)).sum((-2, -1)) / noise[..., 0, 0].square()
    t_2 = H.square().sum((-2, -1))
    scalar, D = noise[..., 0, 0], X.shape[-1]
    error = X.square().sum((-2, -1)) + D * (t_1 + t_2)
    return -0.5 * error / scalar - D * (real * math.log(2 * math.pi) + 0.5 / scalar.sqrt())
