"""Decoders: the host's answers stay, the process mean equals them, and variances see the past alone."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import gpattention
from gpattention.hosts import find_sites
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.sites import hooked
from tests.hosts.decoder_hosts import (
    CASES,
    DECODERS,
    ITEMS,
    SHARED,
    TOKENS,
    VOCABULARY,
    build,
    decoder,
    packed,
    sequences,
    texts,
)
from tests.oracles import causal_rows

pytestmark = pytest.mark.filterwarnings("ignore:variances of a handle")
CAPPED = {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}


def answer(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of every token."""
    with torch.no_grad():
        return model(**inputs).logits


def real(inputs: dict[str, Tensor]) -> Tensor:
    """[B, N]"""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return torch.ones(ITEMS, TOKENS, dtype=torch.bool) if mask is None else mask.bool()


def all_tokens(model: Any, inputs: Any) -> Tensor:
    """Logits as a tensor whose items are one for each text."""
    return model(**inputs).logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DECODERS)
def test_the_process_mean_is_the_hosts(name: str, case: str) -> None:
    model, inputs = decoder(name), CASES[case]()
    host = answer(model, inputs)
    handle = gpattention.attach(model, task="tokens")
    assert [site.attends for site in handle.sites] == ["causal"] * 2
    assert torch.equal(handle.predict(inputs, samples=0).tokens.logits.unflatten(1, (ITEMS, TOKENS))[0], host)
    mean = handle.process_mean(inputs)
    torch.testing.assert_close(mean[real(inputs)], host[real(inputs)], rtol=1e-5, atol=1e-5)
    assert torch.equal(answer(model, inputs), host)


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_encoder_decoders(name: str) -> None:
    both = sequences(name)
    host = answer(both.model, both.inputs)
    handle = gpattention.attach(both.model, task="tokens")
    assert [site.attends for site in handle.sites] == ["all", "causal", "cross", "causal", "cross"]
    mean = handle.process_mean(both.inputs)
    torch.testing.assert_close(mean[real(both.inputs)], host[real(both.inputs)], rtol=1e-5, atol=1e-5)
    assert torch.equal(answer(both.model, both.inputs), host)


def seen(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> list[AttentionCall]:
    """All calls of one pass."""
    calls: list[AttentionCall] = []

    def hook(site: Site, call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.mean

    with torch.no_grad(), hooked(model, find_sites(model).sites, hook):
        model(**inputs, **options)
    return calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gpt2", "grouped llama", "mistral", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("max_keys", [2, 256])
def test_variances_equal_the_oracle(name: str, case: str, max_keys: int) -> None:
    model, inputs = decoder(name), CASES[case]()
    handle = gpattention.attach(model, max_keys=max_keys, task="tokens")
    found, noise = handle.variances(inputs), float(handle.settings.noise[0, 0])
    for call, variance in zip(seen(model, inputs), found, strict=True):
        visible = call.past.rows(0, TOKENS)[:, 0].expand(ITEMS, -1, -1)
        k, v = call.per_query_head(call.k), call.per_query_head(call.v)
        q, k, v = (x.double().numpy() for x in (call.q, k, v))
        for b, h in np.ndindex(ITEMS, q.shape[1]):
            sees = visible[b].numpy()
            unit, _ = causal_rows.unit_variances(q[b, h], k[b, h], sees, noise=noise, max_keys=max_keys)
            power = np.array([np.mean(v[b, h, own] ** 2) if own.any() else 0.0 for own in sees])
            wanted = float(handle.settings.scale[0, 0]) ** 2 * unit * power
            rows = real(inputs)[b].numpy()
            np.testing.assert_allclose(variance[b, h].numpy()[rows], wanted[rows], rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_nothing_looks_ahead(name: str) -> None:
    model, inputs = decoder(name), texts()
    handle = gpattention.attach(model, task="tokens")
    first = handle.variances(inputs)
    inputs["input_ids"][:, 6:] = 5
    again = handle.variances(inputs)
    for before, after in zip(first, again, strict=True):
        torch.testing.assert_close(before[..., :6], after[..., :6])


@pytest.mark.parametrize("name", ["gpt2", "grouped llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches(name: str, kind: str) -> None:
    model, inputs = decoder(name), texts("left")
    whole = answer(model, inputs)

    def in_parts(model: Any, inputs: Any) -> Tensor:
        cache = tf.DynamicCache(config=model.config)
        if kind == "static":
            cache = tf.StaticCache(config=model.config, max_cache_len=TOKENS + 3)
        parts = []
        for start, stop in ((0, 5), (5, 6), (6, TOKENS)):
            given = {n: x[:, start:stop] for n, x in inputs.items() if n != "attention_mask"}
            mask = inputs["attention_mask"][:, :stop]
            parts.append(model(**given, attention_mask=mask, past_key_values=cache).logits)
        return torch.cat(parts, 1)

    with torch.no_grad():
        host = in_parts(model, inputs)
    rows = real(inputs)
    torch.testing.assert_close(host[rows], whole[rows], rtol=1e-4, atol=1e-4)
    handle = gpattention.attach(model, task="tokens", call=in_parts)
    assert torch.equal(handle.predict(inputs, samples=0).tokens.logits.unflatten(1, (ITEMS, TOKENS))[0], host)
    torch.testing.assert_close(handle.process_mean(inputs)[rows], host[rows], rtol=1e-5, atol=1e-5)


def test_sinks_have_weight_and_no_value() -> None:
    model = decoder("gpt-oss")
    (call, _) = seen(model, texts())
    assert call.sink is not None
    weights = call.past._masked(call, call.q, call.per_query_head(call.k), 0).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights @ call.per_query_head(call.v), call.mean, rtol=1e-4, atol=1e-5)
    assert bool((weights.sum(-1) < 1).all())


def test_soft_capped_logits_are_no_process_s() -> None:
    model, inputs = decoder("gemma2", **CAPPED), texts()
    host = answer(model, inputs)
    handle = gpattention.attach(model)
    (call, _) = seen(model, inputs)
    assert call.cap == 2.0
    weights = call.past._masked(call, call.q, call.per_query_head(call.k), 0).softmax(-1)
    torch.testing.assert_close(weights @ call.per_query_head(call.v), call.mean, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="soft-capped"):
        handle.process_mean(inputs)
    assert torch.equal(handle.predict(inputs, samples=0, tokens=True).tokens.logits[0].view_as(host), host)


@pytest.mark.parametrize(("cls", "stem", "why"), [
    ("T5ForConditionalGeneration", "T5", "relative-position"),
    ("MptForCausalLM", "Mpt", "ALiBi"),
])  # fmt: skip
def test_refused_by_name(cls: str, stem: str, why: str) -> None:
    sizes = {"d_model": 16, "vocab_size": 40}
    sizes |= {"n_layers": 1, "n_heads": 2} if stem == "Mpt" else {"num_layers": 1, "num_heads": 2, "d_ff": 16}
    with pytest.raises(ValueError, match=why):
        gpattention.attach(build(cls, stem, sizes))


def test_the_next_token_is_the_answer() -> None:
    model, inputs = decoder("grouped llama"), texts("right")
    host = answer(model, inputs)
    handle = gpattention.attach(model)
    result = handle.predict(inputs, samples=0)
    assert handle.task == "causal"
    last = inputs["attention_mask"].sum(-1) - 1
    assert torch.equal(result.logits[0], host[torch.arange(ITEMS), last])
    drawn = handle.predict(inputs, samples=3)
    assert drawn.logits.shape == (3, ITEMS, VOCABULARY)
    assert drawn.drawn
    everywhere = handle.predict(inputs, samples=0, tokens=True)
    assert torch.equal(everywhere.real, inputs["attention_mask"].bool())
    assert torch.equal(everywhere.probs, host.softmax(-1))
    with pytest.raises(ValueError, match="samples=0 for tokens=True, got 2"):
        handle.predict(inputs, samples=2, tokens=True)


def test_draws_of_a_prefix_are_those_of_the_whole() -> None:
    model, inputs = decoder("llama"), texts()
    handle = gpattention.attach(model, task="tokens")
    whole = handle.predict(inputs, samples=2, batch_size=1).tokens.logits.unflatten(1, (ITEMS, TOKENS))
    again = handle.predict(inputs, samples=2).tokens.logits.unflatten(1, (ITEMS, TOKENS))
    torch.testing.assert_close(whole, again, rtol=1e-4, atol=1e-4)
    assert float((whole[0] - whole[1]).abs().max()) > 1e-3


def test_bfloat16_hosts() -> None:
    model, inputs = decoder("grouped llama").bfloat16(), texts("left")
    host = answer(model, inputs)
    handle = gpattention.attach(model, task="tokens")
    assert torch.equal(handle.predict(inputs, samples=0).tokens.logits[0].view_as(host), host.float())
    mean = handle.process_mean(inputs)
    assert mean.dtype == torch.bfloat16
    torch.testing.assert_close(mean[real(inputs)], host[real(inputs)], rtol=0.1, atol=0.1)
    for variance in handle.variances(inputs):
        assert variance.dtype == torch.float32
        assert bool(variance.isfinite().all())


def test_classifiers_that_decode() -> None:
    sizes = {**SHARED, "num_labels": 3}
    model, inputs = build("LlamaForSequenceClassification", "Llama", sizes), texts("right")
    handle = gpattention.attach(model)
    with torch.no_grad():
        assert torch.equal(handle.predict(inputs, samples=0).logits[0], model(**inputs).logits)
    assert handle.task == "classification"
    signals = handle.signals(inputs)
    assert signals.variance.shape == signals.attention_entropy.shape == (ITEMS, 2 * 4)
    alone = handle.signals({n: x[1:2, :4] for n, x in inputs.items()})  # padding counts for nothing
    torch.testing.assert_close(signals.variance[1:2], alone.variance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(signals.attention_entropy[1:2], alone.attention_entropy, rtol=1e-4, atol=1e-5)


def test_classifiers_that_decode_are_fitted_like_encoders() -> None:
    model = build("LlamaForSequenceClassification", "Llama", {**SHARED, "num_labels": 3})
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(0))}
    labels = torch.arange(24) % 3
    handle = gpattention.attach(model)
    fit = handle.fit(inputs, labels, steps=2, samples=2)
    assert {c.name for c in fit.candidates} >= {"plain", "global", "heads"}
    for candidate in fit.candidates:
        assert np.isfinite(candidate.nll)
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_decoders_are_neither_converted_nor_exported_with_their_variance() -> None:
    with pytest.raises(ValueError, match=r"without causal attention, whose rows.*GPT2LMHeadModel"):
        gpattention.export_program(gpattention.attach(decoder("gpt2")), texts())
    with pytest.raises(ValueError, match="causal"):
        gpattention.convert(decoder("gpt2"))


def test_segments_do_not_see_one_another() -> None:
    model, inputs = decoder("grouped llama"), packed()
    calls = seen(model, inputs)
    visible = calls[0].past.rows(0, TOKENS)[0, 0]
    assert visible.sum(-1).tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 2]
    assert calls[0].past is calls[1].past
