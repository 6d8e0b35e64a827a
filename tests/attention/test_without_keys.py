"""A query that sees no key learns nothing: its posterior is its prior, which softmax does not have there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.attention.variants import BATCH, TOKENS, VARIANTS, Variant, build, every, tokens

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
