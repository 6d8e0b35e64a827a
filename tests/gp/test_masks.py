"""Padding is as if the tokens were not there, for results and gradients, whatever is written in it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.gp.calls import sgpa_kl
from tests.gp.oracle_pairs import PAIRS
from tests.gp.samples import SHARED, Sample, sample
from tests.gp.test_gradients import INPUTS, as_function, total

TOKEN_ROWS = ("k", "o", "v")


def poisoned(s: Sample) -> Sample:
    """NaN in every padded row."""
    nan = torch.nan
    fields = {n: torch.where(s.mask[..., None], getattr(s, n), nan) for n in TOKEN_ROWS}
    fields["q"] = torch.where(s.query_mask[..., None], s.q, nan)
    fields["log_amplitude"] = torch.where(s.query_mask, s.log_amplitude, nan)
    return dataclasses.replace(s, **fields)


def shrunk(s: Sample) -> Sample:
    """The same problem with the padded tokens removed (one sequence without leading axes)."""
    keep, keep_q = s.mask, s.query_mask
    return dataclasses.replace(
        s, q=s.q[keep_q], k=s.k[keep], o=s.o[keep], v=s.v[keep],
        log_amplitude=s.log_amplitude[keep_q], mask=keep[keep], query_mask=keep_q[keep_q],
    )  # fmt: skip


def self_attention(name: str, s: Sample) -> Sample:
    """Functions without a query mask have as many queries as keys, masked alike."""
    return s if "query_mask" in PAIRS[name].optional else dataclasses.replace(s, query_mask=s.mask)


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "kep-svgp cat"])  # which is of one length
def test_padding_anywhere_equals_no_padding(name: str) -> None:
    s = self_attention(name, sample(seed=7))
    call, leaves = as_function(name, poisoned(s), masked=True)
    padded = call(*leaves)
    short_call, short_leaves = as_function(name, shrunk(s), masked=False)
    short = short_call(*short_leaves)
    for ours, theirs in zip(padded, short, strict=True):
        torch.testing.assert_close(without_padding(ours, s), theirs, rtol=1e-9, atol=1e-10)
        assert bool(ours.isfinite().all())

    ours = torch.autograd.grad(total_real(padded, s), leaves, allow_unused=True)
    theirs = torch.autograd.grad(total(list(short)), short_leaves, allow_unused=True)
    for field, a, b in zip(INPUTS, ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert bool(a.isfinite().all()), f"gradient of {field}"
        real = s.query_mask if field in ("q", "log_amplitude") else s.mask
        if field not in SHARED:
            assert bool((a[~real] == 0).all()), f"gradient of {field} at padding"
            a = a[real]
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def without_padding(x: Tensor, s: Sample) -> Tensor:
    """Rows (and columns) of real queries; numbers per sequence as they are."""
    keep = s.query_mask
    if x.ndim == 0:
        return x
    if x.ndim == 3 or (x.ndim == 2 and x.shape[0] == x.shape[1] == len(keep)):  # covariance
        return x[..., keep, :][..., keep]
    return x[keep]


def total_real(results: tuple[Tensor, ...], s: Sample) -> Tensor:
    return total([without_padding(x, s) for x in results])


@pytest.mark.parametrize("name", PAIRS)
def test_padded_queries_give_exact_zeros(name: str) -> None:
    s = self_attention(name, sample(2, 2, seed=8))
    call, leaves = as_function(name, poisoned(s), masked=True)
    for x in call(*leaves):
        if x.shape[:3] == s.query_mask.shape:  # per query: mean, variance, covariance rows
            assert bool((x[~s.query_mask] == 0).all())


@pytest.mark.parametrize("name", PAIRS)
def test_fully_masked_sequences_give_zeros_and_finite_gradients(name: str) -> None:
    s = sample(2, seed=9)
    mask, query_mask = s.mask.clone(), s.query_mask.clone()
    mask[1], query_mask[1] = False, False
    s = dataclasses.replace(s, mask=mask, query_mask=mask if name.endswith("causal") else query_mask)
    call, leaves = as_function(name, poisoned(s), masked=True)
    results = call(*leaves)
    for x in results:
        assert bool(x.isfinite().all())
        if name == "sgpa kl":  # what the inducing inputs cost does not depend on the tokens
            # values of zero add nothing: what stays is the inducing part
            free = sgpa_kl(s.k[0], 0 * s.v[0], s.inducing_k, s.inducing_v, s.scale_tril)
            torch.testing.assert_close(x[1], free, rtol=1e-12, atol=0)
        elif name == "kep-svgp kl":
            assert bool((x[1] == x[0]).all())
        elif "printed" in name:  # the printed constant -s / (2 sigma) has no n in it
            torch.testing.assert_close(x[1], torch.tensor(-4 / (2 * 0.1**0.5), dtype=x.dtype))
        else:
            assert bool((x[1] == 0).all())
    for field, g in zip(
        INPUTS, torch.autograd.grad(total(list(results)), leaves, allow_unused=True), strict=True
    ):
        assert g is None or bool(g.isfinite().all()), field


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(n for n, p in PAIRS.items() if "query_mask" in p.optional)),
    lead=st.sampled_from([(), (1,), (3,), (1, 1), (2, 1), (1, 3)]),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    width=st.integers(1, 5),
    channels=st.integers(1, 3),
    inducing=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 10_000),
)
def test_any_shape_and_mask_equals_the_oracle(
    name: str,
    lead: tuple[int, ...],
    queries: int,
    keys: int,
    width: int,
    channels: int,
    inducing: tuple[int, int],
    seed: int,
) -> None:
    s = sample(
        *lead, queries=queries, keys=keys, width=width, channels=channels, inducing=inducing, seed=seed
    )
    pair = PAIRS[name]
    found = pair.torch(poisoned(s), {n: getattr(poisoned(s), n) for n in pair.optional}, 0.1)
    for index in itertools.product(*map(range, lead)):
        arrays = s.at(*index)
        wanted = pair.numpy(arrays, {n: arrays[n] for n in pair.optional}, 0.1)
        for ours, theirs in zip(found, wanted, strict=True):
            size = max(1.0, float(np.abs(theirs).max()))
            np.testing.assert_allclose(ours[index] / size, theirs / size, rtol=0, atol=1e-8)
