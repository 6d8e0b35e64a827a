"""Items worth looking at, with the variance at their tokens; health by layer."""

import pytest
import torch

from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites import gallery, health_table
from gpattention.models import predict
from tests.models.small_models import seeded, sentences, text, vision

CPU = torch.device("cpu")
CLASSES = ("red", "green", "blue")


def pixels(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=seeded(0), dtype=torch.uint8)


def normalised(stored: torch.Tensor) -> torch.Tensor:
    return stored.double() / 255


@pytest.fixture(scope="module")
def made() -> tuple:
    model = vision("softmax", "cgp")
    items = ItemSet("test", pixels(30), torch.randint(3, (30,), generator=seeded(1)), normalised)
    raw = predict(model, items.inputs(0, 30, CPU), samples=4)
    found = Predicted.from_logits(raw.logits, items.labels)
    return model, items, found, gallery(model, items, found, CLASSES, CPU)


def test_which_items(made: tuple) -> None:
    _, items, found, shown = made
    confidence = found.prediction.confidence
    certain = [entry["confidence"] for entry in shown["most_certain"]]
    assert certain == sorted(confidence.tolist(), reverse=True)[:8]
    assert [entry["confidence"] for entry in shown["least_certain"]] == sorted(confidence.tolist())[:8]
    right = found.prediction.probs[torch.arange(30), items.labels]
    wrong = [i for i in range(30) if found.prediction.label[i] != items.labels[i]]
    assert [entry["index"] for entry in shown["most_wrong"]] == sorted(wrong, key=lambda i: right[i])[:8]


def test_what_is_told_of_an_item(made: tuple) -> None:
    model, items, found, shown = made
    for entry in (each for kind in shown.values() for each in kind):
        place = entry["index"]
        assert entry["label"] == CLASSES[items.labels[place]]
        assert entry["predicted"] == CLASSES[found.prediction.label[place]]
        assert entry["uncertainty"] == float(found.prediction.entropy[place])
        assert torch.tensor(entry["image"]).equal(items.stored[place].permute(1, 2, 0).long())
        assert (entry["grid"], entry["words"]) == ([2, 2], None)
        one = predict(model, items.inputs(place, place + 1, CPU), samples=0, variances=True)
        assert entry["token_variance"] == pytest.approx(one.variances[1].mean(1)[0].tolist())


def test_words_and_padding() -> None:
    model, x = text("cgp"), sentences(2, 5, 3)
    words = tuple(tuple(f"w{i}" for i in range(n)) for n in (2, 5, 3))
    items = ItemSet("test", {"tokens": x}, torch.tensor([0, 1, 2]), words=words)
    found = Predicted.from_logits(predict(model, {"tokens": x}, samples=2).logits, items.labels)
    shown = gallery(model, items, found, CLASSES, CPU)
    assert len(shown["most_certain"]) == 3
    for entry in shown["most_certain"]:
        assert entry["words"] == list(words[entry["index"]])
        assert len(entry["token_variance"]) == len(entry["words"])
        assert (entry["image"], entry["grid"]) == (None, None)


def test_a_model_without_variance_and_without_mistakes() -> None:
    model = vision("softmax")
    x = pixels(4).float() / 255  # decimals are pixels too
    raw = predict(model, x.double(), samples=0)
    items = ItemSet("test", x.double(), raw.label)
    shown = gallery(model, items, Predicted.from_logits(raw.logits, raw.label), CLASSES, CPU)
    assert shown["most_wrong"] == []
    assert {entry["token_variance"] for entry in shown["most_certain"]} == {None}
    first = shown["most_certain"][0]
    assert torch.tensor(first["image"]).equal(pixels(4)[first["index"]].permute(1, 2, 0).long())


def test_health_has_a_row_for_every_layer(made: tuple) -> None:
    model, items, _, _ = made
    rows = health_table(model, items, CPU)
    report = model.health(items.inputs(0, 30, CPU), items.labels)
    assert [row["kind"] for row in rows] == ["softmax", "cgp"]
    assert [row["variance_correlation"] for row in rows] == list(report.variance_correlation)
    assert rows[1]["stddev_ratio"] == report.layers[1].stddev_ratio
