"""Softmax attention as a GP posterior mean, with its variance (eq. 21-22).

    q~ = q d^-1/4, k~ = k d^-1/4, each minus its own centre;  lse_i = log sum_j exp(q_i . k_j / sqrt d)
    log a_i = log t + 1/2 |q~_i - qbar|^2 + q~_i . kbar - lse_i                                   (21)
    mean = softmax(Q K^T / sqrt d) V exactly,   var_i = a_i^2 u_i                                 (22)
    u_i  = 1 - |L^-1 kappa(k~, q~_i)|^2,   L = chol(kappa(k~, k~) + sigma^2 I)

The key amplitudes b_j = exp(|k~_j|^2 / 2 + ...) overflow and are never formed; a_i stays a logarithm.
"""

from typing import Literal

from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.cholesky import cholesky
from gpattention.gp.direct import UnitDirect, prior_draw
from gpattention.gp.inputs import Scalar, Tokens, check_delta, keep_rows, prepare, real_mean, with_diagonal
from gpattention.gp.kernel_attention import softmax_attention
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import Posterior
from gpattention.gp.precision import full_precision
from gpattention.gp.shapes import broadcast
from gpattention.gp.softmax_amplitude import query_log_amplitude
from gpattention.gp.sparse_features import features, inducing_root
from gpattention.gp.unit_process import UnitProcess, real_key_counts, within_bounds

Centre = tuple[Tensor, Tensor]  # of queries and keys, each [..., C] in the units of q and k


@full_precision
def softmax_posterior(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    prior_scale: Scalar = 1.0,  # t of eq. 21
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    causal: bool = False,
    centre: Centre | Literal["tokens", "none"] | None = None,
    inducing: Tensor | None = None,  # [..., l, C] in the units of k
    delta: float = 1e-6,
) -> Posterior:
    """Softmax attention, untouched, plus the predictive variance of eq. 22.

    The variance is proportional to `prior_scale`^2; `.log_variance` never overflows.  Queries and
    keys are centred separately on their token means (`centre="tokens"`, the default), which removes
    the arbitrary effect of a key bias; causal use takes constants instead (default `"none"`, zero),
    because a mean over tokens would look ahead.  With `inducing` the variance takes its sparse form:
    no matrix of keys is factored.  Queries that see no real key have mean and variance 0: the amplitude of
    eq. 21 contains the keys, and without any there is no prior, which other kinds answer with.
    """
    check_delta(delta)
    if inducing is not None and causal:
        raise ValueError("the sparse variance has no causal form: drop inducing or causal")
    t = prepare(
        q, k, v, noise=noise, scale_q=prior_scale, mask=mask, query_mask=query_mask, causal=causal,
        inducing=None if inducing is None else {"inducing": inducing}, scale_name="prior_scale",
        distances=False,
    )  # fmt: skip
    dtype, shrink = t.v.dtype, q.shape[-1] ** -0.25
    q, k = keep_rows(q.to(dtype), t.query_mask), keep_rows(k.to(dtype), t.mask)
    lead = broadcast(q.shape[:-2], k.shape[:-2], t.v.shape[:-2])
    mean = softmax_attention(
        *(x.expand(*lead, *x.shape[-2:]) for x in (q, k, t.v)),
        mask=t.mask, query_mask=t.query_mask, causal=causal,
    )  # fmt: skip
    q, k = q * shrink, k * shrink
    q_bar, k_bar = _centres(q, k, t, centre, causal, shrink)  # each [..., 1, C]
    sees_key = _sees_a_key(t, causal)  # [..., Q] or None
    process = UnitProcess(
        keep_rows(q - q_bar, sees_key), keep_rows(k - k_bar, t.mask), t.noise, t.mask, sees_key, causal
    )
    return SoftmaxPosterior(
        mean,
        process,
        t,
        logits_of=(q, k, k_bar),
        inducing=None if inducing is None else inducing.to(dtype) * shrink - k_bar,
        delta=delta,
    )


class SoftmaxPosterior(UnitDirect):
    """`UnitDirect` whose log amplitude (eq. 21) is computed only when a variance is asked for."""

    def __init__(
        self,
        mean: Tensor,  # [..., Q, D]
        process: UnitProcess,  # tokens scaled and centred
        t: Tokens,
        *,
        logits_of: tuple[Tensor, Tensor, Tensor],  # scaled q, scaled k, centre of the keys
        inducing: Tensor | None,  # [..., l, C] scaled and centred like the keys
        delta: float,
    ) -> None:
        super().__init__(mean, process.query_mask, t.dtype)
        self._given, self._log_t, self._logits_of = process, t.scale_q[..., 0].log(), logits_of
        self._inducing, self._delta = inducing, delta
        self._log_a: Tensor | None = None  # [..., Q]

    @property
    def _process(self) -> UnitProcess:
        return self._given

    @property
    def _log_scale(self) -> Tensor:
        if self._log_a is None:
            q, k, k_bar = self._logits_of
            p = self._given
            log_a = query_log_amplitude(q, k, p.q, k_bar, mask=p.mask, causal=p.causal)
            self._log_a = self._log_t + log_a
        return self._log_a

    def _features(self, inducing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L_l, Phi_q = kappa_ql L_l^-T and L_B.  [..., l, l], [..., Q, l], [..., l, l]"""
        p = self._given
        L = inducing_root(inducing, self._delta)
        phi_q = features(p.q, inducing, L, p.query_mask)
        phi_k = features(p.k, inducing, L, p.mask)  # [..., K, l]
        B = with_diagonal(phi_k.mT @ phi_k / p.noise, 1.0)
        return L, phi_q, cholesky(B, name="I + Phi_k^T Phi_k / noise", noise=p.noise)

    @full_precision
    def _unit_variance(self) -> Tensor:
        if self._inducing is None:
            return super()._unit_variance()
        if self._unit is None:
            _, phi_q, L_B = self._features(self._inducing)
            shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
            u = 1 - phi_q.square().sum(-1) + shrunk.square().sum(-2)
            self._unit = within_bounds(u, self._given)
        return self._unit

    def _full_covariance(self) -> Tensor:
        if self._inducing is None:
            return super()._full_covariance()
        _, phi_q, L_B = self._features(self._inducing)
        shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
        unit = self._given.prior() - phi_q @ phi_q.mT + shrunk.mT @ shrunk  # [..., Q, Q]
        return self._amplify(self._amplify(unit).mT)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        if self._inducing is None:
            return super()._joint_deviation(n, generator)
        L, phi_q, L_B = self._features(self._inducing)
        m = self._inducing.shape[-2]
        # prior draw at (l, q), what l explains of q taken out, then the posterior of l put back
        p = self._given
        f = prior_draw(self, (self._inducing, p.q), (None, p.query_mask), n, generator)  # [n, ..., l + Q, D]
        nugget = self._delta**0.5 * self._normal(n, m, generator)
        white = solve_triangular(L, f[..., :m, :] + nugget, upper=False)
        put_back = solve_triangular(L_B.mT, self._normal(n, m, generator), upper=True)
        return self._amplify(f[..., m:, :] - phi_q @ (white - put_back))


def _sees_a_key(t: Tokens, causal: bool) -> Tensor | None:
    """Real queries with at least one real key before them.  [..., Q]"""
    if t.mask is None:
        return t.query_mask
    some = real_key_counts(t.mask, t.k, causal) > 0  # [..., 1] or [..., Q]
    if t.query_mask is None:
        return some.expand(*some.shape[:-1], t.q.shape[-2])
    return t.query_mask & some


def _centres(
    q: Tensor,
    k: Tensor,
    t: Tokens,
    centre: Centre | Literal["tokens", "none"] | None,
    causal: bool,
    shrink: float,
) -> tuple[Tensor, Tensor]:
    """Centres of the scaled queries and keys.  Each [..., 1, C]"""
    if centre is None:
        centre = "none" if causal else "tokens"
    if isinstance(centre, tuple):
        for name, c in zip(("queries", "keys"), centre, strict=True):
            if c.shape[-1:] != q.shape[-1:]:
                raise ValueError(
                    f"expected centre of the {name} of shape [..., {q.shape[-1]}], got {tuple(c.shape)}"
                )
        q_bar, k_bar = (c.to(q.dtype)[..., None, :] * shrink for c in centre)
        return q_bar, k_bar
    if centre == "none":
        zero = q.new_zeros(1, q.shape[-1])
        return zero, zero
    if centre != "tokens":
        raise ValueError(f"expected centre 'tokens', 'none' or a pair of tensors, got {centre!r}")
    if causal:
        raise ValueError("centre='tokens' looks ahead in causal attention: pass constants or 'none'")
    return real_mean(q, t.query_mask), real_mean(k, t.mask)
