"""Padding changes nothing: a whole text transformer on sentences alone, batched, and padded further.

Equality is to 1e-8 in float64: masks overwrite, so all that may differ is the order of a sum.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpattention.attention import attention_class
from gpattention.models import AttentionConfig, ModelOutput, TextTransformer
from tests.models.small_models import KINDS, layer, seeded, sentences, text

LENGTHS = (6, 3, 5)
CONTEXTUAL = 5
NEED = ("logits", "regularizer", "variance")


def variants() -> dict[str, AttentionConfig]:
    """Every kind with each of its regularisers, and the options that treat masks in their own way."""
    found = {}
    for kind in KINDS:
        for name in attention_class(kind).regularizers:
            if name != "monte_carlo":  # its random numbers are laid out along the padded length
                found[f"{kind} {name}"] = layer(kind, regularizer=name)
    for kind in ("cgp", "direct", "kernel", "softmax", "softmax-gp"):
        found[f"{kind} causal"] = layer(kind, causal=True)
    for kind in ("cgp", "direct", "kernel", "scgp"):
        found[f"{kind} unnormalised"] = layer(kind, normalize="none")
    for kernel in ("ard_rbf", "exp_dot"):
        found[f"kernel {kernel}"] = layer("kernel", kernel=kernel)
        found[f"sgpa {kernel}"] = layer("sgpa", kernel=kernel)
    pair, pooled = {"num_inducing": (4, 3)}, {"inducing": "pooled"}
    paper = {"values": "paper", "normalize": "none"}
    for options in (pooled, pooled | paper, pair, pair | pooled | {"regularizer": "marginal"}):
        found[f"scgp {' '.join(map(str, options.values()))}"] = layer("scgp", **options)
    return found


VARIANTS = variants()
every_variant = pytest.mark.parametrize("name", VARIANTS)


def model(name: str) -> TextTransformer:
    return text(VARIANTS[name], contextual_width=CONTEXTUAL)


def batch(to: int, *, padded_with: float = 0.0, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """The same sentences at every length `to`; contextual embeddings of padded words are `padded_with`."""
    contextual = torch.randn(len(lengths), 9, CONTEXTUAL, generator=seeded(4), dtype=torch.float64)[:, :to]
    tokens = sentences(*lengths, to=to)
    padding = tokens == 0
    contextual = torch.where(padding[..., None], padded_with, contextual)
    return {"tokens": tokens, "padding_mask": padding, "contextual": contextual}


def run(transformer: TextTransformer, inputs: dict[str, Tensor]) -> tuple[ModelOutput, dict[str, Tensor]]:
    """Output, and the gradients of a weighted sum of logits, regulariser and variances."""
    contextual = inputs["contextual"].clone().requires_grad_()
    output = transformer({**inputs, "contextual": contextual}, need=NEED)
    weights = torch.linspace(0.5, 1.5, output.logits.numel(), dtype=torch.float64).view_as(output.logits)
    loss = (weights * output.logits).sum() + 0.7 * output.regularizer
    loss = loss + sum(x.variance.sum() for x in output.layers if x.variance is not None)
    leaves = {**dict(transformer.named_parameters()), "contextual": contextual}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return output, {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def same(a: Any, b: Any) -> None:
    assert_close(a, b, rtol=1e-8, atol=1e-8)


def same_at_the_front(longer: Tensor, shorter: Tensor, axis: int) -> None:
    """Of tokens: the same where the shorter one ends, and 0 behind."""
    front, behind = longer.tensor_split([shorter.shape[axis]], axis)
    same(front, shorter)
    assert behind.count_nonzero() == 0


@every_variant
def test_nan_in_padded_words(name: str) -> None:
    transformer = model(name)
    expected, gradients = run(transformer, batch(6))
    assert gradients["contextual"][0].count_nonzero() > 0
    for to in (6, 9):
        output, found = run(transformer, batch(to, padded_with=math.nan))
        same(output.logits, expected.logits)
        same(output.regularizer, expected.regularizer)
        for ours, theirs in zip(output.layers, expected.layers, strict=True):
            assert (ours.variance is None) == (theirs.variance is None)
            if ours.variance is not None:
                same_at_the_front(ours.variance, theirs.variance, 2)
        assert found.keys() == gradients.keys()
        same_at_the_front(found.pop("contextual"), gradients["contextual"], 1)
        same(found, {parameter: gradients[parameter] for parameter in found})


@every_variant
def test_sentences_alone(name: str) -> None:
    transformer = model(name)
    inputs = batch(6)
    together = transformer(inputs, need=NEED)
    total = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(LENGTHS):
        alone = transformer({key: x[b : b + 1, :length] for key, x in inputs.items()}, need=NEED)
        same(together.logits[b], alone.logits[0])
        total = total + length * alone.regularizer
        for ours, theirs in zip(together.layers, alone.layers, strict=True):
            if theirs.variance is not None:
                same_at_the_front(ours.variance[b], theirs.variance[0], 1)
    if "ksvd" not in name:  # the square of a mean over the whole batch
        same(together.regularizer, total / sum(LENGTHS))  # a mean over real words


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_sentence(kind: str) -> None:
    transformer = text(layer(kind), contextual_width=CONTEXTUAL)
    inputs = batch(6, padded_with=math.nan, lengths=(6, 0))
    found, gradients = run(transformer, inputs)
    assert [n for n, g in gradients.items() if not g.isfinite().all()] == []
    same(found.logits[1], transformer.head.bias.detach())
    alone, _ = run(transformer, {key: x[:1] for key, x in inputs.items()})
    same(found.logits[0], alone.logits[0])
    if kind != "sgpa":  # each sequence, however short, bears the divergence of its inducing values
        same(found.regularizer, alone.regularizer)
