"""What a call may ask for: `need`, draws, inducing inputs, kinds of one's own."""

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
    parts = {"variance", "weights", "regularizer", "posterior"}
    absent = {name for name in parts if getattr(found, name) is None}
    assert absent == parts - {asked}
    assert found.output.shape == (BATCH, TOKENS, EMBED)


@every_posterior
def test_an_output_alone_needs_fewer_factors(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build(variant), tokens()
    calls: Counter[str] = Counter()
    count(monkeypatch, calls, torch.linalg, "cholesky_ex")
    module(x)
    alone = calls.total()
    module(x, need=("variance",))
    both = calls.total() - alone
    assert alone == both if variant.kind == "sgpa" else alone < both  # sgpa's factor serves both
    if variant.kind in ("softmax-gp", "direct"):
        assert alone == 0  # plain attention


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
