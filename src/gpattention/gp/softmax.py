"""Softmax attention as a GP posterior mean, with its variance (eq. 21-22).

    q~ = q d^-1/4, k~ = k d^-1/4, each minus its own centre;  lse_i = log sum_j exp(q_i . k_j / sqrt d)
    log a_i = log t + 1/2 |q~_i - qbar|^2 + q~_i . kbar - lse_i                                   (21)
    mean = softmax(Q K^T / sqrt d) V exactly,   var_i = a_i^2 u_i                                 (22)
    u_i  = 1 - |L^-1 kappa(k~, q~_i)|^2,   L = chol(kappa(k~, k~) + sigma^2 I)

The key amplitudes b_j = exp(|k~_j|^2 / 2 + ...) overflow and are never formed; a_i stays a logarithm.
"""

from typing import Literal

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import scaled_dot_product_attention

from gpattention.gp.cholesky import cholesky
from gpattention.gp.direct import UnitDirect, prior_draw, real_key_counts
from gpattention.gp.inputs import (
    Scalar,
    Tokens,
    check_delta,
    keep_columns,
    keep_rows,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import Posterior
from gpattention.gp.precision import full_precision
from gpattention.gp.shapes import broadcast

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
    no matrix of keys is factored.  Queries that see no real key have mean and variance 0.
    """
    check_delta(delta)
    t = prepare(
        q, k, v, noise=noise, scale_q=prior_scale, mask=mask, query_mask=query_mask, causal=causal,
        inducing=None if inducing is None else {"inducing": inducing}, scale_name="prior_scale",
    )  # fmt: skip
    sees_key = _sees_a_key(t, causal)  # [..., Q] or None
    mean = _softmax_attention(q.to(t.v.dtype), k.to(t.v.dtype), t, sees_key, causal)
    shrink = q.shape[-1] ** -0.25
    raw_q = keep_rows(q.to(t.v.dtype), t.query_mask) * shrink  # [..., Q, C]
    raw_k = keep_rows(k.to(t.v.dtype), t.mask) * shrink  # [..., K, C]
    q_bar, k_bar = _centres(raw_q, raw_k, t, centre, causal, shrink)  # each [..., 1, C]
    posterior = SoftmaxPosterior(
        mean,
        keep_rows(raw_q - q_bar, sees_key),
        keep_rows(raw_k - k_bar, t.mask),
        t,
        sees_key,
        raw=(raw_q, raw_k, k_bar),
        causal=causal,
    )
    if inducing is not None:
        if causal:
            raise ValueError("the sparse variance has no causal form: drop inducing or causal")
        posterior.use_inducing(inducing.to(t.v.dtype) * shrink - k_bar, delta)
    return posterior


class SoftmaxPosterior(UnitDirect):
    """`UnitDirect` whose log amplitude (eq. 21) is computed only when a variance is asked for."""

    def __init__(
        self,
        mean: Tensor,
        q: Tensor,  # [..., Q, C] scaled and centred
        k: Tensor,  # [..., K, C] scaled and centred
        t: Tokens,
        sees_key: Tensor | None,
        *,
        raw: tuple[Tensor, Tensor, Tensor],  # scaled q, scaled k, centre of the keys
        causal: bool,
    ) -> None:
        super().__init__(
            mean, q, k, t.noise, t.scale_q[..., 0].log(),
            mask=t.mask, query_mask=sees_key, causal=causal, dtype=t.dtype,
        )  # fmt: skip
        self._raw = raw
        self._amplitude_known = False
        self._inducing: Tensor | None = None
        self._delta = 0.0

    def use_inducing(self, inducing: Tensor, delta: float) -> None:
        """Take the sparse variance through these inputs, scaled and centred like the keys."""
        self._inducing, self._delta = inducing, delta

    @full_precision
    def _know_amplitude(self) -> None:
        """Complete log a_i of eq. 21 from log t."""
        if self._amplitude_known:
            return
        q, k, k_bar = self._raw
        logits = q @ k.mT  # [..., Q, K]
        if self._causal:
            future = torch.ones_like(logits, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        if self._mask is not None:
            logits = logits.masked_fill(~self._mask[..., None, :], -torch.inf)
        if self._query_mask is not None:  # rows without a key: any finite number, masked later
            logits = torch.where(self._query_mask[..., None], logits, 0.0)
        lse = logits.logsumexp(-1)  # [..., Q]
        self._log_scale = (
            self._log_scale
            + 0.5 * self._q.square().sum(-1)
            + (q * k_bar).sum(-1)
            - lse
        )  # fmt: skip
        self._amplitude_known = True

    def _raw_variance(self) -> Tensor:
        self._know_amplitude()
        return super()._raw_variance()

    def _prior_stddev(self) -> Tensor:
        self._know_amplitude()
        return super()._prior_stddev()

    def _log_variance(self) -> Tensor:
        self._know_amplitude()
        return super()._log_variance()

    def _stddev(self) -> Tensor:
        self._know_amplitude()
        return super()._stddev()

    def _features(self) -> tuple[Tensor, Tensor, Tensor]:
        """L_l, Phi_q = kappa_ql L_l^-T and L_B.  [..., l, l], [..., Q, l], [..., l, l]"""
        inducing = self._sparse_inputs()
        L = cholesky(with_diagonal(gram(inducing), self._delta), name="K_ll + delta I", noise=self._delta)
        phi_q = keep_rows(_times_inverse_transpose(cross_gram(self._q, inducing), L), self._query_mask)
        phi_k = keep_rows(_times_inverse_transpose(cross_gram(self._k, inducing), L), self._mask)
        B = with_diagonal(phi_k.mT @ phi_k / self._noise, 1.0)
        return L, phi_q, cholesky(B, name="I + Phi_k^T Phi_k / noise", noise=self._noise)

    def _sparse_inputs(self) -> Tensor:
        if self._inducing is None:
            raise ValueError("this posterior has no inducing inputs")
        return self._inducing

    @full_precision
    def _unit_variance(self) -> Tensor:
        if self._inducing is None:
            return super()._unit_variance()
        if self._unit is None:
            _, phi_q, L_B = self._features()
            shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
            u = 1 - phi_q.square().sum(-1) + shrunk.square().sum(-2)
            seen, noise = real_key_counts(self._mask, self._k, False), self._noise[..., 0]
            self._unit = u.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))
        return self._unit

    def _full_covariance(self) -> Tensor:
        self._know_amplitude()
        if self._inducing is None:
            return super()._full_covariance()
        _, phi_q, L_B = self._features()
        shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
        kappa = keep_columns(keep_rows(gram(self._q), self._query_mask), self._query_mask)
        return self._amplify(self._amplify(kappa - phi_q @ phi_q.mT + shrunk.mT @ shrunk).mT)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        self._know_amplitude()
        if self._inducing is None:
            return super()._joint_deviation(n, generator)
        L, phi_q, L_B = self._features()
        inducing = self._sparse_inputs()
        m = inducing.shape[-2]
        # prior draw at (l, q), what l explains of q taken out, then the posterior of l put back
        f = prior_draw(self, (inducing, self._q), n, generator)  # [n, ..., l + Q, D]
        nugget = self._delta**0.5 * self._normal(n, m, generator)
        white = solve_triangular(L, f[..., :m, :] + nugget, upper=False)
        put_back = solve_triangular(L_B.mT, self._normal(n, m, generator), upper=True)
        return self._amplify(f[..., m:, :] - phi_q @ (white - put_back))


def _times_inverse_transpose(K: Tensor, L: Tensor) -> Tensor:
    """K L^-T.  [..., N, m]"""
    return solve_triangular(L.mT, K, upper=True, left=False)


def _sees_a_key(t: Tokens, causal: bool) -> Tensor | None:
    """Real queries with at least one real key before them.  [..., Q]"""
    if t.mask is None:
        return t.query_mask
    some = real_key_counts(t.mask, t.k, causal) > 0  # [..., 1] or [..., Q]
    if t.query_mask is None:
        return some.expand(*some.shape[:-1], t.q.shape[-2])
    return t.query_mask & some


def _softmax_attention(q: Tensor, k: Tensor, t: Tokens, sees_key: Tensor | None, causal: bool) -> Tensor:
    q, k = keep_rows(q, t.query_mask), keep_rows(k, t.mask)
    lead = broadcast(q.shape[:-2], k.shape[:-2], t.v.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, t.v))
    if t.mask is None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)
    attend = t.mask[..., None, :]  # [..., 1, K]
    if causal:
        square = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        attend = attend & square.tril()
    if sees_key is not None:  # a row with nothing to attend to is NaN in some backends
        attend = attend | ~sees_key[..., None]
    attend = attend.expand(*lead, q.shape[-2], k.shape[-2])
    return scaled_dot_product_attention(q, k, v, attn_mask=attend)


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
    return _mean(q, t.query_mask), _mean(k, t.mask)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.mean(-2, keepdim=True)
    return x.sum(-2, keepdim=True) / mask.sum(-1).clamp_min(1)[..., None, None]
