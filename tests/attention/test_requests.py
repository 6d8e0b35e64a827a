"""What a call may ask for and what it refuses: need, draws, inducing inputs, options, kinds of one's own."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from gpattention import gp
from gpattention.attention import (
    Attention,
    Heads,
    attention_class,
    base,
    build_attention,
    list_attention,
    register_attention,
)
from tests.attention.variants import (
    BATCH,
    DEFAULTS,
    EMBED,
    HEADS,
    NAMED,
    TOKENS,
    VARIANTS,
    WIDTH,
    Variant,
    build,
    every,
    padding,
    tokens,
)
from tests.refusals import refusals

POSTERIORS = [variant for variant in DEFAULTS if variant.draws]
every_posterior = every(POSTERIORS)
every_way = pytest.mark.parametrize("draw", ["independent", "joint"])


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def count(monkeypatch: pytest.MonkeyPatch, calls: Counter[str], owner: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


PARTS = {"variance": "_raw_variance", "weights": "_weights", "regularizer": "_regularizer"}


@every_posterior
@pytest.mark.parametrize("asked", ["output", *PARTS, "posterior"])
def test_only_what_is_named_is_computed(
    variant: Variant, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = build(variant), tokens()
    if asked == "weights" and not variant.weighs:
        with pytest.raises(ValueError, match="'kep-svgp' attention weighs no values"):
            module(x, need=(asked,))
        return
    calls: Counter[str] = Counter()
    count(monkeypatch, calls, type(module(x, need=("posterior",)).posterior), "_raw_variance")
    count(monkeypatch, calls, module, "_weights")
    count(monkeypatch, calls, module, "_regularizer")
    found = module(x, need=(asked,))
    expected = Counter({PARTS[asked]: 1} if asked in PARTS else {})
    if (variant.kind, asked) == ("softmax-gp", "regularizer"):
        expected = Counter()  # it has none but 0
    assert calls == expected
    parts = {"variance", "weights", "regularizer", "posterior"}
    absent = {name for name in parts if getattr(found, name) is None}
    assert absent == parts - {asked}
    assert found.output.shape == (BATCH, TOKENS, EMBED)


@every_posterior
@every_way
def test_draws_have_the_shape_of_the_mean_or_are_stacked(variant: Variant, draw: str) -> None:
    module, x = build(variant), tokens()
    second = build(variant, batch_first=False)

    def shape(module: Attention, x: Tensor, samples: int) -> tuple[int, ...]:
        return tuple(module(x, draw=draw, samples=samples, generator=seeded()).output.shape)

    assert shape(module, x, 1) == (BATCH, TOKENS, EMBED)
    assert shape(module, x, 4) == (4, BATCH, TOKENS, EMBED)
    assert shape(module, x[0], 1) == (TOKENS, EMBED)
    assert shape(module, x[0], 4) == (4, TOKENS, EMBED)
    assert shape(second, x.transpose(0, 1), 1) == (TOKENS, BATCH, EMBED)
    assert shape(second, x.transpose(0, 1), 4) == (4, TOKENS, BATCH, EMBED)


@every_posterior
@every_way
def test_draws_follow_their_generator(variant: Variant, draw: str) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    call = {"key_padding_mask": ignore, "draw": draw, "samples": 2}
    first = module(x, generator=seeded(), **call)
    assert torch.equal(module(x, generator=seeded(), **call).output, first.output)
    other = module(x, generator=seeded(1), **call).output - first.output
    assert float(other[:, ~ignore].detach().abs().max()) > 1e-3
    assert float(other[:, ignore].detach().abs().max()) == 0  # padding is not drawn
    assert float((first.output[0] - first.output[1]).detach().abs().max()) > 1e-3
    torch.manual_seed(3)
    default = module(x, **call).output
    torch.manual_seed(3)
    assert torch.equal(module(x, **call).output, default)


@every_posterior
@every_way
def test_draws_of_an_item_do_not_depend_on_its_batch(variant: Variant, draw: str) -> None:
    module, x = build(variant), tokens()

    def drawn(items: Tensor) -> Tensor:
        noise = gp.ItemNoise(seed=7, items=items, samples=torch.zeros_like(items))
        return module(x[items], draw=draw, generator=noise).output

    together = drawn(torch.arange(BATCH))
    for i in range(BATCH):
        assert_close(drawn(torch.tensor([i])), together[i, None], rtol=1e-9, atol=1e-9)
    assert float((together - module(x).output).detach().abs().max()) > 1e-3


DRAWS = 4000


@torch.no_grad()
@every([*POSTERIORS, *(v for v in VARIANTS if v.draws and v.causal)])
@every_way
def test_moments_of_draws(variant: Variant, draw: str) -> None:
    """Mean and covariance between tokens of an output entry, by the weights of the output projection."""
    module, x = build(variant), tokens(batch=1)
    if variant.causal and draw == "joint":
        with pytest.raises(gp.UndefinedCovarianceError, match="no covariance between rows"):
            module(x, draw=draw)
        return
    found = module(x, need=("posterior", "variance"))
    drawn = module(x, draw=draw, samples=DRAWS, generator=seeded()).output[:, 0]  # [S, N, E]
    spread = drawn.std(0)
    assert bool(((drawn.mean(0) - found.output[0]).abs() < 5 * spread / DRAWS**0.5).all())
    if draw == "joint":
        covariance = found.posterior.covariance()[0]  # [H, N, N] or [H, D, N, N]
    else:
        variance = found.variance[0] if found.variance.ndim == 3 else found.variance[0].mT
        covariance = torch.diag_embed(variance)
    covariance = covariance if covariance.ndim == 4 else covariance[:, None].expand(-1, WIDTH, -1, -1)
    if variant.weighs:
        weight = module.output.weight.unflatten(-1, (HEADS, WIDTH))  # [E, H, D]
    else:  # one map for all heads
        weight = torch.stack([torch.kron(e[:, None], module.output.weight) for e in torch.eye(HEADS)], 1)
    expected = torch.einsum("ehd,hdnm->enm", weight.square(), covariance)  # [E, N, N]
    if draw == "independent" and variant.kind == "kep-svgp":  # a token's channels share one number
        expected = torch.diag_embed(torch.einsum("ehd,hdn->ehn", weight, variance.sqrt()).square().sum(1))
    centred = drawn - drawn.mean(0)
    estimate = torch.einsum("sne,sme->enm", centred, centred) / (DRAWS - 1)
    scale = expected.diagonal(dim1=-2, dim2=-1).sqrt()  # [E, N]
    error = (estimate - expected) / (scale[..., :, None] * scale[..., None, :])
    assert float(error.abs().max()) < 5 * (2 / DRAWS) ** 0.5


def test_inducing_inputs_from_outside() -> None:
    module, x = build(NAMED["sgpa rbf"]), tokens()
    own, other = module.inducing, torch.randn(module.inducing.shape, dtype=torch.float64)
    found = module(x, inducing=other)
    assert found.inducing is other
    assert module(x).inducing is own
    assert float((found.output - module(x).output).detach().abs().max()) > 1e-3
    assert torch.equal(module(x, inducing=own.detach().clone()).output, module(x).output)


class MeanAttention(Attention):
    """Every query gets the mean of the values."""

    def _mean(self, heads: Heads) -> Tensor:
        return heads.v.mean(-2, keepdim=True).expand(-1, -1, heads.queries.shape[1], -1)

    def _regularizer(self, heads: Heads, generator: Generator | None) -> Tensor:
        raise NotImplementedError


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_KINDS", dict(base._KINDS))
    known = list_attention()
    assert register_attention("mean")(MeanAttention) is MeanAttention
    assert list_attention() == tuple(sorted([*known, "mean"]))
    assert attention_class("mean") is MeanAttention
    module, x = build(Variant("mean", "mean", {})), tokens()
    expected = module.output(module.value(x).mean(1, keepdim=True)).expand(-1, TOKENS, -1)
    assert_close(module(x).output, expected)
    weights = module(x, need=("weights",)).weights
    assert_close(weights, torch.full((BATCH, HEADS, TOKENS, TOKENS), 1 / TOKENS, dtype=torch.float64))
    register_attention("mean")(MeanAttention)  # the same class again, as a reloaded notebook does
    with pytest.raises(ValueError, match="'cgp' is taken by CGPAttention"):
        register_attention("cgp")(MeanAttention)
    with pytest.raises(TypeError, match="expected a subclass of Attention to register as 'x'"):
        register_attention("x")(torch.nn.Linear)  # type: ignore[arg-type]
    assert attention_class("cgp").kind == "cgp"


@pytest.mark.parametrize("kind", list_attention())
@pytest.mark.parametrize("name", ["embed_dim", "num_heads"])
@pytest.mark.parametrize("bad", ["4", None, 4.0, True, (1, 2), 0, -2, 2**70], ids=repr)
def test_bad_sizes_are_refused(kind: str, name: str, bad: Any) -> None:
    """By name, before they meet a comparison or a tensor."""
    with pytest.raises(ValueError, match=f"expected {name} "):
        build_attention(kind, **{"embed_dim": EMBED, "num_heads": HEADS, name: bad})


X = tokens()
MASK = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
JOINT = {"draw": "joint"}
BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("cgp rows", (X,), {"need": ("output", "colour")}, "need .*got 'colour'"),
    ("cgp rows", (X,), {"need": "variance"}, r"need .*got the text 'variance': write \('variance',\)"),
    ("cgp rows", (X,), {"draw": "both"}, "draw .*got 'both'"),
    *(("cgp rows", (X,), JOINT | {"samples": n}, f"samples .*>= 1, got {n}") for n in (0, 2.5, True)),
    ("cgp rows", (X,), {"samples": 3}, "samples=3 without a draw"),
    ("softmax", (X[..., :5],), {}, r"query of shape \[B, N, 12\].*got \(3, 7, 5\)"),
    ("softmax", (X[None],), {}, r"query of shape.*got \(1, 3, 7, 12\)"),
    ("softmax", (X, X[0]), {}, r"key of shape.*got \(7, 12\)"),
    ("softmax", (X, X, X[..., :3]), {}, r"value of shape.*got \(3, 7, 3\)"),
    ("softmax", (X, None, X), {}, "value without a key"),
    ("direct rows", (X, X[:1]), {}, r"one batch size.*key of \[1, 7\]"),
    ("kernel rbf rows", (X, X, X[:, :4]), {}, r"as many values as keys.*\[3, 4\]"),
    ("softmax", (X,), {"key_padding_mask": MASK.long()}, "key_padding_mask .*int64"),
    ("softmax", (X,), {"key_padding_mask": MASK[:, :4]}, r"\[3, 7\].*got shape \(3, 4\)"),
    ("softmax", (X,), {"query_padding_mask": MASK[0]}, r"query_padding_mask.*\(7,\)"),
    ("cgp rows", (X,), {"inducing": X}, "'cgp' attention takes no inducing inputs"),
    ("sgpa rbf", (X,), {"inducing": X}, r"\(2, 5, 12\), got \(3, 7, 12\)"),
    ("sgpa rbf", (X, tokens(seed=3)), {}, "'sgpa' attention is self-attention"),
    *(
        (name, (X,), asked, f"'{name.split()[0]}' attention has no posterior, so {next(iter(asked))}=")
        for name in ("softmax", "kernel rbf rows")
        for asked in ({"draw": "independent"}, JOINT, {"need": ("variance",)}, {"need": ("posterior",)})
    ),
    *(
        (variant.name, (tokens(length=queries), X), {}, f"got query of {queries} tokens and key of {TOKENS}")
        for variant in VARIANTS
        for queries in (1, 9)
        if variant.causal
    ),
]


@pytest.mark.parametrize(("name", "inputs", "options", "message"), BAD_CALLS)
def test_bad_calls_are_refused(name: str, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build(NAMED[name])(*inputs, **options)


NOISY = ("softmax-gp", "direct", "cgp", "scgp")
BAD_OPTIONS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("magic",), {}, "cgp, direct, kep-svgp, kernel.*got 'magic'"),
    (list_attention(), {"num_heads": 5}, "embed_dim .*num_heads, got 12 and 5"),
    (list_attention(), {"regularizer": "entropy"}, "regularizer of .* attention.*got 'entropy'"),
    (list_attention(), {"colour": 3}, "attention does not take.*'colour'"),
    (list_attention(), {"dropout": "0.1"}, "dropout to be a number, got '0.1'"),
    (("softmax",), {"dropout": 1.0}, "dropout in .*got 1.0"),
    (("kernel", "sgpa"), {"kernel": "laplace"}, "rbf, ard_rbf, exp_dot, got 'laplace'"),
    (("kernel", "direct", "cgp", "scgp"), {"normalize": "max"}, "normalize .*got 'max'"),
    (("softmax", "softmax-gp", "sgpa"), {"normalize": "rows"}, "does not take.*'normalize'"),
    (("direct", "cgp"), {"causal": True, "regularizer": "kl"}, "regularizer .*got 'kl'"),
    (("scgp", "sgpa"), {"causal": True}, "does not take.*'causal'"),
    (("softmax-gp", "direct", "scgp"), {"noise": 1e-5}, "noise .* above the floor 0.0001, got 1e-05"),
    (NOISY, {"noise": 1e300}, r"noise .*finite .*, got 1e\+300 as torch.float32"),
    (("softmax-gp",), {"prior_scale": -1.0}, "prior_scale .*finite and above .*, got -1.0"),
    (("direct",), {"noise": "0.1"}, "noise to be a number, got '0.1'"),
    (("direct",), {"noise": True}, "noise to be a number, got True"),
    (("direct",), {"max_stddev": None}, "max_stddev to be a number, got None"),
    (("cgp",), {"max_stddev": 0.0}, "max_stddev > 0, got 0.0"),
    (("cgp",), {"observation_noise": "0"}, "observation_noise to be a number, got '0'"),
    (("cgp",), {"latent_prior": "flat"}, "latent_prior .*got 'flat'"),
    (("cgp",), {"regularizer_samples": "3"}, "regularizer_samples to be a whole number, got '3'"),
    (("cgp",), {"regularizer_samples": 0}, "regularizer_samples .*>= 1, got 0"),
    (("scgp",), {"inducing": "sampled"}, "inducing .*got 'sampled'"),
    (("scgp",), {"values": "printed"}, "values .*got 'printed'"),
    (("scgp",), {"conditional": "fitc"}, "conditional .*got 'fitc'"),
    (("scgp",), {"num_inducing": (4, -1)}, "num_inducing .*>= 1, got -1"),
    (("scgp",), {"num_inducing": (4, 4, 4)}, r"num_inducing .*got \(4, 4, 4\)"),
    (("scgp",), {"num_inducing": None}, "num_inducing .*>= 1, got None"),
    (("scgp", "sgpa"), {"num_inducing": 0}, "num_inducing .*>= 1, got 0"),
    (("scgp", "sgpa"), {"num_inducing": 2.5}, "num_inducing to be a whole number.*, got 2.5"),
    (("scgp", "sgpa"), {"num_inducing": 2**70}, r"attention of at most 1e\+10 parameters, got"),
    (("sgpa",), {"jitter": -1.0}, r"jitter in \(0, 1\), got -1.0"),
    # text is what a recipe brings, and any text is true
    (NOISY, {"learn_noise": "False"}, "learn_noise to be true or false, got 'False'"),
    (("kernel", "cgp"), {"causal": "no"}, "causal to be true or false, got 'no'"),
    (("kernel",), {"symmetric": 0}, "symmetric to be true or false, got 0"),
    (("scgp",), {"include_noise": "no"}, "include_noise to be true or false, got 'no'"),
    *(
        entry
        for bad in (-1.0, math.inf, math.nan)
        for entry in (
            (("cgp",), {"observation_noise": bad}, f"observation_noise >= 0 and finite, got {bad}"),
            (("direct",), {"noise": bad}, f"noise .*finite and above .*, got {bad}"),
            (("direct",), {"prior_scale": bad}, f"prior_scale .*finite and above .*, got {bad}"),
            (("direct",), {"normalize": "none", "scale": bad}, f"scale .*finite and above .*, got {bad}"),
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [(kind, options, message) for kinds, options, message in BAD_OPTIONS for kind in kinds],
)
def test_bad_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, **{"embed_dim": EMBED, "num_heads": HEADS} | options)


def call(**given: Any) -> Any:
    return build_attention("cgp", EMBED, HEADS)(**{"query": tokens().float(), **given})


test_habits_of_other_libraries = refusals([
    (lambda: build_attention("scgp", EMBED, HEADS, causal=True), "'causal' .kinds that have", "cgp, direct"),
    (lambda: build_attention("scgp", causal=True), "'causal' .kinds that have", "cgp, direct"),
    (lambda: build_attention("cgp", dim=EMBED, heads=HEADS), "did you mean 'embed_dim'", "'num_heads'"),
    (lambda: build_attention("cgp", EMBED), "num_heads to be given", "num_heads=4"),
    (lambda: build_attention("scgp", EMBED, HEADS)(tokens(), attn_mask=None), "attn_mask", "cgp, direct"),
    (lambda: build_attention("cgpt", EMBED, HEADS), "'cgpt'", "did you mean 'cgp'"),
    (lambda: build_attention(EMBED, HEADS, 0), "kind to be one of", str(EMBED)),  # type: ignore[arg-type]
    (lambda: call(attn_mask=None), "attn_mask", "key_padding_mask .* causal=True"),
    (lambda: call(is_causal=True), "is_causal", "causal=True"),
    (lambda: call(need_weights=True), "need_weights", r"need=\('output', 'weights'\)"),
    (lambda: call(key_mask=None), "key_mask", "key_padding_mask"),
    (lambda: call(quux=None), "quux", "known: query, key"),
    (lambda: call(query=tokens().double()), "query of torch.float32", "torch.float64"),
    (lambda: call(key=tokens().double()), "key of torch.float32", "torch.float64"),
    (lambda: call(query=torch.ones(BATCH, TOKENS).long()), "query to be floating-", "int64.*Embedding"),
    (lambda: call(query=tokens().float().numpy()), "query to be a tensor", "ndarray"),
    (lambda: call(key_padding_mask=torch.ones(BATCH, TOKENS)), "key_padding_mask to be bool", "mask == 0"),
])  # fmt: skip


def test_autocast_takes_what_it_casts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert call(query=tokens().bfloat16()).output.isfinite().all()
