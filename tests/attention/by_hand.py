"""What a module should compute, written out: projections by einsum, kernels from differences of all pairs,
and the `gp` functions where they are the formula.  Masks are True = real, [B, N].
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import Attention, Positive
from tests.attention.variants import EMBED, HEADS, WIDTH

Mask = Tensor | None


class Call(NamedTuple):
    """Arguments of the `gp` functions behind one module."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """[B, N, E] -> [B, H, N, D]"""
    y = torch.einsum("bne,hde->bhnd", x, linear.weight.view(HEADS, WIDTH, EMBED))
    return y + linear.bias.view(HEADS, 1, WIDTH)


def positive(p: Positive) -> Tensor:
    return p.floor + torch.log1p(p.raw.exp())


def merge(module: Attention, mean: Tensor) -> Tensor:
    """Heads [B, H, N, D] to the output [B, N, E]."""
    if module.kind == "kep-svgp":  # one map for all heads
        return (torch.einsum("bhns,ds->bnhd", mean, module.output.weight) + module.output.bias).flatten(2)
    weight = module.output.weight.view(EMBED, HEADS, WIDTH)
    return torch.einsum("bhnd,ehd->bne", mean, weight) + module.output.bias


def visible(q: Tensor, k: Tensor, real: Mask, real_query: Mask, causal: bool) -> Tensor:
    """Pairs of tokens that see each other.  [B, H, Q, K]"""
    seen = torch.ones(*q.shape[:2], q.shape[-2], k.shape[-2], dtype=torch.bool)
    if causal:
        seen &= torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2])[:, None]
    if real is not None:
        seen &= real[:, None, None, :]
    if real_query is not None:
        seen &= real_query[:, None, :, None]
    return seen


def kappa(q: Tensor, k: Tensor) -> Tensor:
    """exp(-1/2 |q_i - k_j|^2).  [..., Q, K]"""
    return torch.exp(-0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1))


def averaged(weights: Tensor) -> Tensor:
    """Rows divided by their sums; rows that see nothing stay 0."""
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True))


def kernel_function(module: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if module.kernel == "rbf":
        return kappa
    scale, variance = positive(module.lengthscale)[:, None], positive(module.variance)[:, None, None]
    if module.kernel == "ard_rbf":
        return lambda x, y: variance * kappa(x / scale, y / scale)
    return lambda x, y: variance * ((x / scale) @ (y / scale).mT).exp()


def kernel_weights(module: Any, query: Tensor, key: Tensor, real: Mask, real_query: Mask) -> Tensor:
    q = project(module.query, query)
    k = project(module.query if module.symmetric else module.key, key)
    weights = kernel_function(module)(q, k) * visible(q, k, real, real_query, module.causal)
    return averaged(weights) if module.normalize == "rows" else weights


def softmax_weights(module: Any, query: Tensor, key: Tensor, real: Mask, real_query: Mask) -> Tensor:
    q, k = project(module.query, query), project(module.key, key)
    return averaged((q @ k.mT / math.sqrt(WIDTH)).exp() * visible(q, k, real, real_query, module.causal))


def row_amplitude(q: Tensor, k: Tensor, t: Tensor, seen: Tensor, most: float) -> Tensor:
    """log(t / row sum), capped.  [B, H, Q]"""
    return (t[:, None] / (kappa(q, k) * seen).sum(-1)).clamp_max(most).log()


def gaussian_call(module: Any, query: Tensor, key: Tensor, real: Mask, real_query: Mask) -> Call:
    """direct, cgp, scgp."""
    q, k, v = project(module.query, query), project(module.key, key), project(module.value, key)
    causal = getattr(module, "causal", False)
    options: dict[str, Any] = {
        "noise": positive(module.noise),
        "mask": real if real is None else real[:, None],
    }
    options["query_mask"] = real_query if real_query is None else real_query[:, None]
    sets: tuple[Tensor, ...] = ()
    latent = () if module.kind == "direct" else (project(module.latent, key),)
    if module.kind == "scgp":
        sets = inducing_sets(module, key, latent[0], real)
        options["values"] = module.values
    if module.normalize == "none":
        options |= {"scale_q": positive(module.scale_q), "scale_k": positive(module.scale_k)}
        return Call((q, k, *latent, v, *sets), options)
    t = positive(module.prior_scale)
    if module.kind == "scgp":
        options["log_amplitude"] = gp.sparse_row_log_amplitude(
            q, k, sets[-1], scale=t, mask=options["mask"], query_mask=options["query_mask"],
            max_log_amplitude=math.log(module.max_stddev),
        )  # fmt: skip
    else:
        seen = visible(q, k, real, real_query, causal)
        amplitude = row_amplitude(q, k, t, seen, module.max_stddev)
        options["log_amplitude"] = torch.where(seen.any(-1), amplitude, 0.0)
    return Call((q, k, *latent, v / t[:, None, None], *sets), options)


def inducing_sets(module: Any, key: Tensor, latent: Tensor, real: Mask) -> tuple[Tensor, ...]:
    found = []
    for inducing in (module.inducing_q, module.inducing_k):
        if inducing is None:
            continue
        if hasattr(inducing, "points"):
            found.append(inducing.points)
            continue
        probes = inducing.probe.weight.view(HEADS, -1, EMBED)
        scores = torch.einsum("bne,hme->bhmn", key, probes).exp()
        scores = scores if real is None else scores * real[:, None, None, :]
        found.append(averaged(scores) @ latent + inducing.offsets)
    return tuple(found)


def sgpa_call(module: Any, query: Tensor, real: Mask) -> Call:
    q, v = project(module.query, query), project(module.value, query)
    weight, bias = module.query.weight.view(HEADS, WIDTH, EMBED), module.query.bias.view(HEADS, 1, WIDTH)
    b = torch.einsum("hme,hde->hmd", module.inducing, weight) + bias
    root = module.scale_lower.tril(-1) + torch.diag_embed(positive(module.scale_diagonal))
    options = {"kernel": kernel_function(module), "jitter": module.jitter}
    return Call(
        (q, v, b, module.inducing_values, root), options | {"mask": None if real is None else real[:, None]}
    )


def kep_call(module: Any, query: Tensor, real: Mask) -> Call:
    q, k = (
        torch.einsum("bne,hde->bhnd", query, linear.weight.view(HEADS, WIDTH, EMBED))
        for linear in (module.query, module.key)
    )
    root = module.scale_lower.tril(-1) + torch.diag_embed(module.log_diagonal.exp())
    rows = (module.query_rows, module.key_rows)
    tensors = (q, k, query.view(*q.mT.shape[:1], -1, HEADS, WIDTH).transpose(1, 2), *rows)
    options = {"mask": None if real is None else real[:, None], "combine": getattr(module, "combine", None)}
    return Call((*tensors, module.log_scale, module.inducing_mean, root), options)


CALLS = {"sgpa": (gp.sgpa_posterior, sgpa_call), "kep-svgp": (gp.kep_svgp_posterior, kep_call)}


def heads_by_hand(
    module: Any, query: Tensor, key: Tensor | None = None, *, real: Mask = None, real_query: Mask = None
) -> tuple[Tensor, Tensor | None]:
    """Mean [B, H, Q, D] and variance of the heads; without a key the key mask is the query mask too."""
    if key is None:
        key, real_query = query, real if real_query is None else real_query
    elif real is not None and real_query is None:
        real_query = torch.ones(query.shape[:2], dtype=torch.bool)
    if module.kind == "kernel":
        return kernel_weights(module, query, key, real, real_query) @ project(module.value, key), None
    if module.kind.startswith("softmax"):
        mean = softmax_weights(module, query, key, real, real_query) @ project(module.value, key)
        if module.kind == "softmax":
            return mean, None
        posterior = gp.softmax_posterior(
            project(module.query, query), project(module.key, key), project(module.value, key),
            noise=positive(module.noise), prior_scale=positive(module.prior_scale), causal=module.causal,
            mask=None if real is None else real[:, None],
            query_mask=None if real_query is None else real_query[:, None],
        )  # fmt: skip
        return mean, posterior.variance
    if module.kind in CALLS:
        function, call = CALLS[module.kind]
        tensors, options = call(module, query, real)
        posterior = function(*tensors, **options)
        return posterior.mean, posterior.variance
    tensors, options = gaussian_call(module, query, key, real, real_query)
    if module.kind == "direct":
        posterior = gp.direct_posterior(*tensors, causal=module.causal, **options)
    elif module.kind == "scgp":
        posterior = gp.scgp_posterior(
            *tensors, include_noise=module.include_noise, conditional=module.conditional, **options
        )
    elif module.causal:
        options.pop("query_mask")
        posterior = gp.causal_cgp_posterior(*tensors, **options)
    else:
        posterior = gp.cgp_posterior(*tensors, **options)
    return posterior.mean, posterior.variance
