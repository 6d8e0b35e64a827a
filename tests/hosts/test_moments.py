"""Moments of hosts around `nn.TransformerEncoder`, attached and converted, and who is refused by name."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from tests.hosts.hosts import CLASSES, Encoder, Host, make

HOSTS = ["encoder", "encoder, batch second"]


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_means_are_the_hosts(name: str, norm_first: bool) -> None:
    host = make(name)
    for layer in host.model.encoder.layers:  # type: ignore[union-attr]
        layer.norm_first = norm_first
    handle = gpattention.attach(host.model.train())
    handle.settings = replace(handle.settings, scale=1e-6 * handle.settings.scale)
    found = handle.predict(host.inputs, method="moments")
    torch.testing.assert_close(found.probs, handle.predict(host.inputs, samples=0).probs)
    assert host.model.training
    assert bool((found.logit_variance > 0).all())
    apart = handle.predict(host.inputs, method="moments", batch_size=2)
    torch.testing.assert_close(found.logit_variance, apart.logit_variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", HOSTS)
def test_linear_hosts_spread_as_draws_do(name: str) -> None:
    """Independent entries that only linear maps see: nothing is approximated."""
    host = make(name)
    layer: Any = host.model.encoder.layers[1]  # type: ignore[union-attr]
    with torch.no_grad():
        layer.norm_first = True
        layer.linear2.weight.zero_()
        layer.self_attn.out_proj.weight.copy_(torch.eye(16))
        nn.init.orthogonal_(host.model.head.weight)  # type: ignore[union-attr]
    handle = gpattention.attach(host.model)
    handle.settings = replace(handle.settings, scale=0.01 * handle.settings.scale, draws=(False, True))
    draws = handle.predict(host.inputs, samples=2000).logits.var(0)  # [B, C]
    found = handle.predict(host.inputs, method="moments").logit_variance
    ratio = found.mean(0) / draws.mean(0)
    torch.testing.assert_close(ratio, torch.ones(CLASSES), rtol=0.1, atol=0)


@pytest.mark.parametrize("kind", ["direct", "cgp", "scgp", "softmax-gp", "kernel"])
def test_converted_hosts(kind: str) -> None:
    host = make("encoder")
    gpattention.convert(host.model, kind, layers=["encoder.layers.1.self_attn"])
    predict = partial(gpattention.predict, host.model, host.inputs)
    found = predict(method="moments")
    assert bool((found.logit_variance > 0).all()) is (kind != "kernel")
    if kind == "kernel":
        torch.testing.assert_close(found.probs, predict(samples=0).probs)


def test_undrawn_and_temperature() -> None:
    host = make("encoder")
    handle = gpattention.attach(host.model)
    handle.settings = replace(handle.settings, draws=(False, False), temperature=2.0)
    found = handle.predict(host.inputs, method="moments")
    plain = handle.predict(host.inputs, samples=0)
    torch.testing.assert_close(found.probs, (plain.logits[0] / 2).softmax(-1))
    assert bool((found.logit_variance == 0).all())


class Beside(nn.Module):
    """An encoder with attention outside of it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inside, self.where = Encoder(), where
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "outside":
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.where == "twice":
            x = self.inside.encoder(x)
        return self.inside(x)


def refused(which: str) -> Host:
    host = make("encoder") if which not in ("bert", "timm") else make(which)
    layer: Any = host.model.encoder.layers[0] if which not in ("bert", "timm") else None  # type: ignore[union-attr]
    if which == "silu":
        layer.activation_relu_or_gelu, layer.activation = 0, nn.functional.silu
    if which == "adapter":
        layer.linear1 = nn.Sequential(layer.linear1)
    if which == "norm":
        layer.norm1 = nn.Identity()
    return host


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("bert", "BertForSequenceClassification with 0"), ("timm", "TimmViT with 0"),
        ("silu", "another activation .* layer 0"), ("adapter", "linear maps with something added"),
        ("norm", "other norms"),
    ],
)  # fmt: skip
def test_refusals(which: str, message: str) -> None:
    host = refused(which)
    with pytest.raises(ValueError, match=message):
        gpattention.attach(host.model).predict(host.inputs, method="moments")


def test_other_structures_are_refused() -> None:
    x = torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match="MultiheadAttention outside"):
        gpattention.attach(Beside("outside")).predict(x, method="moments")
    twice = gpattention.attach(Beside("twice"))
    twice.settings = replace(twice.settings, draws=(True, True, False))
    with pytest.raises(ValueError, match=r"2 calls of it|outside"):
        twice.predict(x, method="moments")
    with pytest.raises(ValueError, match=r"task 'classification'.*'regression'"):
        gpattention.attach(Encoder(), task="regression").predict(x, method="moments")
    with pytest.raises(ValueError, match="method to be one of"):
        gpattention.attach(Encoder()).predict(x, method="mean")  # type: ignore[arg-type]
