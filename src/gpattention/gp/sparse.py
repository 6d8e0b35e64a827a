"""Sparse correlated-GP attention (SCGP): inducing inputs, linear in the number of tokens (eq. 13-15).

    L_m = chol(K_mm + delta I),  L_l = chol(K_ll + delta I)
    Phi_q = K_qm L_m^-T,  Phi_o = K_om L_m^-T,  Psi_o = K_ol L_l^-T,  Psi_k = K_kl L_l^-T
    B_m = I + Phi_o^T Phi_o / sigma^2 = L_B L_B^T,   B_l = I + Psi_k^T Psi_k / sigma^2 = L_Bl L_Bl^T
    H = L_B^-1 Phi_q^T,   T = L_Bl^-1 Psi_o^T Phi_o L_B^-T / sigma^2
    mean = H^T T^T (L_Bl^-1 Psi_k^T V / sigma^2)
    cov  = sigma^2 I + H^T R R^T H,   R R^T = 2 I - L_B^-1 L_B^-T + T^T T >= I                    (15)

Time O(N m^2), memory O(N m); no N x N matrix forward or backward.  The long axis always is a row
axis: `solve_triangular` with a million columns is a trap.  Tokens meet in the sums of `sparse_sums`
alone, so they may be spread over the processes of a group.  Where `gp.fused` applies, its kernels do it
all with nothing of the features in memory.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_choice
from gpattention.gp.cholesky import cholesky
from gpattention.gp.fused.sparse.launch import Options
from gpattention.gp.fused.sparse.posterior import SparseMoments, fused_scgp, why_not_fused_sparse
from gpattention.gp.inputs import Scalar, Tokens, check_delta, masked, prepare, with_diagonal
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import Posterior
from gpattention.gp.precision import full_precision
from gpattention.gp.shard_noise import ShardNoise
from gpattention.gp.sharding import check_group
from gpattention.gp.sparse_features import features, inducing_root, missed_variance
from gpattention.gp.sparse_kind import CONDITIONALS, VALUES, Conditional, SparseKind, Values
from gpattention.gp.sparse_sums import DensitySums, density_sums, over_shards, token_sums

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FusedObjective = Literal["dtc", "kl"]
FUSED_OBJECTIVES: tuple[FusedObjective, ...] = get_args(FusedObjective)


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
) -> "SCGPPosterior":
    """Sparse CGP prediction through inducing inputs m (z_q | z_o) and l (z_o | z_k) (eq. 15).

    `inducing_k=None` takes one set for both stages.  `values="paper"` observes z_k = V; `"dual"`
    observes z_k = (Q_k + sigma^2 I) V, so that the mean approximates the exact model's.  The
    variance is of the noisy query process, as printed; `include_noise=False` leaves sigma^2 out.
    `delta` is a fixed perturbation of the inducing Gram matrices: keep inducing inputs apart.

    `conditional` is z_q given the inducing values.  As printed it is deterministic but for the noise, so
    that the variance of a query *falls* to sigma^2 far from all inducing inputs; "independent" leaves each
    query what they do not tell, K_q - Q_q on the diagonal, so that it rises to the prior's there.

    With a `group`, q, k, o, v, their masks and amplitudes are this process's shard of the tokens, and
    inducing inputs and parameters are the same on every process: one all-reduce here and one in the
    backward pass (section 12, `gp.sharding`).  Each process then has the posterior of its own queries.

    `objectives` announces which of "dtc" and "kl" will be asked of the posterior: fused kernels compute
    these with the mean, which is cheaper.  None announces both where gradients are recorded.
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
    if why_not_fused_sparse(t) is None:
        both: tuple[FusedObjective, ...] = ("dtc", "kl") if torch.is_grad_enabled() else ()
        return FusedSCGPPosterior(t, kind, both if objectives is None else objectives)
    return SCGPPosterior(masked(t), kind)


class SCGPPosterior(Posterior):
    """Whitened sparse posterior; keeps the features for variance, draws, densities and KL."""

    def __init__(self, t: Tokens, kind: SparseKind) -> None:
        self.t, self.kind = t, kind
        delta, group = kind.delta, kind.group
        m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
        self.L_m = inducing_root(m, delta)  # [..., m, m]
        self.L_l = self.L_m if l is m else inducing_root(l, delta)  # [..., l, l]
        o = t.latent
        self.Phi_q = t.amplify(features(t.q, m, self.L_m, t.query_mask))  # [..., Q, m]
        self.Phi_o = features(o, m, self.L_m, t.mask)  # [..., K, m]
        self.Psi_o = self.Phi_o if l is m else features(o, l, self.L_l, t.mask)  # [..., K, l]
        self.Psi_k = t.scale_k * features(t.k, l, self.L_l, t.mask)  # [..., K, l]
        self.sums = token_sums(self.Phi_o, self.Psi_o, self.Psi_k, t.v)
        self._density_sums: DensitySums | None = None
        if group is not None:
            self.sums, self._density_sums = over_shards(self.sums, density_sums(t, self.Phi_q), group)
        # from here to the mean nothing knows how many tokens there are
        self.L_B = self._root(self.sums.Phi_oo)  # [..., m, m]
        self.L_Bl = self._root(self.sums.Psi_kk)  # [..., l, l]
        S = self.sums.Psi_Phi_oo / t.noise  # [..., l, m]
        S = solve_triangular(self.L_B.mT, S, upper=True, left=False)
        self.T = solve_triangular(self.L_Bl, S, upper=False)  # [..., l, m]
        c = self.T.mT @ self._whitened_values(kind.values)  # [..., m, D]
        # mean = Phi_q c: the N x m features touch one small matrix only
        self.c = solve_triangular(self.L_B.mT, c, upper=True)  # [..., m, D]
        super().__init__(self.Phi_q @ self.c, t.query_mask, t.dtype)  # eq. 15
        self._R_c: Tensor | None = None

    def plain(self) -> "SCGPPosterior":
        """The posterior that has the features and factors: this one."""
        return self

    def fused(self, objective: FusedObjective) -> SparseMoments | None:
        """What fused kernels gave, with that objective, where they apply."""
        return None

    def density_sums(self) -> DensitySums:
        """The sums of log densities and KL; under a group they came with the others."""
        if self._density_sums is None:
            self._density_sums = density_sums(self.t, self.Phi_q)
        return self._density_sums

    def real_counts(self) -> tuple[Tensor, Tensor]:
        """Real queries and keys, of all processes under a group.  [...], [...]"""
        sums = self.density_sums()
        return sums.real_queries, sums.real_keys

    def _root(self, FF: Tensor) -> Tensor:
        """chol(I + F^T F / sigma^2).  [..., m, m]"""
        B = with_diagonal(FF / self.t.noise, 1.0)
        return cholesky(B, name="I + Phi^T Phi / noise", noise=self.t.noise)

    def _whitened_values(self, values: Values) -> Tensor:
        """L_Bl^-1 Psi_k^T z_k / sigma^2 for z_k = V or (Q_k + sigma^2 I) V.  [..., l, D]"""
        if values == "dual":
            return self.L_Bl.mT @ self.sums.Psi_kV
        return solve_triangular(self.L_Bl, self.sums.Psi_kV / self.t.noise, upper=False)

    def covariance_root(self) -> Tensor:
        """R_c = L_B^-T R, so that cov = sigma^2 I + Phi_q R_c R_c^T Phi_q^T.  [..., m, m]"""
        if self._R_c is None:
            eye = torch.eye(self.L_B.shape[-1], dtype=self.L_B.dtype, device=self.L_B.device)
            inverse = solve_triangular(self.L_B, eye, upper=False)  # [..., m, m]
            inner = 2 * eye - inverse @ inverse.mT + self.T.mT @ self.T
            R = cholesky(inner, name="2I - B^-1 + T^T T", noise=self.t.noise)
            self._R_c = inverse.mT @ R
        return self._R_c

    @full_precision
    def _raw_variance(self) -> Tensor:
        signal = (self.Phi_q @ self.covariance_root()).square().sum(-1)  # [..., Q]
        own = self._own_variance()
        return signal if own is None else signal + own

    def _own_variance(self) -> Tensor | None:
        """What is each query's alone: sigma^2 and what the inducing values miss.  [..., Q]"""
        noise = self._noise_per_query() if self.kind.include_noise else None
        if self.kind.conditional == "deterministic":
            return noise
        missed = missed_variance(self.t, self.Phi_q)
        return missed if noise is None else missed + noise

    def _prior_stddev(self) -> Tensor:
        """Of the prior Phi_q Phi_q^T of the sparse model, with what is each query's alone."""
        signal, own = self.Phi_q.square().sum(-1), self._own_variance()
        return (signal if own is None else signal + own).sqrt()

    def _full_covariance(self) -> Tensor:
        F = self.Phi_q @ self.covariance_root()  # [..., Q, m]
        own = self._own_variance()
        return F @ F.mT if own is None else F @ F.mT + torch.diag_embed(own)

    def _noise_per_query(self) -> Tensor:
        """sigma^2 at real queries, 0 at padded ones.  [..., Q]"""
        noise = self.t.noise[..., 0].expand(*self._mean.shape[:-1])
        return noise if self.t.query_mask is None else torch.where(self.t.query_mask, noise, 0.0)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        root = self.covariance_root()
        deviation = self.Phi_q @ (root @ self._shared_normal(n, root.shape[-1], generator))
        own = self._own_variance()
        if own is None:
            return deviation
        # sqrt has an infinite slope at 0
        stddev = torch.where(own > 0, torch.where(own > 0, own, 1.0).sqrt(), 0.0)
        return deviation + stddev[..., None] * self._normal(n, self.t.q.shape[-2], generator)

    def _normal(self, n: int, rows: int, generator: Generator | NoiseSource | None) -> Tensor:
        if self.kind.group is not None and not isinstance(generator, ShardNoise):
            raise ValueError(
                "expected generator to be a ShardNoise for draws under a group, whose processes must share "
                f"some numbers and not others, got {type(generator).__name__}"
            )
        return super()._normal(n, rows, generator)

    def _shared_normal(self, n: int, rows: int, generator: Generator | NoiseSource | None) -> Tensor:
        """epsilon_2, which correlates tokens: the same numbers on every process.  [n, ..., rows, D]"""
        if not isinstance(generator, ShardNoise):
            return self._normal(n, rows, generator)
        shape = (n, *self._mean.shape[:-2], rows, self._mean.shape[-1])
        return generator.shared_normal(shape, self._mean.dtype, self._mean.device)


class FusedSCGPPosterior(SCGPPosterior):
    """Mean, variance, dtc and KL from fused kernels; the rest from a plain posterior, made when asked."""

    def __init__(
        self, t: Tokens, kind: SparseKind, objectives: Collection[FusedObjective]
    ) -> None:  # t is not masked
        self.t, self.kind = t, kind
        self._plain: SCGPPosterior | None = None
        self._moments = self._compute(objectives)
        Posterior.__init__(self, self._moments.mean, None, t.dtype)
        self._query_mask = t.query_mask
        self._cached_variance = self._moments.variance

    def _compute(self, objectives: Collection[FusedObjective]) -> SparseMoments:
        asked = {"density": "dtc" in objectives, "kl": "kl" in objectives}
        kind = self.kind
        options = Options(
            kind.values == "dual", kind.include_noise, kind.delta, **asked,
            independent=kind.conditional == "independent", group=kind.group,
        )  # fmt: skip
        return fused_scgp(self.t, options)

    @full_precision
    def plain(self) -> SCGPPosterior:
        """The same posterior by plain operations, with its features and factors."""
        if self._plain is None:
            self._plain = SCGPPosterior(masked(self.t), self.kind)
        return self._plain

    @full_precision
    def fused(self, objective: FusedObjective) -> SparseMoments:
        """What the kernels gave; computed anew if the objective was not announced."""
        there = self._moments.kl if objective == "kl" else self._moments.query
        if there is None:
            self._moments = self._compute((objective,))
        return self._moments

    def real_counts(self) -> tuple[Tensor, Tensor]:
        """As the kernels counted them."""
        told = self._moments
        if self.kind.group is None:
            return self.t.real_queries(), self.t.real_keys()
        if told.real_queries is None or told.real_keys is None:
            return self.plain().real_counts()
        return told.real_queries, told.real_keys

    def _prior_stddev(self) -> Tensor:
        return self.plain()._prior_stddev()

    def _full_covariance(self) -> Tensor:
        return self.plain()._full_covariance()

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        return self.plain()._joint_deviation(n, generator)
