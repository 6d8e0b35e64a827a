"""What may be done to the inputs without changing the result; leading axes are loops; nothing looks ahead.

Order, place, direction and units of tokens, and amplitudes, need no tests of their own: the oracles, with
which everything is compared, have these by construction.
"""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp import calls
from tests.gp.calls import (
    NOISE,
    SCALE_K,
    SCALE_Q,
    Call,
    change,
    close,
    over,
    padding,
    same,
)
from tests.gp.samples import SHARED, Sample, sample

B, H = 2, 3
FACTORS = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)  # [H]


def per_head_inducing(s: Sample) -> Sample:
    """Another set of inducing inputs, with its values and factors, for each head.  [H, m, C]"""
    sets = [sample(seed=30 + h) for h in range(H)]
    return replace(s, **{name: torch.stack([getattr(x, name) for x in sets]) for name in SHARED})


def prefix(s: Sample, n: int) -> Sample:
    """The first n tokens of a sample."""
    cut = {f.name: getattr(s, f.name) for f in fields(s) if f.name not in SHARED}
    rows = ("q", "k", "o", "v")
    return replace(s, **{name: x[..., :n, :] if name in rows else x[..., :n] for name, x in cut.items()})


def assert_loops(call: Call, s: Sample, options: dict[str, Tensor], padded: bool) -> None:
    """The batched call with per-head `options` equals single calls with plain numbers."""
    together = call.outputs(s, **(call.extra(s) if padded else {}), **options)
    for b in range(B):
        for h in range(H):
            one = calls.head(s, b, h)
            plain = {name: float(x[h]) for name, x in options.items()}
            alone = call.outputs(one, **(call.extra(one) if padded else {}), **plain)
            same(alone, {name: x[b, h] for name, x in together.items()})


@padding
@over()
def test_per_head_parameters_and_inducing_inputs_are_a_loop_over_heads(call: Call, padded: bool) -> None:
    options = {name: value * FACTORS for name, value in call.parameters.items()}
    assert_loops(call, per_head_inducing(call.problem(B, H, seed=2)), options, padded)


@over(table=calls.EXACT_DENSITIES | calls.EXACT_KLS)
def test_per_head_observation_noise_is_a_loop_over_heads(call: Call) -> None:
    assert_loops(call, call.problem(B, H, seed=3), {"observation_noise": 0.3 * FACTORS}, padded=True)


@over(but=("sgpa", "kl-sgpa"))
def test_keys_shared_by_the_batch_may_keep_an_axis_of_one(call: Call) -> None:
    s = call.problem(B, H, seed=4)
    shared = change(s, calls.KEY_FIELDS, lambda x: x[:1])
    copied = change(s, calls.KEY_FIELDS, lambda x: x[:1].expand_as(x).contiguous())
    expected = call.outputs(copied, **call.extra(copied))
    found = call.outputs(shared, **call.extra(shared))  # the key density keeps the axis of one
    same(expected, {name: x.expand_as(expected[name]) for name, x in found.items()})


@over()
def test_mask_shared_by_the_heads_may_keep_an_axis_of_one(call: Call) -> None:
    s = call.problem(B, H, seed=5)
    shared = change(s, ("mask", "query_mask"), lambda x: x[:, :1])
    copied = change(s, ("mask", "query_mask"), lambda x: x[:, :1].expand_as(x).contiguous())
    same(call.outputs(copied, **call.extra(copied)), call.outputs(shared, **call.extra(shared)))


@padding
@pytest.mark.parametrize("n", [1, 4, 6])
@over(table=calls.CAUSAL)
def test_appending_tokens_leaves_earlier_rows_alone(call: Call, n: int, padded: bool) -> None:
    s = call.problem(B, H, seed=7)
    short = prefix(s, n)
    full = call.outputs(s, **(call.extra(s) if padded else {}))
    first = call.outputs(short, **(call.extra(short) if padded else {}))
    rows = {name: x[..., :n, :] if name == "mean" else x[..., :n] for name, x in full.items()}
    same(first, rows)


@pytest.mark.parametrize("amplified", [False, True], ids=["plain", "amplified"])
@padding
def test_incremental_state_with_batch_heads_and_masks_equals_the_causal_rows(
    padded: bool, amplified: bool
) -> None:
    s = sample(B, H, seed=12)
    s = replace(s, mask=s.mask & (torch.arange(7) > 0))  # a first token that is padding, too
    model = {"noise": NOISE * FACTORS, "scale_q": SCALE_Q * FACTORS, "scale_k": SCALE_K * FACTORS.flip(0)}
    options = {"mask": s.mask} if padded else {}
    options |= {"log_amplitude": s.log_amplitude} if amplified else {}
    expected = gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, **model, **options)
    state = gp.CausalCGPState(**model)
    for i in range(7):
        assert len(state) == i
        at = {name: x[..., i] for name, x in options.items()}
        row = state.append(s.q[..., i, :], s.k[..., i, :], s.o[..., i, :], s.v[..., i, :], **at)
        close(row.mean, expected.mean[..., i, :])
        close(row.variance, expected.variance[..., i])


@over("softmax-causal", "softmax")
def test_key_bias_does_not_matter_to_softmax_when_the_constant_centre_follows(call: Call) -> None:
    s = call.problem(seed=4)
    bias = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    centre = 0.1 * bias.flip(0)
    before = call.outputs(s, centre=(centre, centre))
    same(before, call.outputs(replace(s, k=s.k + bias), centre=(centre, centre + bias)))
    close(before["mean"], call(replace(s, k=s.k + bias)).mean)  # the mean needs no centre


@over(table=calls.JOINT_POSTERIORS)
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
