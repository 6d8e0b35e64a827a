"""Samples that share what is before their draws: the numbers of full passes, and what is run how often."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.gp import ItemNoise
from gpattention.hosts import Handle
from gpattention.hosts.attach import _SITE_SEEDS
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.sharing import item_axes
from gpattention.hosts.sites import hooked
from tests.hosts.hosts import HOSTS, ITEMS, TOKENS, Encoder, Host, make

SAMPLES = 4
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # batches of other sizes round in other ways


def drawing(handle: Handle, *sites: int) -> Handle:
    chosen = tuple(site.index in sites for site in handle.sites)
    handle.settings = replace(handle.settings, draws=chosen)
    return handle


@pytest.mark.parametrize("sites", [(0, 1), (1,)], ids=["all", "last"])
@pytest.mark.parametrize("name", HOSTS)
def test_draws_are_those_of_full_passes(name: str, sites: tuple[int, ...]) -> None:
    host = make(name)
    handle = drawing(gpattention.attach(host.model.train()), *sites)
    full = handle.predict(host.inputs, SAMPLES, share=False, variances=True)
    assert handle.sharing.startswith("every sample is a full pass")
    for batch_size in (None, 3, 1, SAMPLES * ITEMS):
        found = handle.predict(host.inputs, SAMPLES, variances=True, batch_size=batch_size)
        torch.testing.assert_close(found.logits, full.logits, **CLOSE)
        for ours, theirs in zip(found.variances, full.variances, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, **CLOSE)
    shares = sites == (1,) or not name.startswith("encoder")  # which has no module before its attention
    assert ("calls of modules" in handle.sharing) is shares


@pytest.mark.parametrize(("name", "kind"), [("bert", "cgp"), ("encoder", "direct"), ("timm", "scgp")])
def test_so_are_those_of_converted_hosts(name: str, kind: str) -> None:
    host = make(name)
    gpattention.convert(host.model, kind, layers=[gpattention.find_sites(host.model).sites[1].name])
    predict = partial(gpattention.predict, host.model, host.inputs, SAMPLES, variances=True)
    found, full = predict(), predict(share=False)
    torch.testing.assert_close(found.logits, full.logits, **CLOSE)
    torch.testing.assert_close(found.variances[0], full.variances[0], **CLOSE)


@pytest.mark.parametrize("name", ["bert", "encoder, batch second", "own text"])
def test_variances_of_the_mean_pass(name: str) -> None:
    host = make(name)
    handle = gpattention.attach(host.model.eval())
    spread = [variance.sqrt() for variance in handle.variances(host.inputs)]  # [B, H, N] each
    for _ in range(2):  # the second time the mean pass ends at its last draw
        found = handle.predict(host.inputs, SAMPLES, seed=3, variance_from="mean", variances=True)
    for sample in range(SAMPLES):
        rows = torch.arange(ITEMS), torch.full((ITEMS,), sample)

        def hook(site: Site, call: AttentionCall) -> Tensor:
            noise = ItemNoise(3 + (site.index + 1) * _SITE_SEEDS, *rows)  # noqa: B023 used at once
            normal = noise.normal((1, *call.mean.shape), torch.float32, call.mean.device)[0]
            return call.mean + spread[site.index][..., None] * normal

        with torch.no_grad(), hooked(host.model, handle.sites, hook):
            output = host.call(host.model, host.inputs)
        expected = output if isinstance(output, Tensor) else output.logits
        torch.testing.assert_close(found.logits[sample], expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found.variances, spread, strict=True):
        torch.testing.assert_close(ours, theirs.square(), **CLOSE)


def test_layers_before_the_first_draw_run_once() -> None:
    host = make("bert")
    handle, rows = drawing(gpattention.attach(host.model), 1), list[tuple[str, int]]()
    handle.predict(host.inputs, 1)  # shows the task
    layers: Any = host.model.bert.encoder.layer
    for number, layer in enumerate(layers):  # a layer that is not run calls no part of it
        part = layer.intermediate.dense
        part.register_forward_hook(lambda _, x, y, n=number: rows.append((n, len(y))))
    handle.predict(host.inputs, SAMPLES)
    ours = Counter(n for n, _ in rows)
    assert ours[0] == 2  # once more to see where the items are
    assert sum(r for n, r in rows if n == 1) == SAMPLES * ITEMS
    handle.predict(host.inputs, SAMPLES, variance_from="mean")
    rows.clear()
    handle.predict(host.inputs, SAMPLES, variance_from="mean")
    assert Counter(rows) == {(0, ITEMS): 1, (1, ITEMS): SAMPLES}  # rows that stay in the cache
    rows.clear()
    handle.predict(host.inputs, SAMPLES, batch_size=12)
    assert rows == [(0, 5), (1, 5), (1, 10), (1, 5)]
    rows.clear()
    handle.predict(host.inputs, SAMPLES, batch_size=SAMPLES * ITEMS)  # all samples fit: they are one batch
    assert rows == [(0, ITEMS), (1, SAMPLES * ITEMS)]


class Odd(nn.Module):
    """An encoder whose parts may have a state, write to what they are given, or tell of no items."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.encoder, self.which = Encoder(), which
        self.positions = nn.Embedding(TOKENS, 16)
        self.squash = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))  # [N, E]: no items, though N may be their number
        layers = self.encoder.encoder.layers
        if self.which == "in place":
            y = 1 * x
            self.squash(y)  # whose result nobody takes
            x = x + y
        if self.which == "shared":  # one module before and after the draws
            x = layers[0](layers[0](x))
        if self.which == "written to":
            x = layers[0](x)
            x += 1
        x = layers[1](x)
        return self.encoder.head((layers[0](x) if self.which == "shared" else x)[:, 0])


@pytest.mark.parametrize("which", ["positions", "in place", "shared", "written to"])
@pytest.mark.parametrize("items", [TOKENS, 3])
def test_odd_hosts(which: str, items: int) -> None:
    torch.manual_seed(0)
    model, x = Odd(which).eval(), torch.randn(items, TOKENS, 16)
    handle = drawing(gpattention.attach(model), 1)
    full = handle.predict(x, SAMPLES, share=False).logits
    torch.testing.assert_close(handle.predict(x, SAMPLES).logits, full, **CLOSE)
    assert float(full.std(0).min()) > 0


def test_where_the_items_are() -> None:
    def axes(*shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        ours, theirs = ([torch.Size(pair[i]) for pair in shapes] for i in (0, 1))
        return item_axes(ours, theirs, 5, 1)

    assert axes(((5, 5, 2), (1, 5, 2))) == (0,)
    assert axes(((5, 5, 2), (5, 1, 2)), ((1, 5), (1, 5))) == (1, None)
    for wrong in [((5, 5), (5, 5)), ((10, 5), (2, 5)), ((5, 5), (1, 1)), ((5, 1), (1,))]:
        assert axes(wrong) is None


def test_refusals() -> None:
    host: Host = make("timm")
    with pytest.raises(ValueError, match=r"variance_from.*'sample'"):
        gpattention.attach(host.model).predict(host.inputs, variance_from="sample")  # type: ignore[arg-type]
