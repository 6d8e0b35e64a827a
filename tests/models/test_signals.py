"""Signals: the record, and the numbers of our models, whatever padding, batches and threads there are."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpattention.concurrency import handling
from gpattention.models import Signals, TextTransformer
from tests.models.small_models import KINDS, attentions, images, layer, sentences, text, vision
from tests.oracles.signals import entropy
from tests.refusals import refusals
from tests.threads import at_once

NAMES = ("blocks.0 head 0", "blocks.0 head 1", "blocks.1 head 0")


def some(items: int, length: int = 4, *, seed: int = 0) -> Signals:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = torch.randint(1, length + 1, (items,), generator=generator)
    mask = torch.arange(length) < tokens[:, None]
    return Signals(
        normal(items, 2), normal(items, 5), normal(items, 3), normal(items, 2), tokens, NAMES, NAMES[:2],
        mask, normal(items, length, 3) * mask[..., None], normal(items, length, 2) * mask[..., None],
    )  # fmt: skip


def same(a: Signals, b: Signals, tolerance: float = 0.0) -> None:
    x, y = a.to_dict(), b.to_dict()
    for name, found in x.items():
        if isinstance(found, Tensor):
            assert_close(found, y[name], atol=tolerance, rtol=0)
        else:
            assert found == y[name]


def test_items_are_taken_and_joined() -> None:
    whole = some(7)
    parts = [whole[:2], whole[torch.tensor([2, 3])], whole[4], whole[torch.arange(7) > 4]]
    assert [len(part) for part in parts] == [2, 2, 1, 2]
    same(Signals.cat(parts), whole)
    same(Signals(**whole.to_dict()), whole.to("cpu"))
    assert torch.equal(whole[-1].logits, whole.logits[6:])
    longer = some(3, 6, seed=1)
    joined = Signals.cat([whole, longer])  # what is said of tokens is padded
    assert torch.equal(joined.token_mask.sum(-1), joined.tokens)
    assert torch.equal(joined.token_variance[:7, :4], whole.token_variance)
    assert not joined.token_variance[:7, 4:].any()
    assert torch.equal(joined.token_attention_entropy[7:], longer.token_attention_entropy)


def put(**change: Any) -> Signals:
    return replace(some(3), **change)


test_refusals = refusals([
    (lambda: put(logits=None), "logits", "got NoneType"),
    (lambda: put(logits=torch.zeros(2, 2)), "logits", r"\[3, any\], got \(2, 2\)"),
    (lambda: put(features=torch.zeros(3, dtype=torch.int64)), "features to be floating", "int64"),
    (lambda: put(variance=torch.zeros(3, 2)), "variance", r"\[3, 3\], got \(3, 2\)"),
    (lambda: put(attention_entropy=torch.zeros(3, 3)), "attention_entropy", r"\[3, 2\]"),
    (lambda: put(attention_entropy=[1.0]), "attention_entropy", "got list"),
    (lambda: put(tokens=torch.zeros(3)), "tokens to be torch.int64", "float32"),
    (lambda: put(token_mask=None), "token_mask", "token_variance"),
    (lambda: put(token_mask=torch.zeros(3, 4)), "token_mask to be torch.bool", "float32"),
    (lambda: put(token_variance=torch.zeros(3, 5, 3)), "token_variance", r"\[3, 4, 3\]"),
    (lambda: Signals.cat([]), "Signals", "got none"),
    (lambda: Signals.cat([some(3), put(variance=None, token_variance=None)]), "variance", "None"),
    (lambda: Signals.cat([some(3), put(sites=("a", "b", "c"))]), "sites", "'a'"),
    (lambda: Signals.cat([some(3), put(features=torch.zeros(3, 4))]), "features", r"\(4,\), \(5,\)"),
    (lambda: text("cgp").signals("words"), "inputs", "got str"),
    (lambda: text("cgp").signals(3), "inputs", "got int"),
    (lambda: text("cgp").signals([3]), "batches", "got int"),
    (lambda: text("cgp").signals([]), "Signals", "got none"),
])  # fmt: skip


LENGTHS = (6, 3, 5)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
VARIANTS = {kind: layer(kind) for kind in KINDS}
for kind in ("cgp", "direct", "kernel", "scgp"):
    VARIANTS[f"{kind} unnormalised"] = layer(kind, normalize="none")
for kind in ("cgp", "direct", "kernel", "softmax", "softmax-gp"):
    VARIANTS[f"{kind} causal"] = layer(kind, causal=True)
for kernel in ("ard_rbf", "exp_dot"):
    VARIANTS[f"kernel {kernel}"] = layer("kernel", kernel=kernel)
    VARIANTS[f"sgpa {kernel}"] = layer("sgpa", kernel=kernel)
every_variant = pytest.mark.parametrize("name", VARIANTS)


def attended(model: TextTransformer, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of every layer by the parameters, [B, H, N, D] each."""
    found = []

    def see(module: Any, own: Any, x: Tensor, **options: Any) -> Any:
        def project(linear: Any) -> Tensor:
            return (x @ linear.weight.T + linear.bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)

        q = project(module.query)
        k = q if getattr(module, "key", None) is None else project(module.key)
        scale = module.lengthscale()[:, None] if hasattr(module, "lengthscale") else 1.0
        scale = module.head_dim**0.25 if module.kind.startswith("softmax") else scale
        found.append((q / scale, k / scale))
        return own(x, **options)

    with torch.no_grad(), handling({(a, "forward"): partial(see, a) for a in attentions(model)}):
        model(inputs)
    return found


@every_variant
def test_profiles_are_those_of_the_definition(name: str) -> None:
    model, inputs = text(VARIANTS[name]), sentences(*LENGTHS)
    found = model.signals(inputs)
    draws = model.draws
    need = ("logits", "variance") if draws else ("logits",)
    with torch.no_grad():
        output = model(inputs, need=need)
    assert_close(found.logits, output.logits)
    assert_close(found.features, model.features(inputs, draw="none", generator=None))
    assert found.tokens.tolist() == list(LENGTHS)
    names = tuple(f"blocks.{i}.attention head {head}" for i in range(2) for head in range(2))
    assert found.sites == (names if draws else ())
    if draws:
        assert found.variance is not None
        for index, made in enumerate(output.layers):
            for item, length in enumerate(LENGTHS):
                variance = made.variance[item, :, :length].flatten(1).numpy()  # [H, N (D)]
                profile = np.log(variance).mean(-1)
                np.testing.assert_allclose(
                    found.variance[item, 2 * index : 2 * index + 2], profile, rtol=1e-9
                )
    else:
        assert found.variance is None
    if name.startswith(("scgp", "kep")):
        assert (found.attention_entropy, found.entropy_sites) == (None, ())
        return
    assert found.entropy_sites == names
    assert found.attention_entropy is not None
    dot = name.startswith("softmax") or name.endswith("exp_dot")
    for index, (q, k) in enumerate(attended(model, inputs)):
        for item, length in enumerate(LENGTHS):
            for head in range(2):
                given = (x[item, head, :length].numpy() for x in (q, k))
                expected = entropy(*given, dot=dot, causal="causal" in name).mean()
                np.testing.assert_allclose(
                    found.attention_entropy[item, 2 * index + head], expected, rtol=1e-9, atol=1e-12
                )


@every_variant
def test_padding_changes_nothing_and_profiles_are_means_of_tokens(name: str) -> None:
    model = text(VARIANTS[name])
    short, long = (model.signals(sentences(*LENGTHS, to=to), per_token=True) for to in (6, 9))
    assert torch.equal(short.token_mask, torch.arange(6) < short.tokens[:, None])
    for field in ("logits", "features", "tokens"):
        assert_close(getattr(long, field), getattr(short, field), **CLOSE)
    for field in ("variance", "attention_entropy"):
        profile, tokens, padded = (getattr(*x) for x in (
            (short, field), (short, f"token_{field}"), (long, f"token_{field}")
        ))  # fmt: skip
        assert (profile is None) == (tokens is None) == (padded is None)
        if profile is not None:
            assert_close(tokens.sum(1) / short.tokens[:, None], profile, **CLOSE)
            assert_close(padded[:, :6], tokens, **CLOSE)
            assert not padded[:, 6:].any()


@every_variant
def test_chunks_are_cut_to_their_longest_text(name: str, monkeypatch) -> None:
    model, seen = text(VARIANTS[name]), set()
    mixed = sentences(6, 1, 3, 9, 1, 5, to=9)
    whole = model.signals(mixed)  # nothing is cut to 64
    monkeypatch.setattr(sys.modules["gpattention.models.predict"], "LENGTHS", 4)
    model.words.register_forward_hook(lambda *given: seen.add(given[2].shape[1]))
    same(model.signals(mixed, batch_size=2), whole, 1e-6)
    assert len(seen) > 1


def test_mixed_layers_and_images() -> None:
    model = vision("softmax", "cgp", "scgp", "sgpa")
    found = model.signals(images(5))
    assert found.sites == tuple(f"blocks.{i}.attention head {h}" for i in (1, 2, 3) for h in (0, 1))
    assert found.entropy_sites == tuple(f"blocks.{i}.attention head {h}" for i in (0, 1, 3) for h in (0, 1))
    assert found.tokens.tolist() == [4] * 5
    bare = model.signals(images(5), variance=False)
    assert (bare.variance, bare.sites) == (None, ())
    assert_close(bare.attention_entropy, found.attention_entropy)
    assert vision("scgp").signals(images(2), variance=False).tokens.tolist() == [4, 4]


def test_batches_and_loaders() -> None:
    model, inputs = text("cgp"), sentences(6, 3, 5, 2, 6, 1, 4)
    whole = model.signals(inputs, per_token=True)
    same(model.signals(inputs, per_token=True, batch_size=3), whole, 1e-9)
    labels = torch.arange(7)
    for loader in (
        [inputs[:4], inputs[4:]],
        ({"tokens": x, "labels": labels[: len(x)]} for x in (inputs[:4], inputs[4:])),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=2),
    ):
        same(model.signals(loader, per_token=True), whole, 1e-9)
    lengths = [sentences(6, 3), sentences(2, 2, to=3)]  # of different lengths
    assert len(model.signals(lengths, per_token=True)) == 4


def test_mode_and_weights_are_left_alone() -> None:
    model = text("cgp", dropout=0.5).train()
    first = model.signals(sentences(*LENGTHS))
    assert model.training
    same(model.signals(sentences(*LENGTHS)), first)
    assert first.logits.requires_grad is False
    assert all("_posterior" not in vars(module) for module in attentions(model))


def test_threads() -> None:
    """Watches of several threads, and passes that nobody watches, do not see each other's calls."""
    model = text("cgp", "softmax")
    inputs = [sentences(*(1 + (i + j) % 6 for j in range(3)), seed=i) for i in range(8)]
    alone = [model.signals(x) for x in inputs]
    with torch.no_grad():
        plain = [model(x).logits for x in inputs]

    def job(i: int) -> Any:
        if i % 2:
            return model.signals(inputs[i // 2])
        with torch.no_grad():
            return model(inputs[i // 2]).logits

    for i, found in enumerate(at_once([partial(job, i) for i in range(16)])):
        if i % 2:
            same(found, alone[i // 2])
        else:
            assert torch.equal(found, plain[i // 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_variant
def test_on_a_gpu(name: str) -> None:
    """Fused kernels where they exist; entropies and variances are those of the CPU."""
    model, inputs = text(VARIANTS[name], dtype=torch.float32), sentences(*LENGTHS)
    plain = model.signals(inputs, per_token=True)
    found = model.to("cuda").signals(inputs.to("cuda"), per_token=True)
    assert found.logits.is_cuda
    same(found.to("cpu"), plain, 2e-4)
