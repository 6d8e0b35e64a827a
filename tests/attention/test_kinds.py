"""Each kind computes its formula, and the kinds agree where theory says they do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gpattention.attention import list_attention
from tests.attention.by_hand import heads_by_hand, merge, project
from tests.attention.variants import (
    BATCH,
    EMBED,
    HEADS,
    NAMED,
    TOKENS,
    VARIANTS,
    Variant,
    build,
    every,
    every_variant,
    padding,
    tokens,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CROSSING = [variant for variant in VARIANTS if variant.crosses]
ONE_MASK = [variant for variant in CROSSING if variant.kind == "cgp" and variant.causal]
every_crossing = every(CROSSING)
OTHER = 5  # number of keys where it is not that of the queries


def needs(variant: Variant) -> tuple[str, ...]:
    return ("output", "variance", "posterior") if variant.draws else ("output",)


def matches(found: Any, module: nn.Module, mean: Tensor, variance: Tensor | None) -> None:
    """Output and variance, or no variance on either side."""
    assert_close(found.output, merge(module, mean), **CLOSE)
    assert (found.variance is None) == (variance is None)
    if variance is not None:
        assert_close(found.variance, variance, **CLOSE)
        assert_close(found.posterior.mean, mean, **CLOSE)


def test_the_table_holds_every_kind() -> None:
    assert tuple(sorted({variant.kind for variant in VARIANTS})) == list_attention()
    assert len(NAMED) == len(VARIANTS) == 2 + 24 + 2 + 4 + 4 + 18 + 3 + 3


@every_variant
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_self_attention_by_hand(variant: Variant, masked: bool) -> None:
    module, x, ignore = build(variant), tokens(), padding() if masked else None
    found = module(x, key_padding_mask=ignore, need=needs(variant))
    matches(found, module, *heads_by_hand(module, x, real=None if ignore is None else ~ignore))
    if ignore is not None:  # padded queries attend to nothing: the output projection of 0
        bias = module.output.bias  # of every head's part, or of all of them
        assert_close(found.output[ignore], bias.repeat(EMBED // len(bias)).expand(int(ignore.sum()), -1))


@every_crossing
@pytest.mark.parametrize("masks", ["none", "keys", "queries", "both"])
def test_cross_attention_by_hand(variant: Variant, masks: str) -> None:
    if variant in ONE_MASK and masks != "none":
        pytest.skip("its queries and keys have one mask")
    keys = TOKENS if variant.causal or masks == "keys" else OTHER  # a mask of as many keys masks no query
    module, x, y = build(variant), tokens(), tokens(length=keys, seed=3)
    ignore = padding(length=keys, seed=4) if masks in ("keys", "both") else None
    ignore_query = padding() if masks in ("queries", "both") else None
    found = module(x, y, key_padding_mask=ignore, query_padding_mask=ignore_query, need=needs(variant))
    real, real_query = (None if m is None else ~m for m in (ignore, ignore_query))
    matches(found, module, *heads_by_hand(module, x, y, real=real, real_query=real_query))


@every_crossing
def test_values_of_their_own(variant: Variant) -> None:
    module, x, y, z = build(variant), tokens(), tokens(seed=3), tokens(seed=5)
    found = module(x, y, z, need=("output", "weights"))
    assert_close(found.output, merge(module, found.weights @ project(module.value, z)), **CLOSE)
    assert_close(found.weights, module(x, y, need=("weights",)).weights, **CLOSE)


@every([variant for variant in VARIANTS if variant.weighs])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_weights_multiply_the_values(variant: Variant, masked: bool) -> None:
    ignore = padding() if masked else None
    module, x = build(variant), tokens()
    if variant.kind == "sgpa":  # the inducing values add their part, none at the start
        nn.init.zeros_(module.inducing_values)
    found = module(x, key_padding_mask=ignore, need=("output", "weights"))
    assert found.weights.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert_close(found.output, merge(module, found.weights @ project(module.value, x)), **CLOSE)
    if ignore is not None:
        assert bool((found.weights.masked_select(ignore[:, None, None, :]) == 0).all())
        assert bool((found.weights.masked_select(ignore[:, None, :, None]) == 0).all())


ROWS = [v for v in VARIANTS if v.kind in ("softmax", "softmax-gp")]
ROWS += [v for v in VARIANTS if v.kind in ("kernel", "direct") and v.options["normalize"] == "rows"]


@every(ROWS)
def test_rows_of_weights_sum_to_one(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    if variant.kind == "direct":  # far from the cap on amplitudes
        module.max_stddev = 1e6
    weights = module(x, key_padding_mask=ignore, need=("weights",)).weights
    assert float(weights.detach().min()) >= 0
    sums = torch.where(ignore, 0.0, 1.0).to(weights.dtype)[:, None].expand(-1, HEADS, -1)
    assert_close(weights.sum(-1), sums, **CLOSE)
    if variant.causal:
        assert torch.equal(weights, weights.tril())


def test_capped_rows_shrink() -> None:
    module, x = build(NAMED["direct rows"]), tokens()
    free = module(x, need=("weights", "variance"))
    module.max_stddev = 0.05
    capped = module(x, need=("weights", "variance"))
    assert float(capped.weights.sum(-1).detach().max()) < 1
    assert float(capped.variance.detach().max()) <= 0.05**2
    assert float(free.variance.detach().max()) > 0.05**2


def as_torch(module: Any, *, batch_first: bool) -> nn.MultiheadAttention:
    """torch's own with the same weights."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first, dtype=torch.float64).eval()
    linears = (module.query, module.key, module.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in linears]))
        theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in linears]))
        theirs.out_proj.load_state_dict(module.output.state_dict())
    return theirs


@pytest.mark.parametrize("kind", ["softmax", "softmax-gp"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("layout", ["batch first", "batch second", "unbatched"])
def test_softmax_is_torchs(kind: str, layout: str, masked: bool) -> None:
    batch_first = layout != "batch second"
    module = build(NAMED[kind], batch_first=batch_first)
    theirs = as_torch(module, batch_first=batch_first)
    x, y, ignore = tokens(), tokens(length=OTHER, seed=3), padding(length=OTHER, seed=4)
    if layout == "unbatched":
        x, y, ignore = x[0], y[0], ignore[0]
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    mask = ignore if masked else None
    found = module(x, y, key_padding_mask=mask, need=("output", "weights"))
    output, weights = theirs(x, y, y, key_padding_mask=mask, average_attn_weights=False)
    assert_close(found.output, output, **CLOSE)
    assert_close(found.weights, weights, **CLOSE)


@every_variant
def test_layouts_agree(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    need = ("output", *needs(variant)[1:2], *(("weights",) if variant.weighs else ()))
    expected = module(x, key_padding_mask=ignore, need=need)
    second = build(variant, batch_first=False)(x.transpose(0, 1), key_padding_mask=ignore, need=need)
    single = module(x[1], key_padding_mask=ignore[1], need=need)
    assert_close(second.output.transpose(0, 1), expected.output, **CLOSE)
    assert_close(single.output, expected.output[1], **CLOSE)
    if variant.weighs:
        assert_close(second.weights, expected.weights, **CLOSE)
        assert_close(single.weights, expected.weights[1], **CLOSE)
    if variant.draws:
        assert_close(second.variance, expected.variance, **CLOSE)
        assert_close(single.variance, expected.variance[1], **CLOSE)
