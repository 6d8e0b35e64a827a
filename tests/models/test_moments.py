"""One pass instead of draws: rules against NumPy and against draws, our transformers, and refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.models import (
    AttentionConfig,
    Block,
    LogitGaussian,
    TextConfig,
    TextTransformer,
    Transformer,
)
from gpattention.models.moments import (
    Moments,
    activation_moments,
    attention_variance,
    block_moments,
    layer_norm_moments,
    linear_moments,
    tail_gaussian,
)
from tests.models.small_models import vision
from tests.oracles import moments as oracle

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}
E = 6


def numbers(*shape: int, dtype: torch.dtype = torch.float64, positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape) + positive)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.square() if positive else x).to(dtype)


def tokens(dtype: torch.dtype = torch.float64) -> Moments:
    return Moments(numbers(3, E, dtype=dtype), numbers(3, E, dtype=dtype, positive=True))


def compare(found: Moments, expected: Callable[..., Any], x: Moments) -> None:
    """Token by token."""
    assert x.variance is not None
    assert found.variance is not None
    for i in range(len(x.mean)):
        mean, variance = expected(x.mean[i].double().numpy(), x.variance[i].double().numpy())
        np.testing.assert_allclose(found.mean[i].double(), mean, **TOLERANCE[x.mean.dtype])
        np.testing.assert_allclose(found.variance[i].double(), variance, **TOLERANCE[x.mean.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rules(dtype: torch.dtype) -> None:
    x, W, b = tokens(dtype), numbers(4, E, dtype=dtype), numbers(4, dtype=dtype)
    g, h = numbers(E, dtype=dtype), numbers(E, 1, dtype=dtype)[:, 0]

    def plain(y: Tensor) -> Any:
        return y.double().numpy()

    compare(linear_moments(x, W, b), lambda m, v: (plain(W) @ m + plain(b), oracle.through(plain(W), v)), x)
    norm = layer_norm_moments(x, g, h, 1e-3)
    compare(norm, lambda m, v: oracle.layer_norm(m, v, plain(g), plain(h), 1e-3), x)
    compare(activation_moments(x, "gelu"), oracle.gelu, x)
    compare(activation_moments(x, "relu"), oracle.relu, x)
    P, own = numbers(2, 3, dtype=dtype), numbers(2, dtype=dtype, positive=True)
    assert x.variance is not None
    found = attention_variance(own[None, None], lambda: P[None, None], x.variance[None, None])
    assert found is not None
    expected = oracle.attention(*map(plain, (P, own, x.mean, x.variance)))[1]
    np.testing.assert_allclose(found[0, 0].double(), expected, **TOLERANCE[dtype])


def test_without_a_variance_it_is_the_mean() -> None:
    x = Moments(tokens().mean)
    norm, part = nn.LayerNorm(E, dtype=torch.float64), nn.GELU()
    torch.testing.assert_close(layer_norm_moments(x, norm.weight, norm.bias, norm.eps).mean, norm(x.mean))
    torch.testing.assert_close(activation_moments(x, "gelu").mean, part(x.mean))
    assert (x + x).variance is None
    assert attention_variance(None, lambda: x.mean, None) is None


def test_linear_maps_are_exact() -> None:
    """Against 400,000 draws of independent entries, through two maps whose first keeps them independent."""
    mean, variance, count = numbers(2, 3, 4), numbers(2, 3, 4, positive=True), 400_000
    weight, head = torch.diag(numbers(4)), nn.Linear(12, 3, dtype=torch.float64)
    x = linear_moments(Moments(mean, variance), weight, None)
    found = tail_gaussian(x.mean, x.variance, lambda y: head(y.flatten(1)))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, *mean.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        draws = head(linear(mean + variance.sqrt() * noise, weight).flatten(2))  # [S, B, C]
    torch.testing.assert_close(found.mean, draws.mean(0), rtol=0, atol=0.02)
    for item in range(2):
        torch.testing.assert_close(found.covariance[item], draws[:, item].T.cov(), rtol=0.01, atol=0.02)


def test_the_tail_is_linearised() -> None:
    tail = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Tanh()).double()
    mean, variance = numbers(2, 3, 4), numbers(2, 3, 4, positive=True)
    found = tail_gaussian(mean, variance, tail)
    for item in range(2):
        J = torch.func.jacrev(lambda x: tail(x[None])[0])(mean[item]).flatten(1)  # [C, R]
        C = J @ torch.diag(variance[item].flatten()) @ J.T
        torch.testing.assert_close(found.covariance[item], C)
    assert not found.mean.requires_grad


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("direct", {}), ("cgp", {}), ("scgp", {"num_inducing": 4}), ("sgpa", {"num_inducing": 4}),
    ("softmax-gp", {}), ("kernel", {}), ("softmax", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind for kind, _ in KINDS])
def test_means_are_the_models_own(kind: str, options: dict[str, Any]) -> None:
    model = vision(attention=AttentionConfig(kind, options)).eval()
    x = torch.randn(5, *model_shape(model))
    found, mean = model.predict(x, method="moments"), model.predict(x, samples=0)
    assert not found.drawn
    assert found.logit_variance is not None
    assert found.logit_variance.shape == found.probs.shape
    assert bool((found.logit_variance > 0).all()) is model.draws
    if not model.draws:
        torch.testing.assert_close(found.probs, mean.probs, rtol=1e-4, atol=1e-5)
    apart = model.predict(x, method="moments", batch_size=2)
    torch.testing.assert_close(apart.logit_variance, found.logit_variance, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[1:3].logit_variance, found.logit_variance[1:3])


def model_shape(model: Transformer) -> tuple[int, ...]:
    config: Any = model.config
    return (config.channels, *model.vision.sides)  # type: ignore[union-attr]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_a_block_is_its_parts(kind: str) -> None:
    """A block against the rules of NumPy, given the weights and variance of its attention."""
    model = vision(attention=kind).double().eval()
    block, attention = model.blocks[1], model.blocks[1].attention
    width, heads = model.config.width, model.config.heads
    x = Moments(numbers(1, 5, width), numbers(1, 5, width, positive=True))
    assert x.variance is not None
    found = block_moments(block, x, None, None)
    m, v = x.mean[0].numpy(), x.variance[0].numpy()

    def weights(module: nn.Module) -> tuple[Any, ...]:
        return tuple(p.detach().numpy() for p in module.parameters())

    def normed(norm: nn.LayerNorm, m: Any, v: Any) -> tuple[Any, Any]:
        pairs = [oracle.layer_norm(a, b, *weights(norm), norm.eps) for a, b in zip(m, v, strict=True)]
        return tuple(np.stack(each) for each in zip(*pairs, strict=True))  # type: ignore[return-value]

    def mapped(module: nn.Linear, m: Any, v: Any) -> tuple[Any, Any]:
        W, *b = weights(module)
        return m @ W.T + (b[0] if b else 0), np.stack([oracle.through(W, each) for each in v])

    n, nv = normed(block.norm, m, v)
    given = attention(torch.from_numpy(n)[None], need=("output", "weights", "variance", "posterior"))
    assert given.weights is not None
    assert given.variance is not None
    assert given.posterior is not None
    _, vv = mapped(attention.value, n, nv)
    D, parts = width // heads, []
    for h in range(heads):
        P, own = given.weights[0, h].numpy(), given.variance[0, h].numpy()
        parts.append(oracle.attention(P, own, n[:, :D], vv[:, h * D : (h + 1) * D])[1])
    z = given.posterior.mean[0].transpose(0, 1).flatten(1).numpy()
    a, av = mapped(attention.output, z, np.concatenate(parts, 1))
    m, v = m + a, v + av
    part = block.feed_forward
    f, fv = mapped(part.into, *normed(part.norm, m, v))
    pairs = [oracle.gelu(a, b) for a, b in zip(f, fv, strict=True)]
    f, fv = mapped(part.back, *(np.stack(each) for each in zip(*pairs, strict=True)))
    np.testing.assert_allclose(found.mean[0], m + f, rtol=1e-9, atol=1e-10)
    assert found.variance is not None
    np.testing.assert_allclose(found.variance[0], v + fv, rtol=1e-9, atol=1e-10)


def test_padding_changes_nothing() -> None:
    config = TextConfig(
        classes=3, depth=2, width=16, heads=2, vocabulary=40, embedding_width=8, max_length=7,
        attention="direct",
    )  # fmt: skip
    model, ids = TextTransformer(config).eval(), torch.randint(2, 40, (4, 5))
    padded = torch.cat([ids, torch.zeros(4, 2, dtype=torch.long)], 1)
    first, second = (model.predict(x, method="moments") for x in (ids, padded))
    torch.testing.assert_close(first.logit_variance, second.logit_variance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-5)


def test_covariance_has_any_rank() -> None:
    gaussian = LogitGaussian(numbers(2, 3), numbers(2, 3, 7))
    torch.testing.assert_close(gaussian.covariance.diagonal(dim1=-2, dim2=-1), gaussian.variance)


class Other(Block):
    """Which may do something else."""


def test_refusals() -> None:
    model = vision(attention="direct")
    x = torch.randn(2, *model_shape(model))
    with pytest.raises(ValueError, match="method to be one of draws, moments"):
        model.predict(x, method="means")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variances=False with method='moments'"):
        model.predict(x, method="moments", variances=True)
    model.blocks[1] = Other(model.blocks[1].attention, mlp_width=8, dropout=0.0)
    with pytest.raises(ValueError, match="a Other as block 1"):
        model.predict(x, method="moments")
