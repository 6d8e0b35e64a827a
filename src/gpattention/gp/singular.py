"""KEP-SVGP: a sparse variational GP on the singular features of an asymmetric kernel (eq. 26-29).

W_e(X) = X_p^T W_e,  W_r(X) = X_p^T W_r,  X_p as many tokens as W_e has rows, evenly spaced
e = q/|q| W_e(X),  r = k/|k| W_r(X)                       [N, s]
v = (e + r) Lambda^-1,  or  C [e; r] Lambda^-1            [N, s]   Lambda^-1 = exp(2 l), C [N, 2N]   (26)
mean = v M,  var_nd = |v_n S_d^1/2|^2                     M [s, s], S_d^1/2 lower triangular         (27)
KL   = sum_d 1/2 [tr(Lambda^-2 S_d) + m_d^T Lambda^-2 m_d + log|Lambda^2| - log|S_d| - s]            (28)
KSVD = (1/2 avg |e_n Lambda^-1/2|^2 + 1/2 avg |r_n Lambda^-1/2|^2 - avg_h tr(W_e^T W_r))^2           (29)
"""

import torch
from torch import Tensor

from gpattention.gp.inputs import (
    check_mask,
    check_positive,
    check_tokens,
    check_values,
    common_lead,
    expect,
    keep_rows,
)
from gpattention.gp.posterior import Posterior, Source
from gpattention.numerics import checks_are_deferred, compute_dtype, full_precision
from gpattention.ops import standard_normal


@full_precision
def kep_svgp_posterior(
    q: Tensor,  # [..., N, C]
    k: Tensor,  # [..., N, C]
    x: Tensor,  # [..., N, C]
    W_e: Tensor,  # [..., P, s]
    W_r: Tensor,  # [..., P, s]
    log_scale: Tensor,  # [..., s]
    inducing_mean: Tensor,  # [..., s, D]
    scale_tril: Tensor,  # [..., D, s, s] lower triangular, positive diagonal
    *,
    combine: Tensor | None = None,  # [N, 2 N]
    mask: Tensor | None = None,  # [..., N] True = real
) -> "KEPPosterior":
    """Sparse variational GP on the singular features of the kernel of q and k (eq. 26-27).

    Args:
        q: queries; only their directions count.
        k: keys; likewise.
        x: what the features' directions are made of: the tokens, P of them at most.
        W_e: weights of the tokens in the directions that queries are read in.
        W_r: the same for keys.
        log_scale: l of Lambda^-1 = exp(2 l), the inverse singular values.
        inducing_mean: means of the inducing variables, a column for each channel.
        scale_tril: factors of their covariances, one per channel.
        combine: weights of the 2 N features [e; r] in each token's; without it e and r are added.
        mask: which tokens are real.

    Returns:
        The posterior of every token; its variance is [..., N, D], one per channel.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NonFiniteError: an argument is not finite.
    """
    _check(q, k, x, W_e, W_r, log_scale, inducing_mean, scale_tril, combine, mask)
    dtype = compute_dtype(q.dtype)
    W_e, W_r, log_scale, M = (y.to(dtype) for y in (W_e, W_r, log_scale, inducing_mean))
    chosen = spaced_rows(keep_rows(x.to(dtype), mask), W_e.shape[-2], mask)  # [..., min(N, P), C]
    count = chosen.shape[-2]
    e, r = (
        keep_rows(_direction(keep_rows(y.to(dtype), mask)) @ (chosen.mT @ W[..., :count, :]), mask)
        for y, W in ((q, W_e), (k, W_r))
    )  # [..., N, s] each
    merged = e + r if combine is None else combine.to(dtype) @ torch.cat([e, r], -2)  # [..., N, s]
    trace = (W_e * W_r).sum((-2, -1)).mean()  # []
    return KEPPosterior(e, r, merged, log_scale, M, scale_tril.to(dtype).tril(), trace, mask, q.dtype)


def spaced_rows(x: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """The real rows of x [..., N, C], or `count` evenly spaced ones of them: row i (n - 1) / (count - 1).

    Fewer real rows than `count` stay in their order, with rows of 0 behind them where others have more:
    padding, wherever it is, changes nothing.  [..., min(N, count), C]
    """
    N = x.shape[-2]
    place = torch.arange(min(N, count), device=x.device)  # among the real ones
    if mask is None:
        return x if count >= N else x[..., place * (N - 1) // max(count - 1, 1), :]
    n = mask.sum(-1, keepdim=True)  # [..., 1]
    place = torch.where(n > count, place * (n - 1) // max(count - 1, 1), place)  # [..., min(N, count)]
    # the token at which that many real ones have been passed
    index = torch.searchsorted(mask.cumsum(-1), place + 1).clamp_max(N - 1)
    index = index[..., None].expand(*x.shape[:-2], -1, x.shape[-1])
    return keep_rows(x.gather(-2, index), place < n)


def _direction(x: Tensor) -> Tensor:
    """x / |x|, and 0 of 0, with a finite gradient there.  [..., N, C]"""
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square > 0, square, 1.0).rsqrt()


class KEPPosterior(Posterior):
    """Posterior of eq. 27; `.variance` is [..., N, D], `.covariance()` [..., D, N, N].

    Independent draws share one normal number per token between channels, as the authors' do; joint draws are
    independent between channels.

    Args:
        e: singular features of queries, 0 at padded tokens.  [..., N, s]
        r: those of keys.  [..., N, s]
        merged: both as one.  [..., N, s]
        log_scale: as in `kep_svgp_posterior`, and so are the others.
        inducing_mean: likewise.
        scale_tril: likewise.
        trace: mean over heads of tr(W_e^T W_r).  []
        mask: likewise.
        dtype: of what is handed out.
    """

    def __init__(
        self,
        e: Tensor,
        r: Tensor,
        merged: Tensor,
        log_scale: Tensor,
        inducing_mean: Tensor,
        scale_tril: Tensor,
        trace: Tensor,
        mask: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.e, self.r, self.merged = e, r, keep_rows(merged, mask)
        self.log_scale, self.inducing_mean, self.scale_tril = log_scale, inducing_mean, scale_tril
        self.trace, self.mask = trace, mask
        self.v = self.merged * (2 * log_scale).exp()[..., None, :]  # [..., N, s]
        super().__init__(self.v @ inducing_mean, mask, dtype)

    def _root(self) -> Tensor:
        """v S_d^1/2.  [..., D, N, s]"""
        return self.v[..., None, :, :] @ self.scale_tril

    @full_precision
    def _raw_variance(self) -> Tensor:
        # all channels' roots side by side: one product of matrices, where `_root` has one for each channel
        beside = self.scale_tril.movedim(-3, -1).flatten(-2)  # [..., s, s D]
        root = (self.v @ beside).unflatten(-1, (-1, self.scale_tril.shape[-3]))  # [..., N, s, D]
        return root.square().sum(-2)  # [..., N, D]

    def _prior_stddev(self) -> Tensor:
        square = self.merged.square().sum(-1)  # [..., N] |v_n Lambda|^2, 0 at padded tokens
        return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)

    def _full_covariance(self) -> Tensor:
        root = self._root()
        return root @ root.mT

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        noise = self._normal(n, self.v.shape[-1], generator)  # [n, ..., s, D]
        return (self._root() @ noise.mT[..., None])[..., 0].mT

    @full_precision
    def sample(self, n: int = 1, *, generator: Source = None, joint: bool = False) -> Tensor:
        """Reparameterised draws; independent ones share their noise between channels.

        Args:
            n: how many.
            generator: of the random numbers; None is torch's own.
            joint: False draws every token on its own, True draws from the full covariance.

        Returns:
            [n, ..., N, D].

        Raises:
            ValueError: n is below 1, or the generator does not fit the batch.
        """
        if joint or n < 1:
            return super().sample(n, generator=generator, joint=joint)
        shape = (n, *self._mean.shape[:-1], 1)
        noise = standard_normal(shape, self._mean.dtype, self._mean.device, generator)
        return (self._mean + self._stddev() * noise).to(self._dtype)

    @full_precision
    def kl(self) -> Tensor:
        """The divergence of the inducing variables from their prior (eq. 28), which no token enters.

        Returns:
            [...], the same for every sequence.
        """
        D, s = self.inducing_mean.shape[-1], self.log_scale.shape[-1]
        weight = (4 * self.log_scale).exp()  # [..., s] the diagonal of Lambda^-2
        trace = (weight[..., None, :, None] * self.scale_tril.square()).sum((-3, -2, -1))
        quadratic = (weight[..., None] * self.inducing_mean.square()).sum((-2, -1))
        log_det = 2 * self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        kl = 0.5 * (trace + quadratic - D * (4 * self.log_scale.sum(-1) + s) - log_det)
        return kl.expand(self._mean.shape[:-2])

    def ksvd(self) -> Tensor:
        """The loss under which e and r are singular features of the kernel (eq. 29).

        Averages are over all real tokens and heads of the call.

        Returns:
            [].
        """
        return self.ksvd_gap(self.ksvd_terms()).square()

    def ksvd_terms(self) -> Tensor:
        """How many features the averages of eq. 29 are over: real tokens times heads.  []"""
        if self.mask is None:
            return self.e.new_full((), self.e[..., 0].numel())
        return self.mask.expand(self.e.shape[:-1]).sum().to(self.e.dtype)

    @full_precision
    def ksvd_gap(self, terms: Tensor) -> Tensor:
        """What eq. 29 squares, with sums over tokens divided by `terms`.  []"""
        scale = self.log_scale.exp()[..., None, :]  # [..., 1, s] the diagonal of Lambda^-1/2
        energy = (self.e * scale).square().sum() + (self.r * scale).square().sum()
        return 0.5 * energy / terms.clamp_min(1) - self.trace


def _check(
    q: Tensor, k: Tensor, x: Tensor, W_e: Tensor, W_r: Tensor, log_scale: Tensor, inducing_mean: Tensor,
    scale_tril: Tensor, combine: Tensor | None, mask: Tensor | None,
) -> None:  # fmt: skip
    """Shapes, types and values of the arguments; errors name argument, value and expectation."""
    tokens, weights = {"q": q, "k": k, "x": x}, {"W_e": W_e, "W_r": W_r, "inducing_mean": inducing_mean}
    for name, y in {**tokens, **weights}.items():
        check_tokens(name, y, like=q, same_dtype=name in tokens)
    N, s, D = q.shape[-2], W_e.shape[-1], inducing_mean.shape[-1]
    for name, y in tokens.items():
        expect(y.shape[-2:] == q.shape[-2:], f"{name} of {N} tokens of width {q.shape[-1]} like q", y)
    expect(W_r.shape[-2:] == W_e.shape[-2:], f"W_r of {W_e.shape[-2]} rows and {s} columns like W_e", W_r)
    expect(log_scale.shape[-1:] == (s,), f"log_scale of {s} numbers like the columns of W_e", log_scale)
    expect(inducing_mean.shape[-2] == s, f"inducing_mean of {s} rows like the columns of W_e", inducing_mean)
    expect(scale_tril.shape[-3:] == (D, s, s), f"scale_tril of shape [..., {D}, {s}, {s}]", scale_tril)
    given = {"log_scale": log_scale, "scale_tril": scale_tril}
    if combine is not None:
        expect(combine.shape[-2:] == (N, 2 * N), f"combine of shape [{N}, {2 * N}]", combine)
        given["combine"] = combine
    check_mask("mask", mask, common_lead({**tokens, **weights}), q)
    if not checks_are_deferred(q):
        kept = {name: keep_rows(y, mask) for name, y in tokens.items()}
        check_values({**kept, **weights, **given})
        check_positive("the diagonal of scale_tril", scale_tril.diagonal(dim1=-2, dim2=-1))
