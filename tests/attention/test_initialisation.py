"""Every kind says something at step 0: on LayerNorm'ed tokens attention is neither off nor all-equal, outputs
have the size of values, and the standard deviation knows about the input.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import attention_class, build_attention, list_attention
from gpattention.attention.parameters import latent_points, spread_

BATCH, HEADS = 2, 2
KINDS = [
    (kind, normalize)
    for kind in list_attention()
    if attention_class(kind).weighs
    for normalize in (("none", "rows") if attention_class(kind).normalizes else (None,))
]
every_width = pytest.mark.parametrize("width", [16, 32, 64, 128])
every_length = pytest.mark.parametrize("length", [16, 64, 256])


def layer_norm(*shape: int) -> Tensor:
    return torch.nn.functional.layer_norm(torch.randn(*shape), shape[-1:])


class Start(NamedTuple):
    module: Any
    x: Tensor  # [B, N, E]
    q: Tensor  # [B, H, N, D] inputs of the kernel
    k: Tensor  # [B, H, N, D]
    v: Tensor  # [B, H, N, D]


def start(kind: str, normalize: str | None, width: int, length: int, **options: Any) -> Start:
    options |= {} if normalize is None else {"normalize": normalize}
    module: Any = build_attention(kind, embed_dim=HEADS * width, num_heads=HEADS, **options)
    x = layer_norm(BATCH, length, HEADS * width)

    def split(linear: torch.nn.Linear) -> Tensor:
        return linear(x).view(BATCH, length, HEADS, width).transpose(1, 2)

    shrink = width**-0.25 if kind.startswith("softmax") else 1.0
    q = shrink * split(module.query)
    k = q if getattr(module, "key", None) is None else shrink * split(module.key)
    return Start(module, x, q, k, split(module.value))


def mean_kappa(q: Tensor, k: Tensor) -> float:
    """Over pairs of different tokens."""
    kappa = torch.exp(-0.5 * torch.cdist(q, k).square())
    if k is q:
        kappa = kappa[..., ~torch.eye(q.shape[-2], dtype=torch.bool)]
    return float(kappa.mean())


def prior_stddev(s: Start) -> Tensor:
    """The standard deviation of a query before any key is seen.  [B, H, N]"""
    module, q, k = s.module, s.q, s.k
    if module.kind == "sgpa":
        return torch.ones(q.shape[:-1])
    if module.kind == "softmax-gp":  # eq. 21
        k_bar = k.mean(-2, keepdim=True)
        squares = (q - q.mean(-2, keepdim=True)).square().sum(-1)
        logarithm = 0.5 * squares + (q * k_bar).sum(-1) - (q @ k.mT).logsumexp(-1)
        return 0.2 * logarithm.exp()
    if module.normalize == "none":
        amplitude = torch.ones(q.shape[:-1])
    else:
        cap = {"scale": 0.2, "max_log_amplitude": math.log(2.0)}
        if module.kind == "scgp":
            amplitude = gp.sparse_row_log_amplitude(q, k, module.inducing_q.points, **cap).exp()
        else:
            amplitude = gp.row_log_amplitude(q, k, **cap).exp()
    noise = 0.01 if module.kind == "scgp" and module.include_noise else 0.0
    return (amplitude.square() + noise).sqrt()


@torch.no_grad()
@every_width
@every_length
@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_attention_is_on_and_its_deviation_says_something(
    kind: str, normalize: str | None, width: int, length: int
) -> None:
    s = start(kind, normalize, width, length)
    draws = attention_class(kind).draws
    assert 0.05 < mean_kappa(s.q, s.k) < 0.8
    found = s.module(s.x, need=("output", "weights", *(("variance",) if draws else ())))
    mean = found.weights @ s.v
    assert 0.1 < float(mean.norm() / s.v.norm()) < 10
    assert 0.1 < float(found.output.norm() / s.x.norm()) < 10
    assert 0.8 < float(s.v.norm() / s.x.norm()) < 1.25
    if draws:
        stddev = found.variance.sqrt().mean(-1) if kind == "sgpa" else found.variance.sqrt()
        ratio = stddev / prior_stddev(s)  # [B, H, N]
        assert float(ratio.max()) < 1.001
        assert 0.01 < float(ratio.mean()) < 0.95
        assert float(ratio.std(-1).mean()) > 0.01


@torch.no_grad()
@every_width
@every_length
def test_singular_features_start_in_proportion(width: int, length: int) -> None:
    module = build_attention("kep-svgp", embed_dim=HEADS * width, num_heads=HEADS, tokens=length)
    x = layer_norm(BATCH, length, HEADS * width)
    found = module(x, need=("output", "variance", "posterior"))
    assert 0.1 < float(found.output.norm() / x.norm()) < 10
    prior = found.posterior.prior_stddev[..., None].expand_as(found.variance)
    torch.testing.assert_close(found.variance.sqrt(), prior)  # so that the KL has little to say
    assert float(found.posterior.ksvd()) < 10


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["ard_rbf", "exp_dot"])
@pytest.mark.parametrize("normalize", ["none", "rows"])
@every_length
def test_other_kernels_start_in_proportion(kernel: str, normalize: str, length: int) -> None:
    s = start("kernel", normalize, 32, length, kernel=kernel)
    mean = s.module(s.x, need=("weights",)).weights @ s.v
    assert 0.1 < float(mean.norm() / s.v.norm()) < 10


@torch.no_grad()
@every_width
def test_inducing_inputs_start_among_the_tokens(width: int) -> None:
    s = start("scgp", "rows", width, 64, num_inducing=(32, 24))
    for points in (s.module.inducing_q.points, s.module.inducing_k.points):
        assert 0.05 < mean_kappa(s.k, points.expand(BATCH, -1, -1, -1)) < 0.8
    s = start("sgpa", None, width, 64)
    keys = torch.einsum("hme,hde->hmd", s.module.inducing, s.module.query.weight.view(HEADS, width, -1))
    assert 0.05 < mean_kappa(s.q, keys.expand(BATCH, -1, -1, -1)) < 0.8
    assert s.module.inducing_values.count_nonzero() == 0


@torch.no_grad()
def test_latent_inputs_start_as_keys() -> None:
    """So that cgp starts close to direct."""
    for kind in ("cgp", "scgp"):
        module: Any = build_attention(kind, embed_dim=32, num_heads=2)
        assert torch.equal(module.latent.weight, module.key.weight)
        assert module.latent.weight is not module.key.weight
    ours: Any = build_attention("cgp", embed_dim=32, num_heads=2, noise=2e-4)
    direct: Any = build_attention("direct", embed_dim=32, num_heads=2, noise=2e-4)
    direct.load_state_dict(ours.state_dict(), strict=False)
    x = layer_norm(2, 12, 32)
    expected = direct(x).output
    assert float((ours(x).output - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("width", [2, 4, 32, 128])
def test_few_dimensions_carry_the_distance(width: int) -> None:
    """E kappa = (1 + 2 s^2)^(-r/2) at four active dimensions, their squares kept at fewer."""
    linear = torch.nn.Linear(256, 2 * width)
    spread_(linear, 2)
    assert linear.bias.count_nonzero() == 0
    y = linear(layer_norm(4000, 256)).detach().view(-1, 2, width)
    points = latent_points(2, 4000, width).transpose(0, 1)  # [m, H, D]
    for sample in (y, points):
        total = sample.var(0).sum(-1)  # [H]
        active = sample[..., : min(4, width)].var(0).sum(-1)
        assert bool(((active - 4).abs() < 0.8).all())
        assert bool((total - active <= 0.06).all())
        if width > 4:
            assert bool((total - active > 0.03).all())
