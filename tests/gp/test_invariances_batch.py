"""Leading axes are loops, and causal rows never look ahead."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.calls import (
    CAUSAL,
    EVERY,
    EXACT_DENSITIES,
    EXACT_KLS,
    KEY_FIELDS,
    MODEL,
    NOISE,
    SCALE_K,
    SCALE_Q,
    Call,
    change,
    close,
    free_parameters,
    head,
    over,
    padding,
    same,
    tensors,
)
from tests.gp.samples import Sample, sample

B, H = 2, 3
FACTORS = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)  # [H]


def per_head_inducing(s: Sample) -> Sample:
    """Another set of inducing inputs for each head.  [H, m, C]"""
    sets = [sample(seed=30 + h) for h in range(H)]
    return replace(
        s,
        inducing_q=torch.stack([x.inducing_q for x in sets]),
        inducing_k=torch.stack([x.inducing_k for x in sets]),
    )


def prefix(s: Sample, n: int) -> Sample:
    """The first n tokens of a sample."""
    cut = {f.name: getattr(s, f.name) for f in fields(s) if not f.name.startswith("inducing")}
    rows = ("q", "k", "o", "v")
    return replace(s, **{name: x[..., :n, :] if name in rows else x[..., :n] for name, x in cut.items()})


def assert_loops(call: Call, s: Sample, options: dict[str, Tensor], padded: bool) -> None:
    """The batched call with per-head `options` equals single calls with plain numbers."""
    together = call.outputs(s, **(call.extra(s) if padded else {}), **options)
    for b in range(B):
        for h in range(H):
            one = head(s, b, h)
            plain = {name: float(x[h]) for name, x in options.items()}
            alone = call.outputs(one, **(call.extra(one) if padded else {}), **plain)
            same(alone, {name: x[b, h] for name, x in together.items()})


@padding
@over()
def test_batched_call_is_a_loop_over_sequences_and_heads(call: Call, padded: bool) -> None:
    assert_loops(call, call.problem(B, H, seed=1), {}, padded)


@padding
@over()
def test_per_head_parameters_and_inducing_inputs_are_a_loop_over_heads(call: Call, padded: bool) -> None:
    options = {name: value * FACTORS for name, value in call.parameters.items()}
    assert_loops(call, per_head_inducing(call.problem(B, H, seed=2)), options, padded)


@over(table=EXACT_DENSITIES | EXACT_KLS)
def test_per_head_observation_noise_is_a_loop_over_heads(call: Call) -> None:
    assert_loops(call, call.problem(B, H, seed=3), {"observation_noise": 0.3 * FACTORS}, padded=True)


@over(but=("sgpa", "kl-sgpa"))
def test_keys_shared_by_the_batch_may_keep_an_axis_of_one(call: Call) -> None:
    s = call.problem(B, H, seed=4)
    shared = change(s, KEY_FIELDS, lambda x: x[:1])
    copied = change(s, KEY_FIELDS, lambda x: x[:1].expand_as(x).contiguous())
    expected = call.outputs(copied, **call.extra(copied))
    found = call.outputs(shared, **call.extra(shared))  # the key density keeps the axis of one
    same(expected, {name: x.expand_as(expected[name]) for name, x in found.items()})


@over()
def test_mask_shared_by_the_heads_may_keep_an_axis_of_one(call: Call) -> None:
    s = call.problem(B, H, seed=5)
    shared = change(s, ("mask", "query_mask"), lambda x: x[:, :1])
    copied = change(s, ("mask", "query_mask"), lambda x: x[:, :1].expand_as(x).contiguous())
    same(call.outputs(copied, **call.extra(copied)), call.outputs(shared, **call.extra(shared)))


@pytest.mark.parametrize("function", [gp.sgpa_posterior, gp.sgpa_kl])
def test_per_head_variational_parameters_are_a_loop_over_heads(function: Any) -> None:
    s = sample(B, H, seed=6)
    values, factor = free_parameters(6, 4, torch.float64)
    values = values * FACTORS[:, None, None]  # [H, m, D]
    factor = factor * FACTORS[:, None, None, None]  # [H, D, m, m]
    together = tensors(function(s.q, s.v, s.inducing_k, values, factor))
    for b in range(B):
        for h in range(H):
            alone = tensors(function(s.q[b, h], s.v[b, h], s.inducing_k, values[h], factor[h]))
            same(alone, {name: x[b, h] for name, x in together.items()})


@padding
@pytest.mark.parametrize("n", [1, 4, 6])
@over(table=CAUSAL)
def test_appending_tokens_leaves_earlier_rows_alone(call: Call, n: int, padded: bool) -> None:
    s = call.problem(B, H, seed=7)
    short = prefix(s, n)
    full = call.outputs(s, **(call.extra(s) if padded else {}))
    first = call.outputs(short, **(call.extra(short) if padded else {}))
    rows = {name: x[..., :n, :] if name == "mean" else x[..., :n] for name, x in full.items()}
    same(first, rows)


@over(table=CAUSAL)
def test_causal_rows_ignore_what_later_tokens_hold(call: Call) -> None:
    s, other = call.problem(seed=8), call.problem(seed=9)
    mixed = replace(
        s, **{n: torch.cat([getattr(s, n)[:4], 5 * getattr(other, n)[4:]]) for n in ("q", "k", "o", "v")}
    )
    one, two = call.outputs(s), call.outputs(mixed)
    for name in one:
        close(two[name][:4], one[name][:4])
        assert not torch.allclose(two[name][4:], one[name][4:])


@over(table=CAUSAL)
def test_causal_row_is_the_full_call_of_its_prefix(call: Call) -> None:
    s = call.problem(seed=10)
    full = EVERY[next(name for name, c in EVERY.items() if c is call).removesuffix("-causal")]
    options = {"centre": "none"} if "prior_scale" in call.parameters else {}
    rows = call.outputs(s, **call.extra(s), **options)
    for n in range(1, 8):
        short = prefix(s, n)
        found = full.outputs(short, **call.extra(short), **options)
        for name, x in rows.items():
            close(found[name][n - 1], x[n - 1])


def test_incremental_state_equals_the_causal_rows() -> None:
    s = sample(seed=11)
    expected = gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, **MODEL)
    state = gp.CausalCGPState(**MODEL)
    for i in range(7):
        assert len(state) == i
        row = state.append(s.q[i], s.k[i], s.o[i], s.v[i])
        close(row.mean, expected.mean[i])
        close(row.variance, expected.variance[i])
    assert len(state) == 7


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
        at = {name: x[..., i] for name, x in options.items()}
        row = state.append(s.q[..., i, :], s.k[..., i, :], s.o[..., i, :], s.v[..., i, :], **at)
        close(row.mean, expected.mean[..., i, :])
        close(row.variance, expected.variance[..., i])


def test_incremental_state_far_from_the_origin_equals_the_causal_rows() -> None:
    s = sample(seed=13)
    moved = change(s, ("q", "k", "o"), lambda x: x + 1000.0)
    expected = gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, **MODEL)
    state = gp.CausalCGPState(**MODEL)
    for i in range(7):
        row = state.append(moved.q[i], moved.k[i], moved.o[i], moved.v[i])
        # x + 1000 keeps 13 digits of x: the distances are good to 1e-12
        close(row.mean, expected.mean[i], rtol=1e-8, atol=1e-9)
        close(row.variance, expected.variance[i], rtol=1e-8, atol=1e-9)
