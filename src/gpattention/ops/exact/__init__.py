"""The exact CGP and the direct model on Triton kernels, one program per sequence and head.

    fused_cgp                 mean, variance, key density and regulariser of the exact CGP (eq. 4, 6, 10, 23)
    fused_direct              the same of the direct model (eq. 2)
    fused_prior_density       log density of observations under an amplified GP prior (eq. 10)
    fused_row_log_amplitude   amplitudes that normalise the rows of attention (eq. 25)

Each is one autograd function; `kernels` holds the mathematics.  Their slow references are `gp.correlated`,
`gp.direct`, `gp.density` and `gp.amplitude`.  The launches of density and divergence serve the functions of
whole models too, which take a regulariser and their moments together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import (
    Cost,
    Tokens,
    broadcast,
    checks_are_deferred,
    failure_counter,
    once_differentiable,
    report_failures,
)
from gpattention.ops.layout import (
    View,
    allocator,
    launch,
    matrices,
    padded,
    scalars,
    to_parameters,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)

__all__ = [
    "PRIOR_COVARIANCE",
    "QUERY_COVARIANCE",
    "Moments",
    "fused_cgp",
    "fused_direct",
    "fused_prior_density",
    "fused_row_log_amplitude",
]

QUERY_COVARIANCE = "marginal covariance of the queries"
PRIOR_COVARIANCE = "K_q + tau^2 I"


def fused_row_log_amplitude(t: Tokens, most: float | None) -> Tensor:
    """log a_i of eq. 25 for the prior scale t.scale_q.

    Args:
        t: checked inputs, which need not be masked.
        most: the largest amplitude; None for no bound.

    Returns:
        [..., Q]; 0 at padding and where there is no key.
    """
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2])
    log_amplitude: Tensor = _RowLogAmplitude.apply(  # type: ignore[no-untyped-call]
        matrices(t.q, lead), matrices(t.k, lead), t.scale_q, vectors(t.mask, lead),
        vectors(t.query_mask, lead), lead, most,
    )  # fmt: skip
    return with_lead(log_amplitude, lead)


class _RowLogAmplitude(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        scale: Tensor,  # [..., 1, 1]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        lead: torch.Size,
        most: float | None,
    ) -> Tensor:
        from gpattention.ops.exact.kernels import amplitude_kernel

        (B, H, NQ, C), N, empty = q.shape, k.shape[2], allocator(q)
        QP, NP, CP = padded(NQ), padded(N), padded(C)
        tokens_q, tokens_k, log_sum = empty(B * H, QP, CP), empty(B * H, NP, CP), empty(B, H, NQ)
        log_amplitude, turned = empty(B, H, NQ), empty(B * H, CP, NP)
        amplitude_kernel[(B * H,)](
            *views(q, k, mask, query_mask, scalars(scale, lead)), tokens_q, tokens_k, turned, log_sum,
            log_amplitude, most, H, NQ, N, C,
            QP=QP, NP=NP, CP=CP, **launch("amplitude", max(QP, NP)),
        )  # fmt: skip
        ctx.sizes, ctx.lead, ctx.most = (B, H, NQ, N, C), lead, most
        ctx.save_for_backward(q, k, scale, mask, query_mask, tokens_q, tokens_k, log_sum)
        return log_amplitude

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.ops.exact.kernels import amplitude_backward_kernel

        q, k, scale, mask, query_mask, tokens_q, tokens_k, log_sum = ctx.saved_tensors
        B, H, NQ, N, C = ctx.sizes
        (QP, CP), NP = tokens_q.shape[1:], tokens_k.shape[1]
        d_q, d_k = token_major(B, H, NQ, C, log_sum), token_major(B, H, N, C, log_sum)
        empty = allocator(log_sum)
        found = empty(1, 1, B, H)
        amplitude_backward_kernel[(B * H,)](
            grads[0].contiguous(), *views(q, k, mask, query_mask, scalars(scale, ctx.lead)),
            tokens_q, tokens_k, empty(B * H, CP, NP), log_sum, empty(B * H, QP, NP), ctx.most,
            *views(d_q, d_k), found, H, NQ, N, C,
            QP=QP, NP=NP, CP=CP, **launch("amplitude_backward", max(QP, NP)),
        )  # fmt: skip
        return d_q, d_k, *_parameter_gradients(ctx, found, (scale,), 2), None, None, None, None


def fused_prior_density(
    x: Tensor,
    X: Tensor,
    *,
    scale: Tensor,
    log_amplitude: Tensor | None,
    noise: Tensor,
    mask: Tensor | None,
    name: str,
) -> Tensor:
    """log N(X; 0, D_a kappa(x, x) D_a + noise I), summed over channels (eq. 10).

    Args:
        x: inputs.  [..., N, C]
        X: observations, zero at padded tokens.  [..., N, D]
        scale: amplitude of all tokens.  [..., 1, 1]
        log_amplitude: of each.  [..., N]
        noise: on the diagonal.  [..., 1, 1]
        mask: which tokens are real.  [..., N]
        name: of the covariance, for the message.

    Returns:
        [...].

    Raises:
        NotPositiveDefiniteError: the covariance has no factor.
    """
    lead = broadcast(x.shape[:-2], X.shape[:-2])
    value: Tensor = _Density.apply(  # type: ignore[no-untyped-call]
        matrices(x, lead), matrices(X, lead), noise, scale, vectors(log_amplitude, lead),
        vectors(mask, lead), lead, name,
    )  # fmt: skip
    return with_lead(value, lead)


class Prior(NamedTuple):
    """The GP prior of one call: inputs, amplitudes and noise, every tensor with batch and heads."""

    x: Tensor  # [B, H, N, C]
    noise: Tensor  # [B, H]
    scale: Tensor  # [B, H]
    log_amplitude: Tensor | None  # [B, H, N]
    mask: Tensor | None  # [B, H, N]

    @property
    def views(self) -> tuple[View | None, ...]:
        """All but the inputs, as kernels take it."""
        return tuple(views(self.mask, self.noise, self.scale, self.log_amplitude))


class PriorGradients(NamedTuple):
    """Where the backward pass writes."""

    x: Tensor  # [B, H, N, C]
    X: Tensor  # [B, H, N, D]
    log_amplitude: Tensor | None  # [B, H, N]
    scale: Tensor  # [B, H]
    noise: Tensor  # [B, H]

    @property
    def views(self) -> tuple[Any, ...]:
        """Inputs and observations with their strides, then the others, as kernels take them."""
        return *views(self.x, self.X), self[2:]


def density_forward(
    prior: Prior, X: Tensor, value: Tensor, *, name: str, key: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Write the density [B, H], or minus its sum with the keys' one; returns what the backward pass needs."""
    from gpattention.ops.exact.kernels import density_kernel

    x = prior.x
    (B, H, N, C), D = x.shape, X.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, root = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned = empty(S, CP, NP)
    info = torch.empty(B, H, dtype=torch.int32, device=x.device)
    deferred = checks_are_deferred()
    density_kernel[(S,)](
        *views(x, X), prior.views, inputs, turned, white, gram, root, key, value,
        info, failure_counter(x.device), int(deferred), H, N, C, D,
        NP=NP, CP=CP, DP=DP, **launch("density", NP),
    )  # fmt: skip
    if not deferred:
        report_failures(info, N, x.dtype, name=name, noise=prior.noise)
    return inputs, white, gram, root


def density_backward(
    grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients, *, cost: bool = False
) -> None:
    """Write all gradients; `prior.x` is not looked at."""
    from gpattention.ops.exact.kernels import density_backward_kernel

    inputs, white, gram, root = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    NP, CP, DP = gram.shape[-1], inputs.shape[-1], white.shape[-1]
    density_backward_kernel[(B * H,)](
        view(grad), prior.views, inputs, white, gram, root, torch.empty_like(gram), torch.empty_like(white),
        *to.views, H, N, C, D, COST=cost, NP=NP, CP=CP, DP=DP, **launch("density_backward", NP),
    )  # fmt: skip


class _Density(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [B, H, N, C]
        X: Tensor,  # [B, H, N, D]
        noise: Tensor,  # [..., 1, 1]
        scale: Tensor,  # [..., 1, 1]
        log_amplitude: Tensor | None,  # [B, H, N]
        mask: Tensor | None,  # [B, H, N]
        lead: torch.Size,
        name: str,
    ) -> Tensor:
        prior = Prior(x, scalars(noise, lead), scalars(scale, lead), log_amplitude, mask)
        value = allocator(x)(*x.shape[:2])
        saved = density_forward(prior, X, value, name=name)
        ctx.lead, ctx.sizes = lead, (*x.shape, X.shape[-1])
        ctx.save_for_backward(noise, scale, log_amplitude, mask, *saved)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        noise, scale, log_amplitude, mask, *saved = ctx.saved_tensors
        B, H, N, C, D = ctx.sizes
        like, empty = saved[0], allocator(saved[0])
        prior = Prior(like, scalars(noise, ctx.lead), scalars(scale, ctx.lead), log_amplitude, mask)
        found = empty(2, 1, B, H)
        d_log = None if log_amplitude is None else empty(B, H, N)
        d_x, d_X = token_major(B, H, N, C, like), token_major(B, H, N, D, like)
        to = PriorGradients(d_x, d_X, d_log, scale=found[1, 0], noise=found[0, 0])
        density_backward(grads[0], prior, tuple(saved), to)
        return d_x, d_X, *_parameter_gradients(ctx, found, (noise, scale), 2), d_log, None, None, None


def divergence_forward(
    prior: Prior,
    mean: Tensor,  # [B, H, Q, D]
    A: Tensor | None,  # [S, K', Q'] transposed, padded
    F: Tensor,  # [S, K', Q'] transposed
    value: Tensor,  # [B, H]
) -> tuple[Tensor, ...]:
    """Write the divergence; returns what the backward pass needs."""
    from gpattention.ops.exact.kernels import divergence_kernel

    x = prior.x
    (B, H, N, C), D = x.shape, mean.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, rest = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned, roots = empty(S, CP, NP), empty(2, S, NP, NP)
    info = torch.empty(2, B, H, dtype=torch.int32, device=x.device)
    deferred = checks_are_deferred()
    divergence_kernel[(S,)](
        *views(x, mean), prior.views, A, F, inputs, turned, white, gram, rest, roots, value, info,
        failure_counter(x.device), int(deferred), S, H, N, C, D,
        NP=NP, KP=F.shape[-2], CP=CP, DP=DP, **launch("divergence", max(NP, F.shape[-2])),
    )  # fmt: skip
    if not deferred:
        for name, found in zip(("K_q + tau^2 I", "V + tau^2 I"), info, strict=True):
            report_failures(found, N, x.dtype, name=name, noise=prior.noise)
    return inputs, white, gram, rest, roots


def divergence_backward(grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients) -> Tensor:
    """Write all gradients and return that of P at unit amplitude; `prior.x` is not looked at.  [S, Q', Q']"""
    from gpattention.ops.exact.kernels import divergence_backward_kernel

    inputs, white, gram, rest, roots = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    by_explained = torch.empty_like(gram)
    divergence_backward_kernel[(B * H,)](
        view(grad), prior.views, inputs, white, gram, rest, roots, torch.empty_like(gram),
        torch.empty_like(gram), torch.empty_like(white), by_explained, *to.views, B * H, H, N, C, D,
        NP=gram.shape[-1], CP=inputs.shape[-1], DP=white.shape[-1],
        **launch("divergence_backward", gram.shape[-1]),
    )  # fmt: skip
    return by_explained


class Moments(NamedTuple):
    """What the kernels give of a model, amplified and masked; None is what was not asked for.

    Attributes:
        mean: [..., Q, D].
        variance: [..., Q].
        key: log N(M_k V; 0, M_k), the keys' term of eq. 10.  [...]
        cost: minus both terms of eq. 10, or of eq. 12 (GP), or the divergence of eq. 23.  [...]
        stddev: of the direct model alone.  [..., Q]
        unit: variance at unit amplitude, of the direct model alone.  [..., Q]
    """

    mean: Tensor
    variance: Tensor | None
    key: Tensor | None
    cost: Tensor | None
    stddev: Tensor | None = None
    unit: Tensor | None = None


def fused_cgp(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> Moments:
    """Mean (eq. 4) of the exact CGP and, if wanted, variance (eq. 6) with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether variance and key density are wanted; a cost comes with them.
        cost: "marginal" (eq. 10) or "kl" (eq. 23), both with tau^2 = sigma^2.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_CGP, t, (t.q, t.k, t.latent, t.v), with_variance, cost)


def fused_direct(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> Moments:
    """Mean of the direct model (eq. 2) and, if wanted, spread with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether spread and key density are wanted; a cost comes with them.
        cost: "marginal" or "kl", both with tau^2 = sigma^2.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_Direct, t, (t.q, t.k, t.v), with_variance, cost)


def _moments(model: Any, t: Tokens, inputs: tuple[Tensor, ...], with_variance: bool, cost: Cost) -> Moments:
    lead = broadcast(*(x.shape[:-2] for x in inputs))
    found = model.apply(
        *(matrices(x, lead) for x in inputs), t.noise, t.scale_q, t.scale_k,
        *(vectors(x, lead) for x in (t.log_amplitude, t.mask, t.query_mask)),
        lead, with_variance or cost != "none", cost,
    )  # fmt: skip
    return Moments(*(with_lead(x, lead) for x in found))


class Sizes(NamedTuple):
    """Of the problem and of its padded matrices."""

    B: int
    H: int
    NQ: int
    N: int
    C: int
    D: int

    @property
    def heads(self) -> int:
        """How many programs: one for each sequence and head."""
        return self.B * self.H

    @property
    def padded(self) -> dict[str, int]:
        """Padded sides of queries, keys, inputs and values, as the kernels name them."""
        names = {"QP": self.NQ, "NP": self.N, "CP": self.C, "DP": self.D}
        return {name: padded(n) for name, n in names.items()}

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options of a kernel."""
        return launch(kernel, max(self.padded["QP"], self.padded["NP"]))


def _cost_forward(
    cost: Cost, prior: Prior, mean: Tensor, A: Tensor | None, F: Tensor, key: Tensor, value: Tensor, name: str
) -> tuple[Tensor, ...]:
    """Write a model's cost; returns what the backward pass needs."""
    if cost == "marginal":
        return density_forward(prior, mean, value, name=name, key=key)
    return () if cost == "none" else divergence_forward(prior, mean, A, F, value)


class CostGradients(NamedTuple):
    """What a model's backward pass takes from that of its cost, and writes its own part of."""

    d_q: Tensor  # [B, H, Q, C]
    d_log: Tensor | None  # [B, H, Q]
    found: Tensor  # [3, 2, B, H] of noise, s_q and s_k
    by_mean: Tensor | None  # [B, H, Q, D] None where there is no cost
    by_explained: Tensor | None  # [S, Q', Q'] of P at unit amplitude
    by_key: Tensor | None  # [B, H] of the keys' log density, and its sign
    key_sign: int


def _cost_backward(
    ctx: Any, grads: list[Tensor | None], prior: Prior, saved: list[Tensor], mean: Tensor
) -> CostGradients:
    """Write the gradients of a cost through its prior: of queries, amplitudes, noise and s_q."""
    (B, H, NQ, D), C, empty = mean.shape, ctx.sizes.C, allocator(mean)
    by_key, by_cost = grads
    d_q, found = token_major(B, H, NQ, C, mean), empty(3, 2, B, H)
    d_log = None if prior.log_amplitude is None else empty(B, H, NQ)
    key_sign = int(by_key is not None)
    if by_cost is None:
        return CostGradients(d_q, d_log, found, None, None, by_key, key_sign)
    to = PriorGradients(d_q, token_major(B, H, NQ, D, mean), d_log, found[1, 0], found[0, 0])
    if ctx.cost == "kl":
        by_explained = divergence_backward(by_cost, prior, tuple(saved), to)
        return CostGradients(d_q, d_log, found, to.X, by_explained, by_key, key_sign)
    density_backward(by_cost, prior, tuple(saved), to, cost=True)
    by_key, key_sign = (by_cost, -1) if by_key is None else (by_key - by_cost, 1)
    return CostGradients(d_q, d_log, found, to.X, None, by_key, key_sign)


class _Roots(NamedTuple):
    """Tokens, Gram matrices and their roots of the latent inputs, where there are any, and of the keys."""

    tokens_o: Tensor  # [S, K', C'], those of the keys where there are no latent inputs
    tokens_k: Tensor  # [S, K', C']
    tokens_v: Tensor  # [S, K', D']
    turned: Tensor  # [1 or 3, S, C', K']
    grams: Tensor  # [1 or 2, S, K', K'], anything where none was factored, as are the next two
    roots: Tensor  # [1 or 2, S, K', K']
    turned_roots: Tensor  # [1 or 2, S, K', K']
    key: Tensor  # [B, H]


def _roots(
    sizes: Sizes, k: Tensor, o: Tensor | None, v: Tensor, mask: Tensor | None,
    noise: Tensor, scale_k: Tensor, lead: torch.Size, factored: int,
) -> _Roots:  # fmt: skip
    """The first `factored` roots, of which there are two with latent inputs and one without."""
    from gpattention.ops.exact.kernels import roots_kernel

    (B, H, _, N, C, D), S, P, empty = sizes, sizes.heads, sizes.padded, allocator(k)
    count, NP, CP, DP = 1 if o is None else 2, P["NP"], P["CP"], P["DP"]
    tokens_k, tokens_v = empty(S, NP, CP), empty(S, NP, DP)
    grams, roots, turned_roots = (empty(count, S, NP, NP) if factored else tokens_k for _ in range(3))
    tokens_o, turned = (tokens_k if o is None else empty(S, NP, CP)), empty(2 * count - 1, S, CP, NP)
    key, info = empty(B, H), torch.empty(count, B, H, dtype=torch.int32, device=k.device)
    deferred = checks_are_deferred()
    roots_kernel[(S, count)](
        *views(k, k if o is None else o, v, mask, scalars(noise, lead), scalars(scale_k, lead)),
        tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key, info,
        failure_counter(k.device), int(deferred), S, H, N, C, D,
        LATENT=o is not None, FACTORED=factored, NP=NP, CP=CP, DP=DP, **sizes.launch("roots"),
    )  # fmt: skip
    if not deferred:
        named = (("K_o + noise I", noise), ("K_k + noise I", noise / scale_k.square()))
        for (name, least), found in zip(named[-count:], info[:factored], strict=False):
            report_failures(found, N, k.dtype, name=name, noise=least)
    return _Roots(tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key)


def _parameter_gradients(
    ctx: Any, found: Tensor, parameters: tuple[Tensor, ...], first: int
) -> list[Tensor | None]:
    """Of those that need one; `first` is the place of the first among the inputs."""
    needed = ctx.needs_input_grad[first : first + len(parameters)]
    shapes = [p.shape if need else None for p, need in zip(parameters, needed, strict=True)]
    return to_parameters(found, ctx.lead, shapes)


class _CGP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        o: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        noise: Tensor,  # [..., 1, 1]
        scale_q: Tensor,  # [..., 1, 1]
        scale_k: Tensor,  # [..., 1, 1]
        log_amplitude: Tensor | None,  # [B, H, Q]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        lead: torch.Size,
        with_variance: bool,
        cost: Cost,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        from gpattention.ops.exact.kernels import rows_kernel

        (B, H, NQ, _), (N, C), D, empty = q.shape, k.shape[2:], v.shape[3], allocator(q)
        sizes = Sizes(B, H, NQ, N, C, D)
        S, P = sizes.heads, sizes.padded
        QP, NP, CP, DP = P.values()
        r = _roots(sizes, k, o, v, mask, noise, scale_k, lead, 1 + with_variance)
        tokens_q, values, scratch = empty(S, QP, CP), empty(S, NP, DP), empty(S, NP, max(QP, NP))
        K_qo, K_ok, A = empty(S, QP, NP), empty(S, NP, NP), empty(S, QP, NP)
        turned_A, F = empty(S, NP, QP), empty(S, NP, QP)
        mean, variance = token_major(B, H, NQ, D, q), empty(B, H, NQ)
        unit, value = empty(S, QP), empty(B, H)
        noise_, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
        rows_kernel[(S,)](
            *views(q, k, o, mask, query_mask, noise_, *scales, log_amplitude), tokens_q, *r[:4], *r[5:7],
            K_qo, K_ok, A, turned_A, F, scratch, values, view(mean), variance, unit, S, *sizes[1:],
            VARIANCE=with_variance, **P, **sizes.launch("rows"),
        )  # fmt: skip
        prior = Prior(q, noise_, scales[0], log_amplitude, query_mask)
        saved = _cost_forward(cost, prior, mean, turned_A, F, r.key, value, QUERY_COVARIANCE)
        ctx.sizes, ctx.lead, ctx.with_variance, ctx.cost = sizes, lead, with_variance, cost
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, *r[:3], r.grams, r.roots, K_qo, K_ok, A, F, *saved,
        )  # fmt: skip
        if not with_variance:
            return mean, None, None, None
        return mean, variance, r.key, None if cost == "none" else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.ops.exact.kernels import inputs_backward_kernel, rows_backward_kernel

        (
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_qo, K_ok, A, F, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        (B, H, _, N, C, D), S, P, empty = sizes, sizes.heads, sizes.padded, allocator(mean)
        QP, NP, _, DP = P.values()
        by_mean, by_variance, *by_others = grads
        by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
        X, OX, T, Z, E, scratch = (empty(S, QP, NP) for _ in range(6))
        unit_grad, values, turned_v = empty(S, QP, DP), empty(S, NP, DP), empty(S, DP, NP)
        d_k, d_o, d_v = (token_major(B, H, N, x, mean) for x in (C, C, D))
        noise_, *scales = (scalars(x, ctx.lead) for x in (noise, scale_q, scale_k))
        prior = Prior(mean, noise_, scales[0], log_amplitude, query_mask)
        by = _cost_backward(ctx, by_others, prior, saved, mean)
        rows_backward_kernel[(S,)](
            view(by_mean), None if by_variance is None else by_variance.contiguous(), view(mean), variance,
            unit, *views(mask, query_mask, noise_, scales[0], log_amplitude), tokens_q, tokens_o, tokens_v,
            roots, K_qo, K_ok, A, F, view(by.by_mean), by.by_explained, X, OX, T, Z, E, scratch, unit_grad,
            turned_v, view(by.d_q), by.d_log, by.found, S, *sizes[1:],
            VARIANCE=ctx.with_variance, **P, **sizes.launch("rows_backward"),
        )  # fmt: skip
        inputs_backward_kernel[(S, 2)](
            *views(mask, scales[1]), tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A,
            X, OX, T, Z, E, unit_grad, turned_v, view(by.by_key), empty(2, S, NP, NP), values,
            *views(d_o, d_k, d_v), by.found, S, H, N, C, D,
            VARIANCE=ctx.with_variance, KEY_SIGN=by.key_sign, **P, **sizes.launch("inputs_backward"),
        )  # fmt: skip
        parameters = _parameter_gradients(ctx, by.found, (noise, scale_q, scale_k), 4)
        return by.d_q, d_k, d_o, d_v, *parameters, by.d_log, *[None] * 5


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        noise: Tensor,  # [..., 1, 1]
        scale_q: Tensor,  # [..., 1, 1]
        scale_k: Tensor,  # [..., 1, 1]
        log_amplitude: Tensor | None,  # [B, H, Q]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        lead: torch.Size,
        with_variance: bool,
        cost: Cost,
    ) -> tuple[Tensor | None, ...]:
        from gpattention.ops.exact.kernels import direct_kernel

        (B, H, NQ, _), (N, C), D, empty = q.shape, k.shape[2:], v.shape[3], allocator(q)
        sizes = Sizes(B, H, NQ, N, C, D)
        S, P = sizes.heads, sizes.padded
        QP, NP, CP, _ = P.values()
        r = _roots(sizes, k, None, v, mask, noise, scale_k, lead, int(with_variance))
        tokens_q, K = empty(S, QP, CP), empty(S, QP, NP)
        W, weights = (
            empty(S, NP, QP) if with_variance else K,
            K if log_amplitude is None else empty(S, QP, NP),
        )
        mean, raw, value = token_major(B, H, NQ, D, q), empty(S, QP), empty(B, H)
        stddev, variance, unit = empty(B, H, NQ), empty(B, H, NQ), empty(B, H, NQ)
        noise_, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
        direct_kernel[(S,)](
            *views(q, k, mask, query_mask, noise_, *scales, log_amplitude), tokens_q, r.tokens_k, r.tokens_v,
            r.turned, r.turned_roots, K, weights, W, view(mean), stddev, variance, unit, raw, *sizes[1:],
            VARIANCE=with_variance, **P, **sizes.launch("direct"),
        )  # fmt: skip
        prior = Prior(q, noise_, scales[0], log_amplitude, query_mask)
        saved = _cost_forward(cost, prior, mean, None, W, r.key, value, PRIOR_COVARIANCE)
        ctx.sizes, ctx.lead, ctx.with_variance, ctx.cost = sizes, lead, with_variance, cost
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, stddev, variance, raw,
            tokens_q, r.tokens_k, r.tokens_v, r.grams, r.roots, K, weights, W, *saved,
        )  # fmt: skip
        if not with_variance:
            return mean, None, None, None, None, None
        return mean, variance, r.key, None if cost == "none" else value, stddev, unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.ops.exact.kernels import direct_backward_kernel

        (
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, stddev, variance, raw,
            tokens_q, tokens_k, tokens_v, grams, roots, K, weights, W, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        (B, H, _, N, C, D), S, P, empty = sizes, sizes.heads, sizes.padded, allocator(mean)
        QP, NP, _, DP = P.values()
        by_mean, by_variance, *by_others, by_stddev, by_unit = grads
        by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
        X, OX, E, scratch = (empty(S, n, NP) for n in (QP, QP, QP, max(QP, NP)))
        d_k, d_v = token_major(B, H, N, C, mean), token_major(B, H, N, D, mean)
        noise_, *scales = (scalars(x, ctx.lead) for x in (noise, scale_q, scale_k))
        prior = Prior(mean, noise_, scales[0], log_amplitude, query_mask)
        by = _cost_backward(ctx, by_others, prior, saved, mean)
        spreads = [None if g is None else g.contiguous() for g in (by_stddev, by_variance, by_unit)]
        direct_backward_kernel[(S,)](
            view(by_mean), *spreads, view(mean), stddev, variance, raw,
            *views(mask, query_mask, noise_, *scales), tokens_q, tokens_k, tokens_v, grams, roots,
            K, weights, W, view(by.by_mean), by.by_explained, view(by.by_key),
            X, OX, E, scratch, empty(S, QP, DP), empty(S, DP, NP),
            *views(by.d_q, d_k, d_v), by.d_log, by.found, S, *sizes[1:],
            FACTORED=ctx.with_variance, KEY_SIGN=by.key_sign, **P, **sizes.launch("direct_backward"),
        )  # fmt: skip
        parameters = _parameter_gradients(ctx, by.found, (noise, scale_q, scale_k), 3)
        return by.d_q, d_k, d_v, *parameters, by.d_log, *[None] * 5
