"""Whole numbers of whatever type are taken everywhere, and kept as Python's own."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gpattention
from gpattention import metrics
from gpattention.attention import build_attention
from gpattention.data.shifts import shift
from gpattention.evaluation import DeepEnsemble, GPLastLayer, LaplaceLastLayer, MCDropout, ModelPredictor
from gpattention.hosts import Conversion, FitOptions
from gpattention.metrics import streaming
from gpattention.models import TextConfig, VisionConfig, VisionTransformer
from gpattention.models.embeddings.vocabulary import Vocabulary
from gpattention.runs import Recipe
from gpattention.runs.recipe import OptimizerRecipe
from tests.hosts.hosts import Encoder

OTHERS: list[Callable[[int], Any]] = [
    np.int64, np.int32, np.int16, np.uint8, np.array, torch.tensor,
    lambda n: torch.tensor(n, dtype=torch.uint8), lambda n: type("Own", (), {"__index__": lambda _: n})(),
]  # fmt: skip
IDS = ["int64", "int32", "int16", "uint8", "array", "tensor", "byte tensor", "own"]
SMALL: dict[str, Any] = {"image_size": 8, "channels": 1, "width": 16, "depth": 1, "heads": 2, "classes": 3}
IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4) % 3
PROBS = torch.rand(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PROBS = PROBS / PROBS.sum(-1, keepdim=True)
every_type = pytest.mark.parametrize("of", OTHERS, ids=IDS)


def vision(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(VisionConfig(**SMALL | {"dropout": 0.2} | options)).eval()


def converted() -> torch.nn.Module:
    torch.manual_seed(0)
    return gpattention.convert(Encoder().eval(), "direct")


TOKENS = torch.rand(4, 5, 16, generator=torch.Generator().manual_seed(2))
PREDICTIONS: dict[str, Callable[..., Any]] = {
    "own model": lambda **o: vision().predict(IMAGES, **o),
    "handle": lambda **o: gpattention.attach(_encoder()).predict(TOKENS, **o),
    "converted": lambda **o: gpattention.predict(converted(), TOKENS, **o),
    "dropout": lambda **o: MCDropout(vision()).predict(IMAGES, **o),
    "ensemble": lambda **o: DeepEnsemble([ModelPredictor(vision())] * 3).predict(IMAGES, **o),
    "laplace": lambda **o: LaplaceLastLayer(vision()).fit(IMAGES, LABELS).predict(IMAGES, **o),
    "gp layer": lambda **o: (
        GPLastLayer(vision(), features=8, prior_variance=1.0).fit(IMAGES, LABELS).predict(IMAGES, **o)
    ),
}


def _encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@every_type
@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions(name: str, of: Callable[[int], Any]) -> None:
    """Numbers near the end of a byte: sums of them must not wrap around."""
    given = {"samples": 3, "seed": 120, "batch_size": 100, "first_item": 120}
    expected = PREDICTIONS[name](**given).logits
    found = PREDICTIONS[name](**{key: of(value) for key, value in given.items()}).logits
    assert torch.equal(found, expected)


METRICS: dict[str, Callable[[Any], Any]] = {
    "ece": lambda n: metrics.ece(PROBS, LABELS.repeat(5), bins=n),
    "classwise": lambda n: metrics.classwise_ece(PROBS, LABELS.repeat(5), bins=n),
    "adaptive": lambda n: metrics.adaptive_ece(PROBS, LABELS.repeat(5), bins=n),
    "batches": lambda n: metrics.ece(PROBS, LABELS.repeat(5), batch_size=n),
    "streaming": lambda n: streaming.ECE(bins=n)(PROBS, LABELS.repeat(5)),
    "shift": lambda n: shift(IMAGES, "turned", 2, seed=n, first_item=n),
}


@every_type
@pytest.mark.parametrize("name", METRICS)
def test_metrics_and_data(name: str, of: Callable[[int], Any]) -> None:
    assert torch.equal(torch.as_tensor(METRICS[name](of(7))), torch.as_tensor(METRICS[name](7)))


def plain_everywhere(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(plain_everywhere, x.values()))
    return (
        all(map(plain_everywhere, x)) if isinstance(x, list | tuple) else type(x) in (int, float, str, bool)
    )


@every_type
def test_configurations_are_json(of: Callable[[int], Any]) -> None:
    whole = {"classes": 3, "depth": 1, "width": 16, "heads": 2, "mlp_width": 8}
    given = {name: of(value) for name, value in whole.items()}
    image = VisionConfig(**given, channels=of(1), patch=of(4))
    text = TextConfig(**given, vocabulary=of(50), max_length=of(9))
    for config, same in (
        (image, VisionConfig(**whole, channels=1, patch=4)),
        (text, TextConfig(**whole, vocabulary=50, max_length=9)),
    ):
        described = config.to_dict()
        assert described == same.to_dict()
        assert plain_everywhere(described)
        assert json.loads(json.dumps(described)) == described
    assert type(Conversion("direct", seed=of(3)).seed) is int
    options = FitOptions(samples=of(4), steps=of(2), items=of(20), seed=of(7))
    assert (options.samples, options.steps, options.items, options.seed) == (4, 2, 20, 7)
    assert {type(x) for x in (options.samples, options.steps, options.items, options.seed)} == {int}
    assert len(Vocabulary.from_sentences([["a", "b"]], min_count=of(1), max_size=of(3)).words) == 1


@pytest.mark.parametrize("of", OTHERS[:-1], ids=IDS[:-1])
def test_options_of_attention_and_recipes(of: Callable[[int], Any]) -> None:
    scgp = build_attention("scgp", embed_dim=of(16), num_heads=of(2), num_inducing=of(4))
    assert type(scgp.embed_dim) is type(scgp.num_heads) is int
    config = VisionConfig(**SMALL, attention=(_scgp(of),))
    assert json.loads(json.dumps(config.to_dict()))["attention"][0]["options"] == {
        "num_inducing": 4, "noise": 0.5
    }  # fmt: skip
    recipe = Recipe(seed=of(3), optimizer=OptimizerRecipe(batch_size=of(8)))
    assert type(recipe.seed) is type(recipe.optimizer.batch_size) is int


def _scgp(of: Callable[[int], Any]) -> Any:
    from gpattention.models.config import AttentionConfig

    return AttentionConfig("scgp", {"num_inducing": of(4), "noise": np.float32(0.5)})


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25), np.array(0.25)])
def test_fractions(value: Any) -> None:
    config = VisionConfig(**SMALL, dropout=value)
    assert config.dropout == 0.25
    assert type(config.dropout) is float
    assert type(OptimizerRecipe(learning_rate=value).learning_rate) is float
    assert type(build_attention("softmax", embed_dim=8, num_heads=2, dropout=value).dropout.p) is float


BAD: list[Any] = [
    True, np.bool_(True), torch.tensor(True), 2.0, np.float32(2), np.float64(2), torch.tensor(2.0), "2", None,
    [2], np.array([2]), torch.tensor([2]), Tensor, -1, np.int64(-1),
]  # fmt: skip


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected samples to be a whole number >= 0, got"):
        vision().predict(IMAGES, samples=value)
    with pytest.raises(ValueError, match="expected depth to be a whole number >= 1, got"):
        VisionConfig(**SMALL | {"depth": value})
    with pytest.raises(ValueError, match="expected bins to be a whole number >= 1, got"):
        metrics.ece(PROBS, LABELS.repeat(5), bins=value)
