"""Masks and invariances: padding, blind queries, the order of tokens, later tokens, other sequences."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from gpattention.attention import Attention
from tests.attention.variants import (
    BATCH,
    DEFAULTS,
    HEADS,
    NAMED,
    TOKENS,
    VARIANTS,
    Variant,
    build,
    every,
    every_default,
    every_variant,
    needs,
    padding,
    tokens,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
GARBAGE = {"nan": torch.nan, "inf": torch.inf, "huge": 1e30}
written = pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)


class Results(NamedTuple):
    """Everything asked for, and the gradients of a weighted sum of it."""

    output: Tensor
    variance: Tensor | None
    regularizer: Tensor
    weights: Tensor | None
    to_tokens: Tensor
    to_parameters: dict[str, Tensor]


def results(module: Attention, x: Tensor, real: Tensor | None = None) -> Results:
    """Of real tokens alone, as if the batch were one long sequence.  `real` [B, N]"""
    everyone = torch.ones(x.shape[:2], dtype=torch.bool)
    kept = everyone if real is None else real
    x = x.clone().requires_grad_()
    found = module(x, key_padding_mask=None if real is None else ~real, need=needs(module))
    parts = [found.output[kept]]  # [n, E]
    if found.variance is not None:
        parts.append(found.variance.movedim(1, 2)[kept])  # [n, H] or [n, H, D]
    weighted = [(y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in parts]
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(
        sum(weighted) + found.regularizer,
        [x, *parameters.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    weights = found.weights
    if weights is not None:
        weights = weights[(kept[:, None, :, None] & kept[:, None, None, :]).expand_as(weights)]
    assert bool((gradients[0][~kept] == 0).all())
    return Results(
        parts[0], parts[1] if len(parts) > 1 else None, found.regularizer, weights,
        gradients[0][kept], dict(zip(parameters, gradients[1:], strict=True)),
    )  # fmt: skip


def same(found: Results, expected: Results) -> None:
    for x in (*expected[:5], *expected.to_parameters.values()):
        assert x is None or bool(x.isfinite().all())
    for name, ours, theirs in zip(Results._fields, found, expected, strict=True):
        assert_close(ours, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@every([variant for variant in VARIANTS if variant.any_length])
def test_padding_anywhere_is_as_if_deleted(variant: Variant) -> None:
    module, x, real = build(variant), tokens(), ~padding()
    poisoned = torch.where(real[..., None], x, torch.nan)
    for one, kept in zip(range(BATCH), real, strict=True):
        same(results(module, poisoned[one, None], kept[None]), results(module, x[one, None, kept]))


@every_default
@written
def test_whatever_is_written_in_the_padding(variant: Variant, garbage: float) -> None:
    module, x, real = build(variant), tokens(), ~padding()
    same(results(module, torch.where(real[..., None], x, garbage), real), results(module, x, real))


@every_variant
def test_the_query_given_as_key_and_value_is_self_attention(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    x[ignore] = torch.nan
    alone = module(x, key_padding_mask=ignore, need=needs(module))
    for named in ((x, x), (x, x, x)):
        found = module(*named, key_padding_mask=ignore, need=needs(module))
        for part in needs(module):
            assert torch.equal(getattr(found, part), getattr(alone, part)), part


@every([variant for variant in DEFAULTS if variant.weighs])
def test_values_of_their_own_leave_queries_and_keys_one_set(variant: Variant) -> None:
    module, x, v, ignore = build(variant), tokens(), tokens(seed=3), padding()
    x[ignore] = torch.nan
    found = module(x, x, v, key_padding_mask=ignore, need=needs(module))
    assert_close(found.weights, module(x, key_padding_mask=ignore, need=("weights",)).weights, **CLOSE)
    assert bool(found.output.isfinite().all())


CROSSING = [variant for variant in DEFAULTS if variant.crosses]


@every(CROSSING)
def test_padding_of_a_cross_attention(variant: Variant) -> None:
    module, x, y, z = build(variant), tokens(), tokens(length=5, seed=3), tokens(length=5, seed=4)
    ignore, ignore_query = padding(length=5, seed=5), padding()
    masks = {"key_padding_mask": ignore, "query_padding_mask": ignore_query}
    clean = module(x, y, z, **masks, need=needs(module))
    leaves = [
        torch.where(mask[..., None], torch.nan, a).requires_grad_()
        for a, mask in ((x, ignore_query), (y, ignore), (z, ignore))
    ]
    found = module(*leaves, **masks, need=needs(module))
    assert_close(found.output, clean.output, **CLOSE)
    assert_close(found.variance, clean.variance, **CLOSE)
    assert_close(found.regularizer, clean.regularizer, **CLOSE)
    loss = found.output.square().sum() + found.regularizer
    for g in torch.autograd.grad(loss, [*leaves, *module.parameters()], allow_unused=True):
        assert g is None or bool(g.isfinite().all())


@every([v for v in VARIANTS if not v.causal and v.weighs])  # else weights belong to places
def test_permuting_tokens_permutes_results(variant: Variant) -> None:
    module, x, real = build(variant), tokens(), ~padding()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    need = needs(module)
    for mask in (None, ~real):
        before = module(x, key_padding_mask=mask, need=need)
        after = module(x[:, order], key_padding_mask=None if mask is None else mask[:, order], need=need)
        assert_close(after.output, before.output[:, order], **CLOSE)
        assert_close(after.weights, before.weights[:, :, order][..., order], **CLOSE)
        assert_close(after.regularizer, before.regularizer, **CLOSE)
        if before.variance is not None:
            assert_close(after.variance, before.variance[:, :, order], **CLOSE)


@every([variant for variant in VARIANTS if variant.causal])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_later_tokens_change_no_earlier_result(variant: Variant, masked: bool) -> None:
    module, x, y = build(variant), tokens(), tokens(seed=6)
    ignore, need = padding() if masked else None, needs(module)
    before = module(x, key_padding_mask=ignore, need=need)
    for first in range(1, TOKENS):
        later = torch.cat([x[:, :first], y[:, first:]], 1)
        after = module(later, key_padding_mask=ignore, need=need)
        assert_close(after.output[:, :first], before.output[:, :first], **CLOSE)
        assert_close(after.weights[:, :, :first], before.weights[:, :, :first], **CLOSE)
        if before.variance is not None:
            assert_close(after.variance[:, :, :first], before.variance[:, :, :first], **CLOSE)
    assert float((after.output[:, -1] - before.output[:, -1]).detach().abs().max()) > 0.01


@every_variant
def test_sequences_do_not_see_each_other(variant: Variant) -> None:
    # the loss of singular values is the square of a mean over all of them
    module = build(variant, **({"regularizer": "kl"} if variant.kind == "kep-svgp" else {}))
    x, ignore = tokens(), padding()
    need = needs(module)
    together = module(x, key_padding_mask=ignore, need=need)
    shares = []
    for i in range(BATCH):
        alone = module(x[i, None], key_padding_mask=ignore[i, None], need=need)
        assert_close(alone.output, together.output[i, None], **CLOSE)
        if alone.weights is not None:
            assert_close(alone.weights, together.weights[i, None], **CLOSE)
        if alone.variance is not None:
            assert_close(alone.variance, together.variance[i, None], **CLOSE)
        shares.append(alone.regularizer * (~ignore[i]).sum())
    assert_close(torch.stack(shares).sum() / (~ignore).sum(), together.regularizer, **CLOSE)


@every_variant
def test_a_sequence_of_padding_alone(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    ignore[1] = True
    x[1] = torch.nan
    leaf = x.requires_grad_()
    found = module(leaf, key_padding_mask=ignore, need=needs(module))
    loss = found.output.square().sum() + found.regularizer
    if found.variance is not None:
        assert bool((found.variance[1] == 0).all())
        loss = loss + found.variance.sum()
    assert found.weights is None or bool((found.weights[1] == 0).all())
    assert_close(
        found.output[1], module.output.bias.repeat(1 if variant.weighs else HEADS).expand(TOKENS, -1)
    )
    assert bool(found.output.isfinite().all() & found.regularizer.isfinite())
    gradients = torch.autograd.grad(loss, [leaf, *module.parameters()], allow_unused=True)
    for g in gradients:
        assert g is None or bool(g.isfinite().all())
    assert bool((gradients[0][1] == 0).all())


@every_default
def test_a_sequence_of_padding_alone_adds_nothing_to_the_regulariser(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    parameters = list(module.parameters())
    ignore[1], others = True, torch.arange(BATCH) != 1
    beside = module(x, key_padding_mask=ignore, need=("regularizer",)).regularizer
    without = module(x[others], key_padding_mask=ignore[others], need=("regularizer",)).regularizer
    assert_close(beside, without, **CLOSE)
    if without.requires_grad:
        gradients = [torch.autograd.grad(y, parameters, allow_unused=True) for y in (beside, without)]
        for ours, theirs in zip(*gradients, strict=True):
            assert_close(ours, theirs, **CLOSE)


@every_default
def test_a_batch_of_padding_alone(variant: Variant) -> None:
    module, x = build(variant), torch.full_like(tokens(), torch.nan)
    found = module(x, key_padding_mask=torch.ones(BATCH, TOKENS, dtype=torch.bool), need=needs(module))
    assert bool(found.output.isfinite().all() & found.regularizer.isfinite())


@every_variant
def test_a_batch_without_sequences(variant: Variant) -> None:
    module = build(variant)
    found = module(tokens()[:0], need=needs(module), **({"draw": "independent"} if variant.draws else {}))
    assert found.output.shape == (0, *tokens().shape[1:])
    assert float(found.regularizer.detach()) == 0 or variant.kind in (
        "sgpa",
        "kep-svgp",
    )  # whose inducing values have a prior


@pytest.mark.parametrize("name", ["cgp rows causal", "cgp none causal", "sgpa rbf"])
def test_one_mask_for_queries_and_keys(name: str) -> None:
    module, x, ignore = build(NAMED[name]), tokens(), padding()
    expected = module(x, key_padding_mask=ignore).output
    both = module(x, key_padding_mask=ignore, query_padding_mask=ignore).output
    assert torch.equal(both, expected)
    kind = "causal 'cgp'" if name.startswith("cgp") else "'sgpa'"
    with pytest.raises(ValueError, match=f"{kind} attention has one mask for queries and keys"):
        module(x, query_padding_mask=ignore)
    with pytest.raises(ValueError, match=f"{kind} attention has one mask for queries and keys"):
        module(x, key_padding_mask=ignore, query_padding_mask=padding(seed=9))


# a causal cgp and sgpa have one mask for queries and keys: queries without a key are padding there
ASKED = [v for v in VARIANTS if v.draws and v.crosses and not (v.kind == "cgp" and v.causal)]


def some_without_keys(seed: int) -> Tensor:
    """True = ignore.  The first sequence has no key, the last all, the others whatever.  [B, N]"""
    g = torch.Generator().manual_seed(seed)
    ignore = torch.rand(BATCH, TOKENS, generator=g) < torch.rand(BATCH, 1, generator=g)
    ignore[0], ignore[-1] = True, False
    return ignore


def blind_queries(ignore: Tensor, causal: bool) -> Tensor:
    """Those that see no key.  [B, N]"""
    return ignore.cumprod(1).bool() if causal else ignore.all(1, keepdim=True).expand_as(ignore)


@every(ASKED)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**31 - 1))
def test_the_posterior_is_the_prior(variant: Variant, seed: int) -> None:
    module, x, y, ignore = build(variant), tokens(), tokens(seed=3), some_without_keys(seed)
    leaves = [x.requires_grad_(), torch.where(ignore[..., None], torch.nan, y).requires_grad_()]
    found = module(*leaves, key_padding_mask=ignore, need=("output", "variance", "posterior", "regularizer"))
    posterior, blind = found.posterior, blind_queries(ignore, variant.causal)
    unseen = blind[:, None].expand_as(found.variance)  # [B, H, N]
    assert bool((posterior.mean[unseen] == 0).all())
    prior = posterior.prior_stddev.expand_as(found.variance)
    assert_close(found.variance[unseen], prior[unseen].square(), rtol=1e-9, atol=1e-12)
    if variant.kind == "softmax-gp":  # softmax over nothing is undefined, and so is its amplitude
        assert bool((found.variance[unseen] == 0).all())
        assert bool((found.variance[~unseen] > 0).all())
    else:
        assert bool((found.variance > 0).all())
    loss = found.output.square().sum() + found.variance.sum() + posterior.stddev.sum() + found.regularizer
    for g in torch.autograd.grad(loss, [*leaves, *module.parameters()], allow_unused=True):
        assert g is None or bool(g.isfinite().all())


@pytest.mark.parametrize("draw", ["independent", "joint"])
@every([variant for variant in ASKED if not variant.causal])
def test_draws_vary_where_there_is_a_prior(variant: Variant, draw: str) -> None:
    module, x, y, ignore = build(variant), tokens(), tokens(seed=3), some_without_keys(0)
    g = torch.Generator().manual_seed(1)
    output = module(x, y, key_padding_mask=ignore, draw=draw, samples=4, generator=g).output  # [4, B, N, E]
    assert bool(output.isfinite().all())
    spread = output[:, 0].std(0).max()
    assert (float(spread.detach()) == 0) == (variant.kind == "softmax-gp")
