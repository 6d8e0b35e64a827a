"""Every family: means are the host's, draws spread, nothing of the model stays changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gpattention
from gpattention.adopt.attended import Attended
from gpattention.adopt.families import intercepting
from gpattention.adopt.reading import read
from gpattention.adopt.sites import Site, find_sites
from tests.adopt.hosts import HOSTS, ITEMS, Host, make

FAMILIES = list(HOSTS)


def logits(host: Host, inputs: Any = None) -> Tensor:
    inputs = host.inputs if inputs is None else inputs
    return read(host.call(host.model, inputs), "classification", inputs)


def pass_on(site: Site, told: Attended) -> Tensor:
    return told.mean


@pytest.fixture(params=FAMILIES)
def host(request: pytest.FixtureRequest) -> Host:
    return make(request.param)


def test_every_site_is_found_and_called(host: Host) -> None:
    heard = []

    def listener(site: Site, told: Attended) -> Tensor:
        heard.append(site.name)
        assert told.q.shape[1] == told.mean.shape[1] == site.heads
        assert told.mean.shape[-1] == site.head_dim
        return told.mean

    handle = gpattention.attach(host.model)
    assert len(handle.sites) == host.sites
    host.model.eval()
    with torch.no_grad(), intercepting(host.model, handle.sites, listener):
        logits(host)
    assert heard == [site.name for site in handle.sites]


@pytest.mark.parametrize("training", [False, True])
def test_the_host_means_pass_unchanged(host: Host, training: bool) -> None:
    handle = gpattention.attach(host.model)
    host.model.train(training)

    def run() -> Tensor:
        torch.manual_seed(1)  # of dropout
        return logits(host)

    plain = run()
    with intercepting(host.model, handle.sites, pass_on):
        met = run()
    torch.testing.assert_close(met, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(run(), plain)


def test_without_samples_it_is_the_model_itself(host: Host) -> None:
    host.model.train()
    handle = gpattention.attach(host.model)
    prediction = handle.predict(host.inputs, samples=0)
    assert host.model.training
    host.model.eval()
    with torch.no_grad():
        assert torch.equal(prediction.logits[0], logits(host))


def test_the_process_has_the_hosts_mean(host: Host) -> None:
    host.model.eval()
    handle = gpattention.attach(host.model)
    with torch.no_grad():
        torch.testing.assert_close(handle.process_mean(host.inputs), logits(host), rtol=1e-5, atol=1e-5)


def test_draws_spread_and_do_not_depend_on_batches(host: Host) -> None:
    handle = gpattention.attach(host.model)
    together = handle.predict(host.inputs, samples=4, seed=3)
    apart = handle.predict(host.inputs, samples=4, seed=3, batch_size=3)
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-5)
    assert float(together.logits.std(0).min()) > 0
    other = handle.predict(host.inputs, samples=4, seed=4)
    assert float((other.logits - together.logits).abs().min()) > 0
    more = handle.predict(host.inputs, samples=6, seed=3)
    torch.testing.assert_close(more.logits[:4], together.logits, rtol=1e-4, atol=1e-5)


def test_detaching_leaves_the_model_as_it_was(host: Host) -> None:
    host.model.eval()
    with torch.no_grad():
        before = logits(host)
    kept = {name: dict(vars(module)) for name, module in host.model.named_modules()}
    configs = {
        name: module.config._attn_implementation
        for name, module in host.model.named_modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation")
    }
    with gpattention.attach(host.model) as handle:
        handle.predict(host.inputs, samples=2)
        handle.variances(host.inputs)
    with torch.no_grad():
        assert torch.equal(logits(host), before)
    assert {name: dict(vars(module)) for name, module in host.model.named_modules()} == kept
    for name, implementation in configs.items():
        assert host.model.get_submodule(name).config._attn_implementation == implementation
    with pytest.raises(ValueError, match="detached"):
        handle.predict(host.inputs)


def test_an_error_inside_leaves_the_model_as_it_was(host: Host) -> None:
    host.model.eval()
    kept = {name: dict(vars(module)) for name, module in host.model.named_modules()}

    def broken(site: Site, told: Attended) -> Tensor:
        raise RuntimeError("broken")

    sites = find_sites(host.model).sites
    with pytest.raises(RuntimeError, match="broken"), intercepting(host.model, sites, broken):
        logits(host)
    assert {name: dict(vars(module)) for name, module in host.model.named_modules()} == kept
    assert torch.backends.mha.get_fastpath_enabled()


def test_variances_are_positive_and_respond(host: Host) -> None:
    from dataclasses import replace

    handle = gpattention.attach(host.model)
    variances = handle.variances(host.inputs)
    assert len(variances) == host.sites
    for site, variance in zip(handle.sites, variances, strict=True):
        assert variance.shape[:2] == (ITEMS, site.heads)
        assert bool((variance > 0).all())
    before = handle.settings
    handle.settings = replace(before, noise=before.noise * 10)
    for more, less in zip(handle.variances(host.inputs)[:1], variances[:1], strict=True):
        assert bool((more >= less * (1 - 1e-4)).all())
        assert float(more.mean()) > float(less.mean())
    handle.settings = replace(before, scale=before.scale * 2)
    torch.testing.assert_close(handle.variances(host.inputs)[0], 4 * variances[0])


@pytest.mark.parametrize("name", ["bert", "bert eager", "roberta", "distilbert"])
def test_what_is_written_in_padding_changes_nothing(name: str) -> None:
    host = make(name)
    handle = gpattention.attach(host.model)
    real = host.inputs["attention_mask"].bool()
    other = {**host.inputs, "input_ids": torch.where(real, host.inputs["input_ids"], 9)}
    first, second = (handle.variances(x)[1] for x in (host.inputs, other))  # [B, H, N]
    where = real[:, None].expand_as(first)
    torch.testing.assert_close(first[where], second[where])
    torch.testing.assert_close(handle.predict(host.inputs, 3).logits, handle.predict(other, 3).logits)
    without = handle.variances({"input_ids": host.inputs["input_ids"]})[1]
    assert not torch.allclose(without[where], first[where])


def test_more_padding_changes_no_variance() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    longer = {name: torch.nn.functional.pad(x, (0, 3)) for name, x in host.inputs.items()}
    short, long = handle.variances(host.inputs), handle.variances(longer)
    real = host.inputs["attention_mask"].bool()[:, None].expand_as(short[0])
    for a, b in zip(short, long, strict=True):
        torch.testing.assert_close(b[..., :7][real], a[real], rtol=1e-4, atol=1e-7)


def test_unused_implementations_are_refused() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    host.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="sdpa or eager, got 'flash_attention_2'"):
        handle.predict(host.inputs)


def test_masks_of_pairs_are_refused() -> None:
    host = make("encoder")
    encoder = host.model.encoder
    handle = gpattention.attach(encoder, call=lambda m, x: m(x, mask=torch.ones(7, 7).triu(1).bool())[:, 0])
    with pytest.raises(ValueError, match="differs"):
        handle.predict(host.inputs["x"])
    host = make("bert")
    pairs = torch.ones(ITEMS, 1, 7, 7, dtype=torch.bool).tril()
    handle = gpattention.attach(host.model)
    with pytest.raises(ValueError, match="causal or windowed"):
        handle.predict({"input_ids": host.inputs["input_ids"], "attention_mask": pairs})


def test_biases_in_masks_are_refused() -> None:
    host = make("encoder")
    handle = gpattention.attach(host.model.encoder, call=lambda m, x: m(x, mask=torch.randn(7, 7))[:, 0])
    with pytest.raises(ValueError, match="adds numbers"):
        handle.predict(host.inputs["x"])


def test_timm_switches_its_fused_attention_back() -> None:
    host = make("timm")
    gpattention.attach(host.model).predict(host.inputs, 2)
    assert [block.fused_attn for block in host.model.blocks] == [False, False]


def test_a_model_that_calls_no_site_is_told() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model, call=lambda model, x: torch.zeros(len(x["input_ids"]), 3))
    with pytest.raises(ValueError, match="called none"):
        handle.predict(host.inputs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_avoided() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    inputs = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padding}
    handle = gpattention.attach(encoder, call=lambda model, x: model(**x)[:, 0])
    with torch.no_grad():
        plain = encoder(**inputs)[:, 0]
    torch.testing.assert_close(handle.process_mean(inputs), plain, rtol=1e-5, atol=1e-5)
    assert float(handle.predict(inputs, samples=2).logits.std(0).max()) > 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_other_precisions(kind: torch.dtype) -> None:
    host = make("bert")
    handle = gpattention.attach(host.model.to(kind))
    prediction = handle.predict(host.inputs, samples=2)
    assert bool(prediction.probs.isfinite().all())
    if kind == torch.float64:
        host.model.eval()
        with torch.no_grad():
            close = {"rtol": 1e-10, "atol": 1e-10}
            torch.testing.assert_close(handle.process_mean(host.inputs), logits(host), **close)
