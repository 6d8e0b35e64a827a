"""Every predictor on the library's own transformers: same shapes, same numbers for every batch size."""

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import (
    DeepEnsemble,
    GPLastLayer,
    LaplaceLastLayer,
    MCDropout,
    ModelPredictor,
    TemperatureScaling,
)
from gpattention.models import TextConfig, TextTransformer, VisionConfig, VisionTransformer
from gpattention.models.prediction import Prediction, predict
from tests.models.stub_models import normal, seeded

IMAGES = normal(20, 1, 8, 8, seed=1)


def vision(attention, seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    sizes = {"depth": 2, "width": 8, "heads": 4, "image_size": 8, "channels": 1, "patch": 4}
    return VisionTransformer(VisionConfig(classes=3, dropout=0.2, attention=attention, **sizes)).train()


def predictors(model: VisionTransformer) -> dict:
    """All of them, fitted to labels of which the untrained model gets three in four right."""
    labels = (predict(model, IMAGES, samples=0).label + (torch.arange(20) % 4 == 0)) % 3
    return {
        "model": ModelPredictor(model),
        "temperature": TemperatureScaling(model).fit(IMAGES, labels, samples=3),
        "dropout": MCDropout(model),
        "dropout and draws": MCDropout(model, draw="independent"),
        "ensemble": DeepEnsemble([model, model]),
        "laplace": LaplaceLastLayer(model).fit(IMAGES, labels),
        "kron": LaplaceLastLayer(model, hessian="kron").fit(IMAGES, labels),
        "gp": GPLastLayer(model, features=16).fit(IMAGES, labels),
    }


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "attention", ["softmax", "softmax-gp", "direct", "cgp", "scgp", "sgpa", ("cgp", "softmax")]
)
def test_batch_size_changes_nothing(attention) -> None:
    """4 rows at once are as many as heads, through which SGPA passes its inducing inputs."""
    model = vision(attention)
    for name, predictor in predictors(model).items():
        whole = predictor.predict(IMAGES, samples=3, seed=5)
        assert isinstance(whole, Prediction), name
        assert whole.probs.shape == (20, 3)
        for batch_size in (4, 17):
            same(predictor.predict(IMAGES, samples=3, seed=5, batch_size=batch_size).logits, whole.logits)
        part = predictor.predict(IMAGES[6:], samples=3, seed=5, first_item=6)
        same(part.logits, whole.logits[:, 6:])
        if model.draws:
            assert float(whole.mutual_information.min()) > 0, name
    assert model.training


def test_variances_of_mixed_layers() -> None:
    told = predict(vision(("cgp", "softmax")), IMAGES, samples=2, variances=True).variances
    assert isinstance(told, tuple)
    assert told[0].shape == (20, 4, 4)
    assert told[1] is None


def test_text_with_padding() -> None:
    torch.manual_seed(0)
    config = TextConfig(
        depth=2, width=8, heads=2, vocabulary=30, embedding_width=6, attention="cgp", max_length=9
    )
    model = TextTransformer(config)
    tokens = torch.randint(1, 30, (12, 9), generator=seeded(3))
    padding = torch.arange(9) >= torch.randint(3, 10, (12, 1), generator=seeded(4))
    inputs = {"tokens": tokens.masked_fill(padding, 0), "padding_mask": padding}
    for predictor in (ModelPredictor(model, draw="joint"), MCDropout(model)):
        whole = predictor.predict(inputs, samples=4)
        same(predictor.predict(inputs, samples=4, batch_size=5).logits, whole.logits)
        assert float(whole.mutual_information.min()) > 0
