"""What may be done to the inputs of attention without changing it: order, place, direction, units."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.calls import (
    AMPLITUDES,
    CAUSAL,
    EVERY,
    EXACT_DENSITIES,
    EXACT_KLS,
    INPUTS,
    JOINT_POSTERIORS,
    KEY_FIELDS,
    MODEL,
    NOISE,
    POSTERIORS,
    PRIOR_SCALE,
    QUERY_FIELDS,
    SCALE_K,
    SCALE_Q,
    Call,
    change,
    close,
    over,
    padding,
    same,
    seeded,
    tensors,
)
from tests.gp.samples import sample

SGPA = ("sgpa", "kl-sgpa")
SOFTMAX = ("softmax", "softmax-inducing", "softmax-causal")
AMPLIFIED = tuple(name for name, call in EVERY.items() if "log_amplitude" in call.extras)


def permutation(n: int, seed: int = 5) -> Tensor:
    return torch.randperm(n, generator=seeded(seed))


def reordered(name: str, x: Tensor, order: Tensor) -> Tensor:
    """An unbatched output for queries in another order."""
    if x.ndim == 0:
        return x
    return x[..., order, :][..., order] if name == "covariance" else x[order]


@padding
@over(but=(*SGPA, *CAUSAL))
def test_order_of_keys_does_not_matter(call: Call, padded: bool) -> None:
    s = call.problem(seed=1)
    moved = change(s, KEY_FIELDS, lambda x: x[permutation(7)])
    extra = [call.extra(x) if padded else {} for x in (s, moved)]
    same(call.outputs(s, **extra[0]), call.outputs(moved, **extra[1]))


@padding
@over(but=tuple(CAUSAL))
def test_outputs_follow_the_order_of_queries(call: Call, padded: bool) -> None:
    s = call.problem(seed=2)
    order = permutation(s.q.shape[-2])
    names = ("q", "v", "mask") if "k" not in call.arguments else QUERY_FIELDS
    moved = change(s, names, lambda x: x[order])
    extra = [call.extra(x) if padded else {} for x in (s, moved)]
    expected = {n: reordered(n, x, order) for n, x in call.outputs(s, **extra[0]).items()}
    same(expected, call.outputs(moved, **extra[1]))


@over("cgp", "scgp", "scgp-dual", "kl-cgp", "kl-scgp", "density-cgp-joint-latent", "density-scgp-marginal")
def test_order_of_latent_inputs_alone_does_not_matter(call: Call) -> None:
    s = call.problem(seed=3)
    same(call.outputs(s), call.outputs(replace(s, o=s.o[permutation(7)])))


@padding
@over(but=SOFTMAX)
def test_common_translation_does_not_matter(call: Call, padded: bool) -> None:
    s = call.problem(seed=4)
    moved = change(s, INPUTS, lambda x: x + torch.tensor([3.0, -4.0, 0.5], dtype=x.dtype))
    extra = call.extra(s) if padded else {}
    same(call.outputs(s, **extra), call.outputs(moved, **extra))


@padding
@over("softmax", "softmax-inducing")
def test_key_bias_does_not_matter_to_softmax(call: Call, padded: bool) -> None:
    s = call.problem(seed=4)
    moved = change(s, ("k", "inducing_k"), lambda x: x + torch.tensor([1.0, -2.0, 0.5], dtype=x.dtype))
    extra = call.extra(s) if padded else {}
    same(call.outputs(s, **extra), call.outputs(moved, **extra))


@over("softmax-causal", "softmax")
def test_key_bias_does_not_matter_to_softmax_when_the_constant_centre_follows(call: Call) -> None:
    s = call.problem(seed=4)
    bias = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    centre = 0.1 * bias.flip(0)
    before = call.outputs(s, centre=(centre, centre))
    same(before, call.outputs(replace(s, k=s.k + bias), centre=(centre, centre + bias)))
    close(before["mean"], call(replace(s, k=s.k + bias)).mean)  # the mean needs no centre


@padding
@over()
def test_common_rotation_does_not_matter(call: Call, padded: bool) -> None:
    s = call.problem(seed=5)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=seeded(6), dtype=torch.float64)).Q
    moved = change(s, INPUTS, lambda x: x @ turn)
    extra = call.extra(s) if padded else {}
    same(call.outputs(s, **extra), call.outputs(moved, **extra))


@over(table=POSTERIORS)
def test_mean_is_affine_in_the_values_and_the_covariance_ignores_them(call: Call) -> None:
    s = call.problem(seed=6)
    other = replace(s, v=call.problem(seed=7).v)
    mixed = replace(s, v=3 * s.v - 2 * other.v)
    one, two, both = (call.outputs(x) for x in (s, other, mixed))
    close(both.pop("mean"), 3 * one.pop("mean") - 2 * two.pop("mean"))
    same(one, two)
    same(one, both)


@over(table=POSTERIORS, but=SGPA)
def test_mean_of_zero_values_is_zero(call: Call) -> None:
    s = call.problem(seed=6)
    mean = call(replace(s, v=0 * s.v)).mean
    close(mean, torch.zeros_like(mean), atol=0.0, rtol=0.0)


@padding
@over("direct", "direct-causal", "cgp", "cgp-causal", "scgp-noise-free")
def test_query_scale_multiplies_mean_and_squares_into_the_covariance(call: Call, padded: bool) -> None:
    s, c = call.problem(seed=8), 2.5
    extra = call.extra(s) if padded else {}
    one, scaled = call.outputs(s, **extra), call.outputs(s, **extra, scale_q=c * SCALE_Q)
    power = {"mean": 1, "stddev": 1, "variance": 2, "covariance": 2}
    for name in set(one) - {"log_variance"}:
        close(scaled[name], c ** power[name] * one[name])
    close(scaled["log_variance"], one["log_variance"] + 2 * math.log(c))


@over("scgp", "scgp-dual", "scgp-shared")
def test_query_scale_leaves_the_noise_of_the_sparse_model_alone(call: Call) -> None:
    s, c = call.problem(seed=8), 2.5
    one, scaled = call.outputs(s), call.outputs(s, scale_q=c * SCALE_Q)
    noise = NOISE * torch.eye(5, dtype=torch.float64)
    close(scaled["mean"], c * one["mean"])
    close(scaled["covariance"] - noise, c**2 * (one["covariance"] - noise))


@over("softmax", "softmax-inducing", "softmax-causal")
def test_prior_scale_of_softmax_squares_into_the_variance_alone(call: Call) -> None:
    s, c = call.problem(seed=9), 3.0
    one, scaled = call.outputs(s), call.outputs(s, prior_scale=c * PRIOR_SCALE)
    close(scaled["mean"], one["mean"], atol=0.0, rtol=0.0)
    for name in {"variance", "covariance"} & set(one):
        close(scaled[name], c**2 * one[name])


@over(*AMPLIFIED)
def test_constant_log_amplitude_is_a_query_scale(call: Call) -> None:
    s, c = call.problem(seed=10), 1.9
    level = torch.full_like(s.log_amplitude, math.log(c))
    same(call.outputs(s, scale_q=c * SCALE_Q), call.outputs(s, log_amplitude=level))


@over("direct", "direct-causal", "cgp", "cgp-causal", "scgp-noise-free")
def test_log_amplitude_multiplies_rows(call: Call) -> None:
    s = call.problem(seed=11)
    a = s.log_amplitude.exp()
    one, scaled = call.outputs(s), call.outputs(s, log_amplitude=s.log_amplitude)
    close(scaled["mean"], a[:, None] * one["mean"])
    close(scaled["variance"], a.square() * one["variance"])
    if "covariance" in one:
        close(scaled["covariance"], a[:, None] * one["covariance"] * a)


@over("direct", "direct-causal")
def test_key_scale_values_and_noise_share_their_units(call: Call) -> None:
    s, c = call.problem(seed=12), 1.6
    units = {"scale_k": c * SCALE_K, "noise": c**2 * NOISE}
    same(call.outputs(s), call.outputs(replace(s, v=s.v / c), **units))


@over("cgp", "cgp-causal", "scgp-dual", "direct", "direct-causal")
def test_mean_is_linear_in_the_key_scale(call: Call) -> None:
    s, c = call.problem(seed=12), 1.6
    close(call(s, scale_k=c * SCALE_K).mean, c * call(s).mean)


@over("density-direct-marginal", "density-direct-joint")
def test_change_of_units_shifts_a_density_by_its_jacobian(call: Call) -> None:
    s, c = call.problem(seed=13), 1.4
    units = {"scale_q": c * SCALE_Q, "scale_k": c * SCALE_K, "noise": c**2 * NOISE}
    one, scaled = call(s), call(replace(s, v=s.v / c), **units)
    D = s.v.shape[-1]
    close(scaled.query, one.query - 5 * D * math.log(c))
    close(scaled.key, one.key - 7 * D * math.log(c))


@over(*(name for name in EXACT_DENSITIES if "joint" not in name), table=EXACT_DENSITIES)
def test_units_of_the_queries_shift_the_query_density(call: Call) -> None:
    s, c, tau = call.problem(seed=13), 1.4, 0.3
    one = call(s, observation_noise=tau)
    scaled = call(s, observation_noise=c**2 * tau, scale_q=c * SCALE_Q)
    close(scaled.query, one.query - 5 * s.v.shape[-1] * math.log(c))


@over(table=EXACT_KLS)
def test_units_of_the_queries_do_not_matter_to_the_divergence(call: Call) -> None:
    s, c, tau = call.problem(seed=14), 1.4, 0.3
    one = call(s, observation_noise=tau)
    close(call(s, observation_noise=c**2 * tau, scale_q=c * SCALE_Q), one)


@over(table=AMPLITUDES, but=("amplitude-capped",))
def test_scale_of_the_row_amplitude_adds_its_logarithm(call: Call) -> None:
    s, c = call.problem(seed=15), 2.0
    close(call(s, scale=c * SCALE_Q), call(s) + math.log(c))


def test_row_normalised_direct_attention_is_softmax_of_half_squared_distances() -> None:
    s = sample(queries=5, keys=7, seed=16)
    log_a = gp.row_log_amplitude(s.q, s.k, mask=s.mask)
    p = gp.direct_posterior(s.q, s.k, s.v, noise=NOISE, mask=s.mask, log_amplitude=log_a)
    logits = -0.5 * (s.q[:, None] - s.k[None]).square().sum(-1)
    weights = logits.masked_fill(~s.mask, -torch.inf).softmax(-1)
    close(p.mean, weights @ s.v)
    constant = gp.direct_posterior(
        s.q, s.k, torch.ones_like(s.v), noise=NOISE, mask=s.mask, log_amplitude=log_a
    )
    close(constant.mean, torch.ones_like(constant.mean))


@over(table=JOINT_POSTERIORS)
def test_variance_is_the_diagonal_and_the_covariance_is_a_covariance(call: Call) -> None:
    s = call.problem(seed=17)
    for extra in ({}, call.extra(s)):
        found = call.outputs(s, **extra)
        diagonal = found["covariance"].diagonal(dim1=-2, dim2=-1)
        close(found["variance"], diagonal.mT if diagonal.ndim == 2 else diagonal)
        close(found["stddev"].square(), found["variance"])
        close(found["log_variance"].exp(), found["variance"])
        close(found["covariance"], found["covariance"].mT)
        assert float(torch.linalg.eigvalsh(found["covariance"]).min()) > -1e-12


@over("cgp", "cgp-causal", "direct", "direct-causal", "scgp-noise-free")
def test_default_scales_are_one(call: Call) -> None:
    s = call.problem(seed=18)
    arguments = [getattr(s, name) for name in call.arguments]
    bare = call.function(*arguments, noise=NOISE, **call.options)
    close(bare.mean, call(s, scale_q=1.0, scale_k=1.0).mean, atol=0.0, rtol=0.0)
    close(bare.variance, call(s, scale_q=1.0, scale_k=1.0).variance, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("function", [gp.scgp_posterior, gp.scgp_kl, gp.scgp_log_density])
def test_one_inducing_set_for_both_stages_is_the_same_set_twice(function: Callable[..., Any]) -> None:
    s = sample(seed=19)
    once = function(s.q, s.k, s.o, s.v, s.inducing_q, **MODEL)
    twice = function(s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_q.clone(), **MODEL)
    same(tensors(once), tensors(twice))
