"""What a call may ask for: `need`, draws, and the errors for everything else."""

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
    AttentionOutput,
    Heads,
    attention_class,
    build_attention,
    list_attention,
    register_attention,
    registry,
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
    every_default,
    padding,
    tokens,
)

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
    calls: Counter[str] = Counter()
    count(monkeypatch, calls, type(module(x, need=("posterior",)).posterior), "_raw_variance")
    count(monkeypatch, calls, module, "_weights")
    count(monkeypatch, calls, module, "_regularizer")
    found = module(x, need=(asked,))
    expected = Counter({PARTS[asked]: 1} if asked in PARTS else {})
    if (variant.kind, asked) == ("softmax-gp", "regularizer"):
        expected = Counter()  # it has none but 0
    assert calls == expected
    given = {
        name
        for name in ("variance", "weights", "regularizer", "posterior")
        if getattr(found, name) is not None
    }
    assert given == {asked} - {"output"}
    assert found.output.shape == (BATCH, TOKENS, EMBED)


# Cholesky factors of the output alone, and of output and variance
FACTORS = {"softmax-gp": (0, 1), "direct": (0, 1), "cgp": (1, 2), "scgp": (4, 5), "sgpa": (1, 1)}


@every_posterior
def test_factors_are_computed_when_asked_for(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build(variant), tokens()
    calls: Counter[str] = Counter()
    count(monkeypatch, calls, torch.linalg, "cholesky_ex")
    module(x)
    alone = calls.total()
    module(x, need=("variance",))
    assert (alone, calls.total() - alone) == FACTORS[variant.kind]


@every_default
def test_shapes(variant: Variant) -> None:
    module, x = build(variant), tokens()
    variance = ("variance",) if variant.draws else ()
    found = module(x, need=("output", "regularizer", "weights", *variance))
    assert isinstance(found, AttentionOutput)
    assert found.output.shape == (BATCH, TOKENS, EMBED)
    assert found.weights.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert found.regularizer.shape == ()
    if variant.draws:
        channels = (WIDTH,) if variant.kind == "sgpa" else ()
        assert found.variance.shape == (BATCH, HEADS, TOKENS, *channels)
        assert float(found.variance.detach().min()) > 0
    assert (found.inducing is module.inducing) if variant.kind == "sgpa" else (found.inducing is None)


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
    squares = module.output.weight.unflatten(-1, (HEADS, WIDTH)).square()
    expected = torch.einsum("ehd,hdnm->enm", squares, covariance)  # [E, N, N]
    centred = drawn - drawn.mean(0)
    estimate = torch.einsum("sne,sme->enm", centred, centred) / (DRAWS - 1)
    scale = expected.diagonal(dim1=-2, dim2=-1).sqrt()  # [E, N]
    error = (estimate - expected) / (scale[..., :, None] * scale[..., None, :])
    assert float(error.abs().max()) < 5 * (2 / DRAWS) ** 0.5


@pytest.mark.parametrize("kind", ["softmax", "kernel"])
@pytest.mark.parametrize(
    "asked", [{"draw": "independent"}, {"draw": "joint"}, {"need": ("variance",)}, {"need": ("posterior",)}]
)
def test_kinds_without_a_posterior_say_so(kind: str, asked: dict[str, Any]) -> None:
    module = build(NAMED["softmax" if kind == "softmax" else "kernel rbf rows"])
    (name, value), *_ = asked.items()
    with pytest.raises(ValueError, match=f"'{kind}' attention has no posterior") as error:
        module(tokens(), **asked)
    assert f"{name}={value!r}" in str(error.value)


X = tokens()
MASK = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
BAD_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "need": ("cgp rows", (X,), {"need": ("output", "colour")}, "got 'colour'"),
    "draw": ("cgp rows", (X,), {"draw": "both"}, "got 'both'"),
    "no samples": ("cgp rows", (X,), {"draw": "joint", "samples": 0}, "samples >= 1, got 0"),
    "samples of the mean": ("cgp rows", (X,), {"samples": 3}, "samples=3 without a draw"),
    "width": ("softmax", (X[..., :5],), {}, r"query of shape \[B, N, 12\].*got \(3, 7, 5\)"),
    "axes": ("softmax", (X[None],), {}, r"query of shape.*got \(1, 3, 7, 12\)"),
    "unbatched key": ("softmax", (X, X[0]), {}, r"key of shape.*got \(7, 12\)"),
    "value width": ("softmax", (X, X, X[..., :3]), {}, r"value of shape.*got \(3, 7, 3\)"),
    "value alone": ("softmax", (X, None, X), {}, "value without a key"),
    "key batch": ("direct rows", (X, X[:1]), {}, r"one batch size.*key of \[1, 7\]"),
    "value length": ("kernel rbf rows", (X, X, X[:, :4]), {}, r"as many values as keys.*\[3, 4\]"),
    "mask type": ("softmax", (X,), {"key_padding_mask": MASK.long()}, "key_padding_mask to be bool.*int64"),
    "mask shape": ("softmax", (X,), {"key_padding_mask": MASK[:, :4]}, r"shape \[3, 7\].*got shape \(3, 4\)"),
    "query mask": ("softmax", (X,), {"query_padding_mask": MASK[0]}, r"query_padding_mask.*\(7,\)"),
    "inducing inputs": ("cgp rows", (X,), {"inducing": X}, "'cgp' attention takes no inducing inputs"),
    "inducing shape": ("sgpa rbf", (X,), {"inducing": X}, r"\(2, 5, 12\), got \(3, 7, 12\)"),
    "causal lengths": ("cgp rows causal", (X, X[:, :4]), {}, "4 tokens like k"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case: str) -> None:
    name, inputs, options, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build(NAMED[name])(*inputs, **options)


BAD_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"regularizer": "entropy"}, f"'{kind}' attention.*got 'entropy'") for kind in list_attention()),
    *((kind, {"colour": 3}, f"'{kind}' attention does not take.*'colour'") for kind in list_attention()),
    *((kind, {"kernel": "laplace"}, "rbf, ard_rbf, exp_dot, got 'laplace'") for kind in ("kernel", "sgpa")),
    *((kind, {"normalize": "max"}, "got 'max'") for kind in ("kernel", "direct", "cgp", "scgp")),
    *(
        (kind, {"normalize": "rows"}, "does not take.*'normalize'")
        for kind in ("softmax", "softmax-gp", "sgpa")
    ),
    *((kind, {"causal": True, "regularizer": "kl"}, "got 'kl'") for kind in ("direct", "cgp")),
    *((kind, {"causal": True}, "does not take.*'causal'") for kind in ("scgp", "sgpa")),
    *(
        (kind, {"noise": 1e-5}, "above the floor 0.0001, got 1e-05")
        for kind in ("softmax-gp", "direct", "scgp")
    ),
    ("scgp", {"inducing": "sampled"}, "got 'sampled'"),
    ("scgp", {"values": "printed"}, "got 'printed'"),
    ("scgp", {"num_inducing": 0}, "got 0"),
    ("scgp", {"num_inducing": (4, 4, 4)}, r"got \(4, 4, 4\)"),
    ("sgpa", {"num_inducing": 0}, "got 0"),
    ("cgp", {"latent_prior": "flat"}, "got 'flat'"),
    ("cgp", {"max_stddev": 0.0}, "max_stddev > 0, got 0.0"),
    ("softmax", {"dropout": 1.0}, "dropout in .*got 1.0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, embed_dim=EMBED, num_heads=HEADS, **options)


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(12, 5), (0, 1), (12, 0), (12, -2)])
def test_heads_must_divide_the_width(embed_dim: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match=f"got {embed_dim} and {num_heads}"):
        build_attention("softmax", embed_dim=embed_dim, num_heads=num_heads)


def test_inducing_inputs_from_outside() -> None:
    module, x = build(NAMED["sgpa rbf"]), tokens()
    own, other = module.inducing, torch.randn(module.inducing.shape, dtype=torch.float64)
    found = module(x, inducing=other)
    assert found.inducing is other
    assert float((found.output - module(x).output).detach().abs().max()) > 1e-3
    assert torch.equal(module(x, inducing=own.detach().clone()).output, module(x).output)


class MeanAttention(Attention):
    """Every query gets the mean of the values."""

    def _mean(self, heads: Heads) -> Tensor:
        return heads.v.mean(-2, keepdim=True).expand(-1, -1, heads.queries.shape[1], -1)

    def _regularizer(self, heads: Heads, generator: Generator | None) -> Tensor:
        raise NotImplementedError


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
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


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="cgp, direct, kernel.*got 'magic'"):
        build_attention("magic", embed_dim=EMBED, num_heads=HEADS)
