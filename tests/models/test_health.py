"""What a layer and a model say of their health, and how alike tokens become, against formulas."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.attention.parameters import Positive
from gpattention.models import TextTransformer, Transformer, cosine_similarity, token_similarity
from gpattention.models.health import AttentionHealth, diagnose, measure_health, rank_correlation
from tests.attention.variants import Variant, build, every_variant
from tests.attention.variants import tokens as small_tokens
from tests.models.small_models import KINDS, attentions, images, layer, seeded, sentences, text, vision
from tests.oracles import densities, exact
from tests.refusals import refusals
from tests.threads import state_of

LENGTHS = (6, 3, 5)
WORDS = sentences(*LENGTHS)
HEADS, WIDTH = 2, 8
LIVELY = AttentionHealth("cgp", 0.2, 0.4, 0.8, 0.2, 0.01, 0.3, 0.2, 0.66, 0.1)
every_kind = pytest.mark.parametrize("kind", KINDS)


def attention_inputs(model: TextTransformer) -> list[Tensor]:
    """What the attention of each layer reads.  [B, N, E]"""
    layers = model(WORDS, need=("tokens",)).layers
    before = [model.embed(WORDS)[0], *(found.tokens for found in layers[:-1])]
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
    """Everything a report says of a direct or cgp layer without row normalisation."""
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
        assert [found.kind for found in report.layers] == [kind, kind]
        for attention, x, found in zip(
            attentions(model), attention_inputs(model), report.layers, strict=True
        ):
            for name, expected in by_hand(attention, x).items():
                assert getattr(found, name) == pytest.approx(expected, rel=1e-6), name
        assert (report.error_correlation, report.variance_correlation) == (None, (None, None))

    @pytest.mark.parametrize("kind", ["cgp", "scgp"])
    def test_normalised_rows(self, kind: str) -> None:
        model = text(kind)
        found = model.health(WORDS).layers[0]
        attention, x = attentions(model)[0], attention_inputs(model)[0]
        posterior = attention(x, key_padding_mask=WORDS == 0, need=("output", "posterior")).posterior
        real = (WORDS != 0)[:, None].expand(3, HEADS, 6)
        prior, stddev = posterior.prior_stddev[real], posterior.stddev[real]
        wanted = [prior.mean(), stddev.mean(), (stddev / prior).mean(), attention.prior_scale().mean()]
        given = [found.prior_stddev, found.posterior_stddev, found.stddev_ratio, found.amplitude]
        assert given == pytest.approx([x.item() for x in wanted])
        assert 0 < found.floor_share < 1

    @every_kind
    def test_every_kind_and_its_table(self, kind: str) -> None:
        report = text(kind).health(WORDS)
        head, *lines = report.table().splitlines()
        assert head.split()[:3] == ["layer", "kind", "kappa_qk"]
        for i, (line, found) in enumerate(zip(lines, report.layers, strict=True)):
            cells = line.split()
            assert (cells[:3], len(cells)) == ([str(i), kind, f"{found.kappa_qk:.4g}"], 11)
            assert (cells[-1] == "-") == (found.floor_share is None)
            assert 0 < found.kappa_qk < 1
            assert 0 < found.mean_ratio < 10

    def test_the_model_is_left_as_it_was(self) -> None:
        model = vision("cgp", dropout=0.5).train()
        model.blocks[0].eval()
        before = state_of(model)
        found = measure_health(model, images(), torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match="expected images of shape"):
            model.health(images()[0])
        assert state_of(model) == before
        assert model.eval().health(images()).layers == found.layers  # measured without dropout


@torch.no_grad()
def test_a_collapsed_layer() -> None:
    model = vision("cgp", layer("cgp", normalize="none"), layer("cgp", normalize="none"))
    lively = model.health(images()).problems()
    attention = attentions(model)[1]
    attention.query.weight.zero_()
    for part in (attention.value, attention.output):
        part.weight.mul_(1e-4)
        part.bias.mul_(1e-4)
    attention.scale_q.set(1e-3)
    found = [problem for problem in model.health(images()).problems() if problem not in lively]
    assert "layer 1: queries have merged: mean kappa(q, q) is 1.000" in found
    assert "layer 1: the density sits at its noise floor: share 1.00" in found
    assert not [text for text in found if "merged" in text and not text.startswith("layer 1")]


@pytest.mark.parametrize(("name", "fine", "bad", "problem"), [
    ("kappa_qk", 0.02, 0.019, "attention is nearly off: mean kappa(q, k) is 0.019"),
    ("kappa_qq", 0.95, 0.951, "queries have merged: mean kappa(q, q) is 0.951"),
    ("stddev_ratio", 0.98, 0.981, "the variance is the prior's: posterior/prior is 0.981"),
    ("floor_share", 0.9, 0.91, "the density sits at its noise floor: share 0.91"),
])  # fmt: skip
def test_thresholds_of_problems(name: str, fine: float, bad: float, problem: str) -> None:
    assert replace(LIVELY, **{name: fine}).problems() == []
    assert replace(LIVELY, **{name: bad}).problems() == [problem]


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

    @pytest.mark.parametrize("stack", [("softmax",), ("kernel", "cgp")], ids="-".join)
    def test_layers_without_a_variance(self, stack: tuple[str, ...]) -> None:
        model = vision(*stack)
        report, prediction = measure_health(model, images(8), self.LABELS), model.predict(images(8))
        wrong = (prediction.label != self.LABELS).numpy()
        assert report.error_correlation == pytest.approx(spearmanr(prediction.entropy, wrong).statistic)
        silent = [not attention.draws for attention in attentions(model)]
        assert [x is None for x in report.variance_correlation] == silent
        assert [x.stddev_ratio is None for x in report.layers] == silent
        assert rank_correlation(prediction.entropy, torch.full_like(prediction.entropy, 0.1)) == 0.0


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

    @every_kind
    def test_layers_of_a_model(self, kind: str) -> None:
        model: Transformer = text(kind, dropout=0.5).train()
        found = token_similarity(model, WORDS)
        assert model.training
        model.eval()
        layers = model(WORDS, need=("tokens",)).layers
        assert found.embedded == pytest.approx(cosine_by_loops(model.embed(WORDS)[0], LENGTHS))
        for i, layer_output in enumerate(layers):
            assert found.attended[i] == pytest.approx(cosine_by_loops(layer_output.attended, LENGTHS))
            assert found.tokens[i] == pytest.approx(cosine_by_loops(layer_output.tokens, LENGTHS))


test_refusals = refusals([
    *(  # one label would have been compared with every item
        (lambda labels=labels: vision("cgp").health(images(), torch.tensor(labels)), "labels", "got shape")
        for labels in ([1], [1, 0], [0.0, 1.0, 1.0], [True, False, True], [[0], [1], [1]])
    ),
    (lambda: vision("cgp").health(images()[:0]), "at least one item", "got 0"),
])  # fmt: skip


APART = ~torch.eye(9, dtype=torch.bool)


def tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.nn.functional.layer_norm(torch.randn(2, 9, 32, dtype=torch.float64), (32,))


@pytest.mark.parametrize(("kind", "options"), [("kernel", {"normalize": "none"}), ("sgpa", {})])
@pytest.mark.parametrize("lengthscale", [0.7, 20.0])
def test_kappa_and_amplitude_are_those_of_the_layers_own_kernel(
    kind: str, options: dict[str, Any], lengthscale: float
) -> None:
    x, H = tokens(), 2
    layer = build_attention(kind, embed_dim=32, num_heads=H, kernel="ard_rbf", **options).double().eval()
    layer.lengthscale.set(lengthscale)
    layer.variance.set(9.0)
    health = diagnose(layer, x)
    q = layer.query(x).unflatten(-1, (H, -1)).transpose(1, 2).detach()  # [B, H, N, D]
    kappa = gp.ard_rbf(q, q, lengthscale)[..., APART].mean()
    assert health.kappa_qq == pytest.approx(float(kappa), rel=1e-12)
    assert health.amplitude == pytest.approx(3.0, rel=1e-6)
    if kind == "sgpa":
        assert health.prior_stddev == pytest.approx(3.0, rel=1e-6)
    assert any("queries have merged" in problem for problem in health.problems()) == (lengthscale > 10)


@every_variant
def test_an_amplitude_is_reported_only_where_it_matters(variant: Variant) -> None:
    """A scale that moves the output or the prior; that of rows divided by their sums moves neither."""
    layer, x = build(variant), small_tokens()
    found = diagnose(layer, x)
    parameters = {name: part for name, part in layer.named_children() if isinstance(part, Positive)}
    scales = {name: parameters[name] for name in ("prior_scale", "scale_q", "variance") if name in parameters}
    before = layer(x).output
    for scale in scales.values():
        scale.set(4 * scale().detach())
    after = diagnose(layer, x)
    moved = not torch.allclose(layer(x).output, before, rtol=1e-9) or after.prior_stddev != found.prior_stddev
    assert (found.amplitude is not None) == moved
    assert after.amplitude != found.amplitude or not moved
