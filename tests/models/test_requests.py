"""What a transformer gives when asked, and what it refuses."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.small_models import STACKS, attentions, images, sentences, text, vision

every_stack = pytest.mark.parametrize("stack", STACKS, ids="+".join)
PADDED = sentences(6, 3, 5)


class TestNeed:
    @every_stack
    def test_only_what_was_asked(self, stack: tuple[str, ...]) -> None:
        model = text(*stack)
        fields = ("variance", "weights", "posterior", "attended", "tokens")
        for asked in ("logits", "regularizer", "variance", "weights", "posterior", "tokens"):
            output = model(PADDED, need=("logits", asked))
            assert (output.regularizer is None) == (asked != "regularizer")
            for attention, layer in zip(attentions(model), output.layers, strict=True):
                expected = {"tokens": {"tokens", "attended"}}.get(asked, {asked})
                if not attention.draws:
                    expected = expected - {"variance", "posterior"}
                assert {name for name in fields if getattr(layer, name) is not None} == expected & set(fields)
                channels = (8,) if attention.kind == "sgpa" else ()
                shapes = {"variance": (3, 2, 6, *channels), "weights": (3, 2, 6, 6), "tokens": (3, 6, 16)}
                for name in expected & set(shapes):
                    assert getattr(layer, name).shape == shapes[name]

    @every_stack
    def test_regularizer_sums_normalised_layers(self, stack: tuple[str, ...]) -> None:
        model = text(*stack)
        parts: list[Tensor] = []

        def by_hand(attention: Any, args: Any, kwargs: Any) -> None:
            heads, _ = attention._heads(
                args[0], None, None, kwargs["key_padding_mask"], None, kwargs.get("inducing")
            )
            if attention.regularizer != "none":
                posterior = attention._posterior(heads)
                total = attention._regularizer(heads, posterior, None).expand(3, 2)  # [B, H]
                parts.append(total.sum() / (2 * 14 * 8))  # heads, real words, width

        for attention in attentions(model):
            attention.register_forward_pre_hook(by_hand, with_kwargs=True)
        found = model(PADDED, need=("logits", "regularizer")).regularizer
        assert len(parts) == sum(attention.regularizer != "none" for attention in attentions(model))
        assert_close(found, sum(parts, torch.zeros((), dtype=torch.float64)))


X = images()
ERRORS = [
    ("cgp", X[:, :2], {}, "expected images of shape ['B', 3, 8, 8], got (3, 2, 8, 8)"),
    ("cgp", {"images": X}, {}, "expected a tensor of images, got dict"),
    ("cgp", X, {"need": ("logits", "entropy")}, "posterior, tokens, got 'entropy'"),
    ("cgp", X, {"need": "logits"}, "expected need to be a tuple of names, got the text 'logits'"),
    ("cgp", X.byte(), {}, "expected floating-point images, got torch.uint8"),
    ("cgp", X, {"draw": "both"}, "expected draw to be one of none, independent, joint, got 'both'"),
    ("softmax", X, {"samples": 3}, "samples=3 without a draw"),
    ("cgp", X, {"samples": 0, "draw": "joint"}, "samples to be a whole number >= 1, got 0"),
    ("softmax", X, {"draw": "joint"}, "asked of a model without posteriors (its layers: softmax)"),
]


@pytest.mark.parametrize(("kind", "inputs", "options", "message"), ERRORS)
def test_errors_of_vision(kind: str, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        vision(kind)(inputs, **options)


@pytest.mark.parametrize("weights", [torch.float16, torch.float32, torch.float64])
def test_images_come_in_the_type_of_the_weights(weights: torch.dtype) -> None:
    """A run with --precision 64-true leaves a model of float64, and its data are float32."""
    model = vision("cgp").to(weights).eval()
    expected = model(X.to(weights)).logits
    for given in (torch.float32, torch.float64):
        found = model(X.float().to(given)).logits
        assert found.dtype == weights
        assert_close(found, expected, atol=1e-2 if weights == torch.float16 else 1e-5, rtol=0)


CONTEXTUAL = torch.zeros(3, 6, 4, dtype=torch.float64)


@pytest.mark.parametrize(("width", "inputs", "message"), [
    (0, sentences(4, to=10), "expected at most max_length=9 words, got 10"),
    (0, PADDED[0], "expected tokens [B, N] of whole numbers, got (6,) torch.int64"),
    (0, PADDED + 1000, "expected tokens from 0 to 19, the model's vocabulary, got 10"),
    (0, {"words": PADDED}, "inputs with 'tokens', 'padding_mask' and 'contextual', got ['words']"),
    (0, {"tokens": PADDED, "contextual": CONTEXTUAL}, "of shape (3, 6, 0), got (3, 6, 4)"),
    (4, {"tokens": PADDED}, "expected contextual embeddings of shape (3, 6, 4), got None"),
    (0, {"tokens": PADDED, "padding_mask": PADDED}, "to be bool (True = ignore) of shape [3, 6]"),
    (0, {"tokens": PADDED, "padding_mask": PADDED[:, 1:] == 0}, "of shape [3, 6], got shape (3, 5)"),
])  # fmt: skip
def test_errors_of_text(width: int, inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        text("cgp", contextual_width=width)(inputs)
