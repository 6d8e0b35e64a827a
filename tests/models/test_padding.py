"""Padding changes nothing: a whole text transformer on sentences alone, batched, and padded further.

Equality is to 1e-8 in float64: masks overwrite, so all that may differ is the order of a sum.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpattention.attention import attention_class
from gpattention.models import AttentionConfig, ModelOutput, TextTransformer
from tests.models.small_models import KINDS, layer, seeded, sentences, text

LENGTHS = (6, 3, 5)
CONTEXTUAL = 5
TOLERANCE = 1e-8


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


class Results(NamedTuple):
    """Of a forward and a backward pass; gradients of all parameters and of the contextual embeddings."""

    output: ModelOutput
    gradients: dict[str, Tensor]


def run(transformer: TextTransformer, inputs: dict[str, Tensor]) -> Results:
    """Gradients are those of a weighted sum of logits, regulariser and variances."""
    contextual = inputs["contextual"].clone().requires_grad_()
    need = ("logits", "regularizer", "variance")
    output = transformer({**inputs, "contextual": contextual}, need=need)
    weights = torch.linspace(0.5, 1.5, output.logits.numel(), dtype=torch.float64).view_as(output.logits)
    loss = (weights * output.logits).sum() + 0.7 * output.regularizer
    loss = loss + sum(x.variance.sum() for x in output.layers if x.variance is not None)
    leaves = {**dict(transformer.named_parameters()), "contextual": contextual}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return Results(output, {name: g for name, g in zip(leaves, found, strict=True) if g is not None})


def same(a: Any, b: Any) -> None:
    assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def check_same(found: Results, expected: Results, to: int) -> None:
    """`expected` is of sentences padded to 6 words, `found` of the same padded to `to`."""
    same(found.output.logits, expected.output.logits)
    same(found.output.regularizer, expected.output.regularizer)
    for ours, theirs in zip(found.output.layers, expected.output.layers, strict=True):
        assert (ours.variance is None) == (theirs.variance is None)
        if ours.variance is not None:
            same(ours.variance[:, :, :6], theirs.variance)
            assert ours.variance[:, :, 6:].count_nonzero() == 0
    assert found.gradients.keys() == expected.gradients.keys()
    for name, theirs in expected.gradients.items():
        ours = found.gradients[name]
        if name == "contextual":
            assert ours.shape[1] == to
            assert ours[:, 6:].count_nonzero() == 0
            ours = ours[:, :6]
        same(ours, theirs)


@every_variant
def test_nan_in_padded_words(name: str) -> None:
    transformer = model(name)
    expected = run(transformer, batch(6))
    assert expected.gradients["contextual"][0].count_nonzero() > 0
    for to in (6, 9):
        found = run(transformer, batch(to, padded_with=math.nan))
        assert [n for n, g in found.gradients.items() if not g.isfinite().all()] == []
        check_same(found, expected, to)


@every_variant
def test_sentences_alone(name: str) -> None:
    transformer = model(name)
    inputs = batch(6)
    together = transformer(inputs, need=("logits", "regularizer", "variance"))
    total = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(LENGTHS):
        one = {key: x[b : b + 1, :length] for key, x in inputs.items()}
        alone = transformer(one, need=("logits", "regularizer", "variance"))
        same(together.logits[b], alone.logits[0])
        total = total + length * alone.regularizer
        for ours, theirs in zip(together.layers, alone.layers, strict=True):
            if theirs.variance is not None:
                same(ours.variance[b, :, :length], theirs.variance[0])
                assert ours.variance[b, :, length:].count_nonzero() == 0
    same(together.regularizer, total / sum(LENGTHS))  # a mean over real words


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_sentence(kind: str) -> None:
    transformer = text(layer(kind), contextual_width=CONTEXTUAL)
    inputs = batch(6, padded_with=math.nan, lengths=(6, 0))
    found = run(transformer, inputs)
    assert [n for n, g in found.gradients.items() if not g.isfinite().all()] == []
    same(found.output.logits[1], transformer.head.bias.detach())
    alone = run(transformer, {key: x[:1] for key, x in inputs.items()})
    same(found.output.logits[0], alone.output.logits[0])
    if kind != "sgpa":  # each sequence, however short, bears the divergence of its inducing values
        same(found.output.regularizer, alone.output.regularizer)
