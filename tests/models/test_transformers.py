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
    layer,
    seeded,
    sentences,
    text,
    vision,
)

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

    @every_kind
    def test_parameter_counts(self, kind: str) -> None:
        E, H = 128, 4
        around = (3 * 16 * E + E) + 64 * E + E + 2 * E + (10 * E + 10)
        block = 2 * 2 * E + 2 * linear(E) + attention_parameters(kind, E, H)
        assert parameters(VisionTransformer(VisionConfig(attention=kind))) == around + 5 * block
        E = 256
        around = 10_000 * 128 + (128 * E + E) + 128 * E + 2 * E + (2 * E + 2)
        block = 2 * 2 * E + 2 * linear(E) + attention_parameters(kind, E, H)
        assert parameters(TextTransformer(TextConfig(attention=kind))) == around + 2 * block


def linear(width: int) -> int:
    return width * width + width


def attention_parameters(kind: str, E: int, H: int) -> int:
    """With 32 inducing inputs where the kind has them."""
    m, D = 32, E // H
    projections = {"cgp": 5, "scgp": 5, "sgpa": 3}.get(kind, 4) * linear(E)
    scales = 2 * H if kind in ("cgp", "direct", "scgp", "softmax-gp") else 0  # noise and prior scale
    inducing = {"scgp": H * m * D, "sgpa": H * m * E + H * m * D + H * D * m * m + H * D * m}.get(kind, 0)
    return projections + scales + inducing


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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

    def test_sequence_pooling(self) -> None:
        model, tokens = vision(), torch.randn(2, 4, 16, generator=seeded(7), dtype=torch.float64)
        for b in range(2):
            score = [(model.attend.weight[0] @ t).item() for t in tokens[b]]
            total = sum(math.exp(s) for s in score)
            expected = sum(math.exp(s) / total * t for s, t in zip(score, tokens[b], strict=True))
            assert_close(model.pool(tokens, None)[b], expected)

    def test_mean_over_real_words(self) -> None:
        model, tokens = text(), torch.randn(3, 6, 16, generator=seeded(7), dtype=torch.float64)
        padding = PADDED == 0
        padding[2] = True  # nothing real: the mean is zero
        found = model.pool(torch.where(padding[..., None], math.nan, tokens), padding)
        assert_close(
            found, torch.stack([tokens[0].mean(0), tokens[1, :3].mean(0), torch.zeros_like(found[2])])
        )
        assert_close(model.pool(tokens, None), tokens.mean(1))

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

    def test_distribution_of_the_samples(self) -> None:
        model, S = vision(attention=layer("cgp"), depth=1), 4000
        mean = model(images(1), need=("tokens", "variance")).layers[0]
        drawn = model(images(1), draw="independent", samples=S, generator=seeded(0), need=("tokens",))
        attended = drawn.layers[0].attended  # [S, N, E]
        weight = model.blocks[0].attention.output.weight.square().unflatten(1, (2, 8)).sum(-1)  # [E, H]
        variance = mean.variance[0].T @ weight.T  # [N, E]
        error = (attended.mean(0) - mean.attended[0]) / (variance / S).sqrt()
        assert error.abs().max().item() < 4.5  # of 64 standard normal numbers
        ratio = attended.var(0) / variance
        assert (ratio - 1).abs().max().item() < 4.5 * math.sqrt(2 / S)


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
