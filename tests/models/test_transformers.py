"""The transformers: the paper's sizes, what they compute, what they give."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.testing import assert_close

from gpattention.models import TextConfig, TextTransformer, VisionConfig, VisionTransformer
from tests.models.small_models import (
    DRAWING,
    KINDS,
    MIXES,
    STACKS,
    attentions,
    images,
    seeded,
    sentences,
    text,
    vision,
)
from tests.refusals import refusals

every_kind = pytest.mark.parametrize("kind", KINDS)
every_drawing_kind = pytest.mark.parametrize("kind", DRAWING)
every_stack = pytest.mark.parametrize("stack", STACKS, ids="+".join)
PADDED = sentences(6, 3, 5)


class TestPaperSizes:
    def test_defaults(self) -> None:
        config, words = VisionConfig(), TextConfig()
        assert (config.patch, config.depth, config.width, config.heads) == (4, 5, 128, 4)
        assert (config.tokens, config.classes, config.dropout, config.channels) == (64, 10, 0.1, 3)
        assert (words.depth, words.width, words.classes, words.embedding_width) == (2, 256, 2, 128)
        assert words.vocabulary == 10_000
        for model, inputs in (
            (VisionTransformer(), images(2, 32, dtype=torch.float32)),
            (TextTransformer(), PADDED),
        ):
            assert model.config == type(model.config)()
            width, depth = model.config.width, model.config.depth
            assert [attention.head_dim for attention in attentions(model)] == [width // 4] * depth
            assert [block.feed_forward.into.weight.shape for block in model.blocks] == [
                (width, width)
            ] * depth
            rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
            assert rates == [0.1] * (1 + 2 * depth)
            assert model(inputs).logits.shape == (len(inputs), model.config.classes)


class TestComputation:
    def test_patches_of_rectangular_images(self) -> None:
        model = vision("cgp", image_size=(8, 12))
        x = torch.randn(2, 3, 8, 12, generator=seeded(5), dtype=torch.float64)
        found, padding = model.embed(x)
        assert (model.config.tokens, tuple(found.shape), padding) == (6, (2, 6, 16), None)
        for row in range(2):
            for column in range(3):
                patch = x[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].flatten(1)
                expected = patch @ model.patches.weight.flatten(1).T + model.patches.bias
                token = 3 * row + column
                assert_close(found[:, token], expected + model.positions[0, token])
        assert model(x).logits.shape == (2, 3)

    def test_words_and_contextual_embeddings(self) -> None:
        model = text("cgp", contextual_width=4)
        contextual = torch.randn(3, 6, 4, generator=seeded(6), dtype=torch.float64)
        found, padding = model.embed({"tokens": PADDED, "contextual": contextual})
        assert torch.equal(padding, PADDED == 0)
        word = torch.cat([model.words.weight[PADDED[1, 2]], contextual[1, 2]])
        assert_close(found[1, 2], model.project.weight @ word + model.project.bias + model.positions[0, 2])

    @every_stack
    @pytest.mark.parametrize("make", [vision, text])
    def test_pre_norm_blocks_by_hand(self, stack: tuple[str, ...], make: Any) -> None:
        model = make(*stack)
        inputs = images() if make is vision else PADDED
        x, padding = model.embed(inputs)
        before = None
        for block in model.blocks:
            inducing = None
            if block.attention.kind == "sgpa" and before is not None:
                raw = block.attention.inducing
                inducing = block.norm(raw + before(raw))
            x = x + block.attention(block.norm(x), key_padding_mask=padding, inducing=inducing).output
            before = block.feed_forward
            x = x + before.back(gelu(before.into(before.norm(x))))
        expected = model.head(model.pool(model.norm(x), padding))
        output = model(inputs)
        assert output.logits.shape == (3, 3)
        assert_close(output.logits, expected)
        assert_close(model.head(model.features(inputs)), expected)
        assert (output.regularizer, len(output.layers)) == (None, len(model.blocks))

    def test_pooling(self) -> None:
        images_of, words_of = vision(), text()
        tokens = torch.randn(3, 6, 16, generator=seeded(7), dtype=torch.float64)
        scores = torch.exp(tokens @ images_of.attend.weight[0])[..., None]  # [B, N, 1]
        assert_close(images_of.pool(tokens, None), (scores * tokens).sum(1) / scores.sum(1))
        padding = PADDED == 0
        padding[2] = True  # nothing real: the mean is zero
        found = words_of.pool(torch.where(padding[..., None], math.nan, tokens), padding)
        rows = [tokens[0].mean(0), tokens[1, :3].mean(0), torch.zeros_like(found[2])]
        assert_close(found, torch.stack(rows))
        assert_close(words_of.pool(tokens, None), tokens.mean(1))

    @every_kind
    def test_dropout_only_in_training(self, kind: str) -> None:
        model = vision(kind, dropout=0.5)
        assert torch.equal(model(images()).logits, model(images()).logits)
        model.train()
        torch.manual_seed(0)
        assert not torch.allclose(model(images()).logits, model(images()).logits)
        without = vision(kind, dropout=0.0)
        assert_close(without.train()(images()).logits, vision(kind, dropout=0.5)(images()).logits)

    @every_stack
    def test_every_parameter_is_trained(self, stack: tuple[str, ...]) -> None:
        model = text(*stack).train()
        need = ("logits", "regularizer")
        output = model(PADDED, draw="independent" if model.draws else "none", generator=seeded(3), need=need)
        (output.logits.square().sum() + output.regularizer).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        dead = [name for name, g in gradients.items() if g is None or not g.isfinite().all() or not g.any()]
        assert [name for name in dead if not name.endswith("key.bias")] == []


class TestDraws:
    @every_drawing_kind
    @pytest.mark.parametrize("draw", ["independent", "joint"])
    def test_draws_follow_the_generator(self, kind: str, draw: Any) -> None:
        model = vision(kind)
        one, again, other = (model(images(), draw=draw, generator=seeded(i)).logits for i in (1, 1, 2))
        assert torch.equal(one, again)
        for different in (other, model(images()).logits):
            assert (one - different).abs().min().item() > 1e-6
        features = model.features(images(), draw=draw, generator=seeded(1))
        assert_close(model.head(features), one)

    @pytest.mark.parametrize("draw", ["independent", "joint"])
    @pytest.mark.parametrize("stack", [*((kind,) for kind in DRAWING), *MIXES], ids="+".join)
    def test_samples_are_a_repeated_batch(self, stack: tuple[str, ...], draw: Any) -> None:
        model = text(*stack)
        need = ("logits", "regularizer", "variance", "tokens")
        found = model(PADDED, draw=draw, samples=4, generator=seeded(1), need=need)
        assert found.logits.shape == (4, 3, 3)
        repeated = model(PADDED.repeat(4, 1), draw=draw, generator=seeded(1), need=need)
        assert_close(found.logits.flatten(0, 1), repeated.logits)
        assert_close(found.regularizer, repeated.regularizer)  # a mean over samples
        for ours, theirs in zip(found.layers, repeated.layers, strict=True):
            for name in ("variance", "attended", "tokens"):
                a, b = getattr(ours, name), getattr(theirs, name)
                if b is None:
                    assert a is None
                else:  # what all samples share is given once
                    a = a if len(a) == 12 else a.repeat(4, *[1] * (a.ndim - 1))
                    assert_close(a, b)


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
                if not attention.weighs:
                    expected = expected - {"weights"}
                assert {name for name in fields if getattr(layer, name) is not None} == expected & set(fields)
                channels = {"sgpa": (8,), "kep-svgp": (10,)}.get(attention.kind, ())
                shapes = {"variance": (3, 2, 6, *channels), "weights": (3, 2, 6, 6), "tokens": (3, 6, 16)}
                for name in expected & set(shapes):
                    assert getattr(layer, name).shape == shapes[name]

    @every_stack
    def test_regularizer_sums_layers_divided_by_heads_words_and_width(self, stack: tuple[str, ...]) -> None:
        model, parts = text(*stack), []

        def by_hand(attention: Any, args: Any, kwargs: Any) -> None:
            given = (kwargs["key_padding_mask"], None, kwargs.get("inducing"))
            heads, _ = attention._heads(args[0], None, None, *given)
            if attention.regularizer != "none":
                total = attention._regularizer(heads, attention._posterior(heads), None)
                parts.append(total.expand(3, 2).sum() / (2 * 14 * 8))  # [B, H]

        for attention in attentions(model):
            attention.register_forward_pre_hook(by_hand, with_kwargs=True)
        found = model(PADDED, need=("logits", "regularizer")).regularizer
        assert len(parts) == sum(attention.regularizer != "none" for attention in attentions(model))
        assert_close(found, sum(parts, torch.zeros((), dtype=torch.float64)))


@pytest.mark.parametrize("regularizer", [False, True])
@every_stack
def test_shapes_without_values(stack: tuple[str, ...], regularizer: bool) -> None:
    """On the meta device, where nothing can be read: as many parameters and the same shapes."""
    draw: Any = "independent" if any(kind in DRAWING for kind in stack) else "none"
    need = ("logits", "regularizer", "weights", "tokens") if regularizer else ("logits",)
    for made, inputs in ((vision, images(dtype=torch.float32)), (text, PADDED)):
        real = made(*stack, dtype=torch.float32)
        with torch.device("meta"):
            hollow = type(real)(real.config)
        assert all(x.is_meta for x in hollow.state_dict().values())
        for training, samples in ((True, 1), (False, 1), (False, 3 if draw != "none" else 1)):
            given = {"draw": draw, "samples": samples, "need": need}
            expected = real.train(training)(inputs, **given)
            found = hollow.train(training)(inputs.to("meta"), **given)
            assert found.logits.is_meta
            assert (found.logits.shape, found.logits.dtype) == (expected.logits.shape, expected.logits.dtype)
            (found.logits.sum() + (found.regularizer if regularizer else 0.0)).backward()


X = images()


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
test_refusals = refusals([
    (lambda: vision()(X[:, :2]), "images", r"\[B, 3, 8, 8\], got \(3, 2, 8, 8\)"),
    (lambda: vision()({"images": X}), "images", "got dict"),
    (lambda: vision()(X.byte()), "images", "got torch.uint8"),
    (lambda: vision()(X, need=("logits", "entropy")), "need", "got 'entropy'"),
    (lambda: vision()(X, need="logits"), "need", "got the text 'logits'"),
    (lambda: vision()(X, draw="both"), "draw", "got 'both'"),
    (lambda: vision()(X, samples=0, draw="joint"), "samples", "got 0"),
    (lambda: vision("softmax")(X, samples=3), "samples=3", "draw"),
    (lambda: vision("softmax")(X, draw="joint"), "draw='joint'", "softmax"),
    (lambda: text()(sentences(4, to=10)), "max_length=9", "got 10"),
    (lambda: text()(PADDED[0]), r"tokens \[B, N\]", r"got \(6,\) torch.int64"),
    (lambda: text()(PADDED + 1000), "tokens from 0 to 19", "got 10"),
    (lambda: text()({"words": PADDED}), "'tokens'", r"got \['words'\]"),
    (lambda: text()({"tokens": PADDED, "contextual": CONTEXTUAL}), "contextual", r"got \(3, 6, 4\)"),
    (lambda: text(contextual_width=4)(PADDED), "contextual", r"\(3, 6, 4\), got None"),
    (lambda: text()({"tokens": PADDED, "padding_mask": PADDED}), "padding_mask", "torch.int64"),
    (lambda: text()({"tokens": PADDED, "padding_mask": PADDED[:, 1:] == 0}), "padding_mask", r"\(3, 5\)"),
])  # fmt: skip
