"""Ensembles mix their members with equal weights and tell how many samples that makes."""

import pytest
import torch

from gpattention.evaluation import (
    DeepEnsemble,
    LaplaceLastLayer,
    MCDropout,
    ModelPredictor,
    TemperatureScaling,
)
from gpattention.models import VisionConfig, VisionTransformer
from tests.models.stub_models import StubModel, normal

X = normal(6, 5, seed=1)
MEMBERS = [ModelPredictor(StubModel(seed=seed), variances=True) for seed in range(3)]


def test_members_that_do_not_draw_are_the_samples() -> None:
    found = DeepEnsemble(MEMBERS).predict(X, samples=0)
    each = [member.predict(X, samples=0) for member in MEMBERS]
    assert found.logits.shape == (3, 6, 3)
    torch.testing.assert_close(found.probs, torch.stack([p.probs for p in each]).mean(0))
    torch.testing.assert_close(found.expected_entropy, torch.stack([p.entropy for p in each]).mean(0))
    assert found.variances[0] is None
    torch.testing.assert_close(found.variances[1], torch.stack([p.variances[1] for p in each]).mean(0))
    assert found.mutual_information.min() > 0


def test_members_that_draw_multiply_the_samples() -> None:
    found = DeepEnsemble(MEMBERS).predict(X, samples=4, seed=2)
    assert found.samples == 12
    for number, member in enumerate(MEMBERS):
        alone = member.predict(X, samples=4, seed=2 * 3 + number)
        torch.testing.assert_close(found.logits[4 * number : 4 * number + 4], alone.logits)
    part = DeepEnsemble(MEMBERS).predict(X[2:], samples=4, seed=2, batch_size=3, first_item=2)
    torch.testing.assert_close(part.logits, found.logits[:, 2:], rtol=1e-5, atol=1e-5)


def test_members_have_different_noise() -> None:
    twins = DeepEnsemble([MEMBERS[0], MEMBERS[0]])
    a, b = twins.predict(X, samples=2).logits.chunk(2)
    assert float((a - b).abs().min()) > 0


def test_variances_need_every_member() -> None:
    mixed = DeepEnsemble([MEMBERS[0], ModelPredictor(StubModel(seed=1))])
    assert mixed.predict(X, samples=0).variances is None


def test_progress_counts_all_members() -> None:
    told: list[tuple[int, int]] = []
    DeepEnsemble(MEMBERS[:2]).predict(
        X, samples=2, batch_size=8, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(8, 24), (12, 24), (20, 24), (24, 24)]


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        DeepEnsemble([])
    with pytest.raises(ValueError, match="got StubModel: wrap a model"):
        DeepEnsemble([StubModel()])  # type: ignore[list-item]
    uneven = DeepEnsemble([MEMBERS[0], ModelPredictor(StubModel(draws=False))])
    assert len(uneven) == 2
    with pytest.raises(ValueError, match=r"all weigh the same, got \[\(4, 3\), \(1, 3\)\]"):
        uneven.predict(X, samples=4)


def test_drawn_is_told_by_every_predictor() -> None:
    """Members that differ disagree for real, also without a draw; one member, or copies of it, do not."""
    x, labels = normal(12, 5, seed=3), torch.arange(12) % 3
    first, second = ModelPredictor(StubModel()), ModelPredictor(StubModel(seed=1))
    for samples in (0, 3):
        assert DeepEnsemble([first, second]).predict(x, samples=samples).drawn
        assert DeepEnsemble([first]).predict(x, samples=samples).drawn == (samples > 0)
    assert not DeepEnsemble([first, first]).predict(x, samples=0).drawn
    torch.manual_seed(0)
    model = VisionTransformer(
        VisionConfig(image_size=8, channels=1, width=16, depth=1, heads=2, classes=3, attention="softmax")
    )
    images = normal(12, 1, 8, 8)
    for predictor in (MCDropout(model), LaplaceLastLayer(model).fit(images, labels)):
        assert predictor.predict(images, samples=3).drawn
        assert not predictor.predict(images, samples=0).drawn
        scaled = TemperatureScaling(predictor)
        scaled._temperature = 2.0
        assert scaled.predict(images, samples=3).drawn
        assert not scaled.predict(images, samples=0).drawn
    assert not model.predict(images, samples=3).drawn  # softmax attention has nothing to draw from
