"""Health reports against loops over pairs and the NumPy oracles, rank correlation, and oversmoothing."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from gpattention.attention import Attention, AttentionHealth
from gpattention.models import TextTransformer, Transformer, cosine_similarity, token_similarity
from gpattention.models.health import HealthReport, measure_health, rank_correlation
from tests.models.small_models import KINDS, attentions, images, layer, seeded, sentences, text, vision
from tests.oracles import densities, exact

LENGTHS = (6, 3, 5)
WORDS = sentences(*LENGTHS)
HEADS, WIDTH = 2, 8
LIVELY = AttentionHealth("cgp", 0.2, 0.4, 0.8, 0.2, 0.01, 0.3, 0.2, 0.66, 0.1)
every_kind = pytest.mark.parametrize("kind", KINDS)


def attention_inputs(model: TextTransformer) -> list[Tensor]:
    """What the attention of each layer reads.  [B, N, E]"""
    layers = model(WORDS, need=("tokens",)).layers
    before = [model.embed(WORDS)[0], *(told.tokens for told in layers[:-1])]
    return [block.norm(x) for block, x in zip(model.blocks, before, strict=True)]


def heads(linear: torch.nn.Linear, x: Tensor, b: int, h: int) -> np.ndarray:
    """One sentence and head, padding deleted.  [n, D]"""
    rows = linear(x[b, : LENGTHS[b]])[:, h * WIDTH : (h + 1) * WIDTH]
    return rows.detach().numpy()


def mean_kappa(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Over pairs of different tokens of all sentences and heads."""
    found = [
        math.exp(-0.5 * float(np.square(x[i] - y[j]).sum()))
        for x, y in pairs
        for i in range(len(x))
        for j in range(len(y))
        if i != j
    ]
    return sum(found) / len(found)


def by_hand(attention: Any, x: Tensor) -> dict[str, float]:
    """Everything a report tells of a direct or cgp layer without row normalisation."""
    s_q, s_k, noise = (
        getattr(attention, name)().detach().numpy() for name in ("scale_q", "scale_k", "noise")
    )
    qk, qq, means, values, stddevs, shares = [], [], [], [], [], []
    for b in range(3):
        for h in range(HEADS):
            q, k, v = (heads(getattr(attention, name), x, b, h) for name in ("query", "key", "value"))
            tensors = (q, k, v) if attention.kind == "direct" else (q, k, heads(attention.latent, x, b, h), v)
            options = {"noise": noise[h], "scale_q": s_q[h], "scale_k": s_k[h]}
            mean, cov = getattr(exact, f"{attention.kind}_posterior")(*tensors, **options)
            density = getattr(densities, f"{attention.kind}_log_density")
            log_density, _ = density(*tensors, objective="marginal", **options)
            nats = -log_density / (len(q) * WIDTH)  # per token and dimension
            qk.append((q, k))
            qq.append((q, q))
            means.append(np.square(mean).sum())
            values.append(np.square(v).sum())
            stddevs += [(math.sqrt(variance), s_q[h]) for variance in np.diag(cov)]
            shares.append(math.exp(0.5 * math.log(2 * math.pi * noise[h]) - nats))
    return {
        "kappa_qk": mean_kappa(qk),
        "kappa_qq": mean_kappa(qq),
        "mean_ratio": math.sqrt(sum(means) / sum(values)),
        "amplitude": float(np.mean(s_q)),
        "noise": float(np.mean(noise)),
        "prior_stddev": float(np.mean([prior for _, prior in stddevs])),
        "posterior_stddev": float(np.mean([stddev for stddev, _ in stddevs])),
        "stddev_ratio": float(np.mean([stddev / prior for stddev, prior in stddevs])),
        "floor_share": float(np.mean(shares)),
    }


class TestHealth:
    @pytest.mark.parametrize("kind", ["direct", "cgp"])
    def test_by_hand(self, kind: str) -> None:
        model = text(layer(kind, normalize="none"))
        report = model.health(WORDS)
        assert [told.kind for told in report.layers] == [kind, kind]
        for attention, x, told in zip(attentions(model), attention_inputs(model), report.layers, strict=True):
            for name, expected in by_hand(attention, x).items():
                assert getattr(told, name) == pytest.approx(expected, rel=1e-6), name
        assert (report.error_correlation, report.variance_correlation) == (None, (None, None))

    @pytest.mark.parametrize("kind", ["direct", "cgp", "scgp"])
    def test_normalised_rows(self, kind: str) -> None:
        model = text(kind)
        told = model.health(WORDS).layers[0]
        attention, x = attentions(model)[0], attention_inputs(model)[0]
        posterior = attention(x, key_padding_mask=WORDS == 0, need=("output", "posterior")).posterior
        real = (WORDS != 0)[:, None].expand(3, HEADS, 6)
        assert told.prior_stddev == pytest.approx(posterior.prior_stddev[real].mean().item())
        assert told.posterior_stddev == pytest.approx(posterior.stddev[real].mean().item())
        ratio = posterior.stddev[real] / posterior.prior_stddev[real]
        assert told.stddev_ratio == pytest.approx(ratio.mean().item())
        assert told.amplitude == pytest.approx(attention.prior_scale().mean().item())
        assert 0 < told.floor_share < 1

    def test_sgpa_averages_variances_over_channels(self) -> None:
        model = text("sgpa")
        told = model.health(WORDS).layers[1]
        output = model(WORDS, need=("variance",)).layers[1]
        stddev = output.variance.mean(-1).sqrt()[(WORDS != 0)[:, None].expand(3, HEADS, 6)]
        assert told.posterior_stddev == pytest.approx(stddev.mean().item())
        assert (told.prior_stddev, told.noise, told.floor_share) == (1.0, None, None)

    @every_kind
    def test_every_kind_and_its_table(self, kind: str) -> None:
        model = text(kind)
        report = model.health(WORDS)
        lines = report.table().splitlines()
        assert len(lines) == 3
        assert lines[0].split()[:3] == ["layer", "kind", "kappa_qk"]
        for i, (line, told) in enumerate(zip(lines[1:], report.layers, strict=True)):
            cells = line.split()
            assert cells[:3] == [str(i), kind, f"{told.kappa_qk:.4g}"]
            assert len(cells) == 11
            assert (cells[-1] == "-") == (told.floor_share is None)
            assert 0 < told.kappa_qk < 1
            assert 0 < told.mean_ratio < 10

    def test_a_mixture_of_kinds(self) -> None:
        report = vision("softmax", "cgp", "sgpa").health(images())
        assert [told.kind for told in report.layers] == ["softmax", "cgp", "sgpa"]
        assert report.layers[0].stddev_ratio is None
        assert report.layers[1].stddev_ratio < 1

    def test_the_model_is_left_as_it_was(self) -> None:
        model = vision("cgp", dropout=0.5).train()
        model.blocks[0].eval()
        modes = [module.training for module in model.modules()]
        told = measure_health(model, images(), torch.tensor([0, 1, 2]))
        assert [module.training for module in model.modules()] == modes
        assert [len(module._forward_pre_hooks) for module in model.modules()].count(0) == len(modes)
        assert model.eval().health(images()).layers == told.layers  # measured without dropout
        with pytest.raises(ValueError, match="expected images of shape"):
            model.health(images()[0])
        assert [len(module._forward_pre_hooks) for module in model.modules()].count(0) == len(modes)


class TestProblems:
    @torch.no_grad()
    def collapse(self, attention: Attention) -> None:
        attention.query.weight.zero_()
        for part in (attention.value, attention.output):
            part.weight.mul_(1e-4)
            part.bias.mul_(1e-4)
        attention.scale_q.set(1e-3)

    def test_collapsed_layer(self) -> None:
        model = vision("cgp", layer("cgp", normalize="none"), layer("cgp", normalize="none"))
        assert not [text for text in model.health(images()).problems() if "merged" in text or "floor" in text]
        self.collapse(attentions(model)[1])
        report = model.health(images())
        found = [text for text in report.problems() if text.startswith("layer 1: ")]
        assert "layer 1: queries have merged: mean kappa(q, q) is 1.000" in found
        assert "layer 1: the density sits at its noise floor: share 1.00" in found
        assert report.layers[1].kappa_qq == pytest.approx(1)
        assert report.layers[1].floor_share > 0.99
        assert not [text for text in report.problems() if "merged" in text and "layer 1" not in text]

    @every_kind
    def test_attention_that_is_off(self, kind: str) -> None:
        model = vision(kind)
        with torch.no_grad():  # every token far from every other
            for name in {"query", "key"} & {name for name, _ in attentions(model)[0].named_children()}:
                getattr(attentions(model)[0], name).weight.mul_(100)
        found = model.health(images()).problems()
        assert [
            text for text in found if text.startswith("layer 0: attention is nearly off: mean kappa")
        ] != []
        if kind in ("direct", "cgp"):
            assert [text for text in found if text.startswith("layer 0: the variance is the prior's")] != []

    def test_a_lively_layer_has_none(self) -> None:
        assert HealthReport((LIVELY,), None, (None,)).problems() == []

    @pytest.mark.parametrize(
        ("name", "fine", "bad", "told"),
        [
            ("kappa_qk", (0.021, 0.02), 0.019, "attention is nearly off: mean kappa(q, k) is 0.019"),
            ("kappa_qq", (0.949, 0.95), 0.951, "queries have merged: mean kappa(q, q) is 0.951"),
            ("stddev_ratio", (0.979, 0.98), 0.981, "the variance is the prior's: posterior/prior is 0.981"),
            ("floor_share", (0.89, 0.9), 0.91, "the density sits at its noise floor: share 0.91"),
        ],
    )
    def test_thresholds(self, name: str, fine: tuple[float, ...], bad: float, told: str) -> None:
        for value in fine:
            assert replace(LIVELY, **{name: value}).problems() == []
        assert replace(LIVELY, **{name: bad}).problems() == [told]


class TestErrorCorrelation:
    LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])

    @pytest.mark.parametrize("kind", ["cgp", "sgpa", "softmax-gp"])
    def test_by_scipy(self, kind: str) -> None:
        model, words = text(kind), sentences(6, 3, 5, 2, 6, 4, 1, 3)
        report = model.health(words, self.LABELS)
        prediction = model.predict(words, samples=10, variances=True)
        wrong = (prediction.label != self.LABELS).numpy()
        assert 0 < wrong.sum() < 8
        assert report.error_correlation == pytest.approx(spearmanr(prediction.entropy, wrong).statistic)
        for found, variance in zip(report.variance_correlation, prediction.variances, strict=True):
            mean = [variance[b, :, : int((row != 0).sum())].mean().item() for b, row in enumerate(words)]
            assert found == pytest.approx(spearmanr(mean, wrong).statistic)
        assert report.table().endswith(f"entropy with error: {report.error_correlation:.3f}")

    @pytest.mark.parametrize(("stack", "layers"), [(("softmax",), 2), (("kernel", "cgp"), 2)])
    def test_layers_without_a_variance(self, stack: tuple[str, ...], layers: int) -> None:
        model = vision(*stack)
        report = measure_health(model, images(8), self.LABELS)
        wrong = (model.predict(images(8)).label != self.LABELS).numpy()
        entropy = model.predict(images(8)).entropy
        assert report.error_correlation == pytest.approx(spearmanr(entropy, wrong).statistic)
        assert [x is None for x in report.variance_correlation] == [not a.draws for a in attentions(model)]
        assert len(report.variance_correlation) == layers

    def test_rank_correlation(self) -> None:
        x = torch.randn(50, generator=seeded(1), dtype=torch.float64)
        y = 0.5 * x + torch.randn(50, generator=seeded(2), dtype=torch.float64)
        ties = (2 * y).round()
        for a, b in [(x, y), (x, ties), (ties, (2 * x).round()), (x, (y > 0).double()), (x, -x)]:
            assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
        assert rank_correlation(x, x.exp()) == pytest.approx(1)
        assert rank_correlation(x, torch.full_like(x, 0.1)) == 0.0
        assert rank_correlation(x.float(), (y > 0)) == pytest.approx(spearmanr(x.float(), y > 0).statistic)


def cosine_by_loops(tokens: Tensor, lengths: tuple[int, ...]) -> float:
    """Mean over sequences of the mean over pairs of different real tokens; short ones have no pair."""
    means = []
    for x, n in zip(tokens.detach(), lengths, strict=True):
        found = [
            (x[i] @ x[j] / (x[i].norm() * x[j].norm())).item() for i in range(n) for j in range(n) if i != j
        ]
        if found:
            means.append(sum(found) / len(found))
    return sum(means) / len(means)


class TestSmoothing:
    @pytest.mark.parametrize("lengths", [(6, 3, 5), (6, 1, 2), (6, 6, 6)])
    def test_cosine_by_loops(self, lengths: tuple[int, ...]) -> None:
        tokens = torch.randn(3, 6, 16, generator=seeded(3), dtype=torch.float64) + 0.5
        padding = torch.arange(6) >= torch.tensor(lengths)[:, None]
        expected = cosine_by_loops(tokens, lengths)
        filled = torch.where(padding[..., None], math.nan, tokens)
        assert cosine_similarity(filled, padding) == pytest.approx(expected, abs=1e-12)
        if lengths == (6, 6, 6):
            assert cosine_similarity(tokens) == pytest.approx(expected, abs=1e-12)

    def test_extremes(self) -> None:
        one = torch.randn(2, 1, 16, generator=seeded(3))
        assert cosine_similarity(one.expand(2, 5, 16)) == pytest.approx(1)
        assert cosine_similarity(one * torch.tensor([1.0, 3.0, 0.1])[None, :, None]) == pytest.approx(1)
        assert cosine_similarity(torch.eye(6)[None]) == pytest.approx(0, abs=1e-12)
        assert cosine_similarity(torch.cat([one, -one], 1)) == pytest.approx(-1)
        nothing = torch.cat([one, torch.zeros_like(one), one], 1)  # a zero token is like no other
        assert cosine_similarity(nothing) == pytest.approx(1 / 3)
        assert math.isnan(cosine_similarity(one))  # no pair

    @every_kind
    def test_layers_of_a_model(self, kind: str) -> None:
        model: Transformer = text(kind, dropout=0.5).train()
        found = token_similarity(model, WORDS)
        assert model.training
        model.eval()
        layers = model(WORDS, need=("tokens",)).layers
        assert found.embedded == pytest.approx(cosine_by_loops(model.embed(WORDS)[0], LENGTHS))
        for i, told in enumerate(layers):
            assert found.attended[i] == pytest.approx(cosine_by_loops(told.attended, LENGTHS))
            assert found.tokens[i] == pytest.approx(cosine_by_loops(told.tokens, LENGTHS))

    def test_a_vision_model_that_smooths(self) -> None:
        model = vision("softmax", stir=0.0)
        with torch.no_grad():  # uniform attention to values far larger than the tokens
            model.blocks[0].attention.query.weight.zero_()
            model.blocks[0].attention.value.weight.mul_(1e3)
        found = token_similarity(model, images())
        assert found.attended[0] > 0.999 > found.embedded
        assert found.embedded == pytest.approx(
            cosine_by_loops(normalize(model.embed(images())[0], dim=-1), (4,) * 3)
        )


@pytest.mark.parametrize("labels", [[1], [1, 0], [0.0, 1.0, 1.0], [True, False, True], [[0], [1], [1]]])
def test_labels_of_another_shape_or_type_are_refused(labels: list[Any]) -> None:
    given = torch.tensor(labels)  # one label would have been compared with every item
    message = r"labels to be whole numbers of shape \[3\], one per item, got shape .* and torch"
    with pytest.raises(ValueError, match=message):
        vision("cgp").health(images(), given)


def test_no_items_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs with at least one item, got 0"):
        vision("cgp").health(images()[:0])
